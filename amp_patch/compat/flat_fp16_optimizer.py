"""The FP16_Optimizer of apex.contrib: one flat master a group, and state of its own layout."""

from __future__ import annotations

from typing import Any

from amp_patch.compat.fp16_optimizer import FP16_Optimizer as OptimizerOfMasters
from amp_patch.compat.loss_scalers import DynamicLossScaler

_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_INITIAL_SCALE = 2.0**16


class FP16_Optimizer(OptimizerOfMasters):  # noqa: N801 (its name in scripts)
    """As that of `apex.fp16_utils`, with the attributes and the state dict of `apex.contrib`.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2).half()
    >>> optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> [tuple(master.shape) for master in optimizer.param_groups[0]["params"]]
    [(10,)]
    """

    _is_flat = True

    @staticmethod
    def _dynamic_scaler(**arguments: Any) -> DynamicLossScaler:
        return DynamicLossScaler(**{"init_scale": _INITIAL_SCALE, **arguments})

    def __getattr__(self, name: str) -> Any:
        if name in _SCALER_KEYS:
            return getattr(self.loss_scaler, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def state_dict(self) -> dict[str, Any]:
        """Scaler, optimizer and flat masters, by the keys of old files."""
        scaler = vars(self.loss_scaler)
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_iter": 0,
            **{name: scaler[name] for name in _SCALER_KEYS if name in scaler},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups_flat": [group[0] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or the old package's. The model's weights follow."""
        scaler = {name: state_dict[name] for name in _SCALER_KEYS if name in state_dict}
        super().load_state_dict(
            {
                "loss_scaler": scaler,
                "dynamic_loss_scale": state_dict["dynamic_loss_scale"],
                "overflow": False,
                "first_closure_call_this_step": True,
                "optimizer_state_dict": state_dict["optimizer_state_dict"],
                "fp32_from_fp16": [[flat] for flat in state_dict["fp32_groups_flat"]],
            }
        )
