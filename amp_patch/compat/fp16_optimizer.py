"""Masters and a loss scale around any optimizer, for a model that was made half by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amp_patch.compat.loss_scalers import DynamicLossScaler, LossScaler
from amp_patch.compat.param_lists import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_master,
)
from amp_patch.errors import AmpError
from amp_patch.scaling import gradients
from amp_patch.scaling.optimizer_state import move_state

Groups = list[list[torch.Tensor]]


class FP16_Optimizer:  # noqa: N801 (its name in scripts)
    """Lets `init_optimizer` update FP32 masters of the half parameters in its groups.

    Use `optimizer.backward(loss)` in place of `loss.backward()`, then `step`. A step is skipped
    where a gradient is inf or NaN, at a static loss scale too. `backward` synchronises once.

        >>> model = torch.nn.Linear(4, 2).half()
        >>> optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.backward(model(torch.ones(1, 4).half()).sum())
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["params"][0].dtype
        torch.float32
    """

    _is_flat = False  # one master for all half parameters of a group

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.loss_scaler = LossScaler(static_loss_scale)
        if dynamic_loss_scale:
            self.loss_scaler = self._dynamic_scaler(**(dynamic_loss_args or {}))
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.verbose = verbose
        self.fp16_groups: Groups = []
        self.fp32_from_fp16_groups: Groups = []
        self.fp32_from_fp32_groups: Groups = []
        for group in init_optimizer.param_groups:
            self._take_over(group)

    @staticmethod
    def _dynamic_scaler(**arguments: Any) -> DynamicLossScaler:
        return DynamicLossScaler(**arguments)

    def _take_over(self, group: dict[str, Any]) -> None:
        halves = [p for p in group["params"] if p.requires_grad and p.dtype is torch.float16]
        masters = prep_master(halves, self._is_flat)
        for half, master in zip(halves, masters, strict=not self._is_flat):
            move_state(self.optimizer, half, master, master.dtype)
        ids = {id(half) for half in halves}
        floats = [p for p in group["params"] if id(p) not in ids]
        if self._is_flat:
            group["params"] = masters + floats
        else:
            of = dict(zip(map(id, halves), masters, strict=True))
            group["params"] = [of.get(id(p), p) for p in group["params"]]
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(floats)

    @property
    def loss_scale(self) -> float:
        """The present loss scale. Assigning to it sets it."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def state(self) -> Any:
        """That of the optimizer inside."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside, with the masters."""
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803 (its name in scripts)
        """Clear the gradients of the model and of the masters."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in _joined(self.fp16_groups):
            if set_grads_to_None or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = torch.zeros_like(parameter.grad)

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Backward of the scaled loss; then `update_master_grads`, unless told otherwise."""
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the model's gradients to the masters, unscale them and look for overflow."""
        for halves, masters in self._pairs():
            model_grads_to_master_grads(halves, masters, self._is_flat)
        masters = [*_joined(self.fp32_from_fp16_groups), *_joined(self.fp32_from_fp32_groups)]
        present = [p.grad for p in masters if p.grad is not None]
        self.overflow = gradients.any_found(gradients.unscale_(present, self.loss_scale))

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip the gradients of the masters. Returns their norm before, or -1 after an overflow."""
        if self.overflow:
            return -1
        masters = [*_joined(self.fp32_from_fp16_groups), *_joined(self.fp32_from_fp32_groups)]
        return nn.utils.clip_grad_norm_(masters, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]]:
        """The gradients of the masters, group by group; None where there is none."""
        return [[p.grad for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters and model, or skip. A `closure` calls `backward` itself."""
        if closure is not None:
            return self._step_with_closure(closure)
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            return None
        result = self.optimizer.step()
        self._write_model()
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def unscaled() -> Any:
            self._write_model()
            loss = closure()
            while self.overflow:
                before = self.loss_scale
                self.loss_scaler.update_scale(True)
                if self.loss_scale == before:
                    raise AmpError(
                        f"FP16_Optimizer.step: the closure overflows at loss scale {before:g}, "
                        "which cannot fall further; look for inf or NaN in the model"
                    )
                loss = closure()
            self.loss_scaler.update_scale(False)
            return loss

        result = self.optimizer.step(unscaled)
        self._write_model()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Scaler, optimizer and masters, by the keys of old files; plain values and tensors."""
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or the old package's. The model's weights follow."""
        scaler = state_dict["loss_scaler"]
        scaler = scaler if isinstance(scaler, dict) else vars(scaler)
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.loss_scaler = DynamicLossScaler() if self.dynamic_loss_scale else LossScaler()
        vars(self.loss_scaler).update(scaler)
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self._load(state_dict["optimizer_state_dict"], state_dict["fp32_from_fp16"])

    def _load(self, optimizer_state: dict[str, Any], saved: Sequence[Sequence[Any]]) -> None:
        shapes = [[p.shape for p in group] for group in self.fp32_from_fp16_groups]
        if shapes != [[p.shape for p in group] for group in saved]:
            raise AmpError(
                "FP16_Optimizer.load_state_dict: the masters in the state have other shapes, or "
                "are in other groups, than those of this optimizer; was the model built the same?"
            )
        self.optimizer.load_state_dict(optimizer_state)
        with torch.no_grad():
            for master, value in zip(
                _joined(self.fp32_from_fp16_groups), _joined(saved), strict=True
            ):
                master.copy_(value)
        self._write_model()

    def _pairs(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        both = zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True)
        return [(halves, masters) for halves, masters in both if halves]

    def _write_model(self) -> None:
        for halves, masters in self._pairs():
            master_params_to_model_params(halves, masters, self._is_flat)


def _joined(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for group in groups for one in group]
