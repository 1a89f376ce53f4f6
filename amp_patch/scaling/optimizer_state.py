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
    """Hand the optimizer's state of `source` to `target`, in `dtype` as torch keeps it.

    Also that of optimizers inside of it.
    """
    for state in map(_state_of, _with_inner(optimizer)):
        if not state or source not in state:
            continue
        moved = state.pop(source)
        for name, value in moved.items():
            if name != "step" and dtype in CASTABLE:  # torch leaves step counts in FP32 too
                moved[name] = _cast(value, dtype)
        state[target] = moved


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in CASTABLE else value
    if type(value) in (list, tuple):  # LBFGS keeps a history
        return type(value)(_cast(one, dtype) for one in value)
    return value


def snapshot(optimizer: Any) -> Callable[[], None]:
    """Copy parameters, state and the values in the groups. Returns what puts them back.

    Optimizers that search along a line call their closure after they have moved the parameters.
    Learning rates are left to the schedulers.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [parameter.detach().clone() for parameter in parameters]
    groups = [
        (group, {name: value for name, value in group.items() if name not in ("params", "lr")})
        for group in optimizer.param_groups
    ]
    saved_groups = [copy.deepcopy(values) for _, values in groups]
    states = [_state_of(one) for one in _with_inner(optimizer)]
    saved_states = [
        [(key, copy.deepcopy(value)) for key, value in state.items()] for state in states
    ]

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)
        for (group, objects), values in zip(groups, saved_groups, strict=True):
            _restore_group(group, objects, values)
        for state, rows in zip(states, saved_states, strict=True):
            if rows or state:
                state.clear()
                state.update(rows)

    return restore


def _restore_group(group: dict[str, Any], objects: dict[str, Any], values: dict[str, Any]) -> None:
    for name in set(group) - set(objects) - {"params", "lr"}:
        del group[name]
    for name, value in values.items():
        if isinstance(value, torch.Tensor):  # others may hold it
            group[name] = objects[name].copy_(value)
        else:
            group[name] = value


def _state_of(optimizer: Any) -> Any:
    return getattr(optimizer, "state", {})


def _with_inner(optimizer: Any) -> list[Any]:
    """The optimizer, and those that it keeps as attributes to take its steps, as SAM does."""
    found = [optimizer]
    for one in found:  # grows
        inner = [
            value
            for value in getattr(one, "__dict__", {}).values()
            if isinstance(value, torch.optim.Optimizer)
        ]
        found += [value for value in inner if not any(value is other for other in found)]
    return found


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
