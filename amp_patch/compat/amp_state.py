"""The object `_amp_state` that scripts read and write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.compat.scalers import LossScalers
from amp_patch.errors import AmpError, warn
from amp_patch.policy import Policy
from amp_patch.scaling.ranks import rank
from amp_patch.slot import slot

logger = logging.getLogger("amp_patch")

_READ = (
    "opt_level",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "cast_model_outputs",
)


class Properties:
    """What the last `initialize` has decided. `enabled` and `loss_scale` may be written.

    Other writes come too late for the objects that are initialized, and raise AmpError.
    """

    enabled: bool
    loss_scale: Any

    def __init__(
        self, policy: Policy | None = None, adopt: Callable[[Any], None] | None = None
    ) -> None:
        values: dict[str, Any] = {"enabled": policy is not None, "opt_level": None}
        if policy is not None:
            values.update({name: getattr(policy, name) for name in _READ})
            uncast = torch.float32 if policy.opt_level == "O0" else None
            values["cast_model_type"] = policy.cast_model_type or uncast
            values["loss_scale"] = policy.loss_scale
        vars(self).update(options=values, _adopt=adopt)

    def __getattr__(self, name: str) -> Any:
        options = vars(self).get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("enabled", "loss_scale"):
            raise AmpError(
                f"opt_properties.{name}: expected enabled or loss_scale, which can be changed "
                f"after initialize; pass {name}={value!r} to initialize"
            )
        if name == "loss_scale" and self._adopt is not None:
            self._adopt(value)
        self.options[name] = value


class AmpState:
    """What scripts reach as `apex.amp._amp_state`.

    `loss_scalers` and `opt_properties` are there from `initialize` on. `handle` is that of
    `amp.init` or of `initialize`. `allow_incoming_model_not_fp32` lets half models into O2 and O3,
    where they need no leave. `opt_level` replaces what scripts ask for, if it is set.
    """

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.handle: Any = None
        self.opt_level: str | None = None
        self._properties: Properties | None = None
        self._loss_scalers = LossScalers()

    @property
    def loss_scalers(self) -> LossScalers:
        """The loss scalers of now."""
        if slot.session is None or slot.session.is_idle:
            raise AttributeError("loss_scalers: there are none before amp.initialize")
        return self._loss_scalers

    @property
    def opt_properties(self) -> Properties:
        """What the last `initialize` has decided."""
        if self._properties is None:
            raise AttributeError("opt_properties: there are none before amp.initialize")
        return self._properties

    @property
    def is_switched_off(self) -> bool:
        """Whether the last `initialize`, or a write to `opt_properties`, has disabled amp."""
        return self._properties is not None and not self._properties.enabled

    def note(self, policy: Policy | None, num_losses: int) -> None:
        """Take note of an `initialize` call; None for a disabled one."""

        def adopt(loss_scale: Any) -> None:
            for scaler in self._loss_scalers[:num_losses]:
                scaler.adopt(loss_scale)

        self._properties = Properties(policy, adopt)

    def reset(self) -> None:
        """Be as new."""
        self.__init__()  # type: ignore[misc]


amp_state = AmpState()


def maybe_print(message: str, rank0: bool = False) -> None:
    """Log `message` if verbosity allows; on rank 0 only if asked so."""
    if amp_state.verbosity > 0 and not (rank0 and rank() > 0):
        logger.info("%s", message)


def warn_or_err(message: str) -> None:
    """AmpError, or a warning where `hard_override` says so."""
    if not amp_state.hard_override:
        raise AmpError(message)
    warn(message)
