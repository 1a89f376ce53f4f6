"""Steps whose kernel leaves everything as it was if the device says that there is an overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def skips_by_itself(optimizer: Any) -> bool:
    """Whether a step of `optimizer` looks at `found_inf`, and leaves no trace where it is set.

    A first step leaves one: torch makes the state before the kernel runs.
    """
    kind = type(optimizer)
    if kind not in _OF_TORCH or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    state = optimizer.state
    return all(
        group.get("momentum") == 0 or _has_state(state.get(parameter))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def step_unless(
    overflow: torch.Tensor, optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A step that changes nothing if `overflow`, on a device, is 1.0. Does not wait for it."""
    optimizer.found_inf = overflow
    try:
        return step(*args, **kwargs)
    finally:
        del optimizer.found_inf


# Their subclasses may do more in `step` than run the kernel.
_OF_TORCH = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})


def _has_state(state: Any) -> bool:
    return bool(state) and state.get("momentum_buffer", 0) is not None
