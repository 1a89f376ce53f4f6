"""The state of an optimizer: moved between parameters, copied, put back, looked at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.errors import warn
from amp_patch.policy import CASTABLE, Policy


class ClosureOverflowError(Exception):
    """Carries the loss out of an optimizer's step whose closure overflowed. Users never see it."""

    def __init__(self, loss: Any) -> None:
        super().__init__("gradients overflowed inside a closure")
        self.loss = loss


def move_state(
    optimizer: Any, source: torch.Tensor, target: torch.Tensor, dtype: torch.dtype
) -> None:
    """Hand the optimizer's state of `source` to `target`, in `dtype` as torch keeps it."""
    state = getattr(optimizer, "state", None)
    if not state or source not in state:
        return
    moved = state.pop(source)
    for name, value in moved.items():
        is_cast = isinstance(value, torch.Tensor) and value.dtype in CASTABLE and name != "step"
        if is_cast and dtype in CASTABLE:  # torch leaves step counts in FP32 too
            moved[name] = value.to(dtype)
    state[target] = moved


def snapshot(optimizer: Any) -> Callable[[], None]:
    """Copy parameters and state of `optimizer`. Returns the function that puts them back.

    Optimizers that search along a line call their closure after they have moved the parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [parameter.detach().clone() for parameter in parameters]
    state = getattr(optimizer, "state", {})
    saved_state = [(key, copy.deepcopy(value)) for key, value in state.items()]

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)
        if saved_state or state:
            state.clear()
            state.update(saved_state)

    return restore


def warn_of_vanishing_eps(optimizer: Any, policy: Policy) -> None:
    """Warn where Adam and its kin would divide by an eps that is 0 in the dtype of the weights.

    Not an optimizer whose attribute `computes_in_fp32` is true.
    """
    if policy.cast_model_type is not torch.float16 or policy.master_weights:
        return
    if getattr(optimizer, "computes_in_fp32", False):
        return
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and eps > 0 and torch.tensor(eps, dtype=torch.float16) == 0:
            warn(
                f"eps={eps:g} of {type(optimizer).__name__} is 0 in float16, and its update "
                "divides by zero; pass eps=1e-4 or so, or use 'O2', whose optimizer works in FP32"
            )
            return
