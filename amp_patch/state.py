"""The public functions that read and set state: checkpoints, loss scales, skipped steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from amp_patch.errors import AmpError
from amp_patch.parsing import parse_dtype
from amp_patch.policy import CASTABLE
from amp_patch.scaling.overflow_report import OverflowReport
from amp_patch.slot import slot


def state_dict() -> dict[str, dict[str, float | int]]:
    """The loss scales, to save beside model and optimizer: plain numbers.

    `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`; the scalers of the newest
    `initialize` call come first. Empty with `enabled=False`.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> amp.state_dict()
        {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
        >>> amp.uninitialize()
    """
    return slot.require("state_dict").scalers.state_dict()


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Set the loss scales from what `state_dict` gave, matched by name, all or nothing.

    Names that exist on one side only are reported in an `AmpWarning`. Raises AmpError, and loads
    nothing, where an entry is malformed.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}})
        >>> amp.loss_scale()
        1024.0
        >>> amp.uninitialize()
    """
    session = slot.require("load_state_dict")
    if not isinstance(state, Mapping):
        raise AmpError(f"load_state_dict: expected a dict, found {state!r}")
    if not session.is_idle:
        session.scalers.load_state_dict(state)


def model_state_dict(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """`model.state_dict()`, with its float16, bfloat16 and float32 tensors in `dtype` if given.

    For a file of half the size: `torch.save(amp.model_state_dict(model, torch.float16), path)`.
    The FP32 state, from which training resumes exactly, is `model.state_dict()` itself.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> amp.model_state_dict(model, torch.float16)["weight"].dtype
        torch.float16
        >>> amp.uninitialize()
    """
    state: dict[str, Any] = model.state_dict()
    wanted = parse_dtype("dtype", dtype)
    if wanted is None:
        return state
    return {
        name: value.to(wanted) if getattr(value, "dtype", None) in CASTABLE else value
        for name, value in state.items()
    }


def loss_scale(loss_id: int = 0) -> float:
    """The present loss scale of `loss_id`; 1.0 with `enabled=False`.

    Does not synchronise, except after steps of fused optimizers that have skipped by themselves, or
    might have: then it waits once for what became of them.

    >>> import amp_patch as amp
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    >>> amp.loss_scale()
    65536.0
    >>> amp.uninitialize()
    """
    session = slot.require("loss_scale")
    return 1.0 if session.is_idle else session.scalers.scaler(loss_id).scale


def last_overflow() -> OverflowReport | None:
    """What is known of the latest overflow, or None: which gradients, and whether a scale helps.

    Its `gradients` name the parameters by their paths, with counts of inf and NaN and the largest
    finite value; `may_smaller_scale_help` is False where the loss itself was inf or NaN. There are
    no names for a step that a fused optimizer skipped by itself. Synchronises as `loss_scale` does.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> loss = model(torch.full((1, 4), 100.0)).sum()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> found = amp.last_overflow()
        >>> str(found.gradients[0]), found.loss_scale, found.may_smaller_scale_help
        ('weight (8 inf, 0 nan of 8)', 65536.0, True)
        >>> amp.uninitialize()
    """
    return slot.require("last_overflow").scalers.last_overflow()


def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last `step` of `optimizer` was skipped because of an overflow.

    Hold a per-step schedule with it: `if not amp.step_was_skipped(optimizer): scheduler.step()`.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> optimizer.step()
        >>> amp.step_was_skipped(optimizer)
        False
        >>> amp.uninitialize()
    """
    binding = slot.require("step_was_skipped").binding_of(optimizer, "step_was_skipped")
    return binding is not None and binding.outcome.was_skipped


def step_will_be_skipped(optimizer: Any) -> bool:
    """Whether gradients overflowed since the last `step`, so that the next one is skipped.

    For optimizers that move weights by other methods than `step`: call `zero_grad` and go on to the
    next batch if it says so. Synchronises if a check was delayed by `delay_overflow_check`.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> amp.step_will_be_skipped(optimizer)
        False
        >>> amp.uninitialize()
    """
    binding = slot.require("step_will_be_skipped").binding_of(optimizer, "step_will_be_skipped")
    return binding is not None and binding.window.will_skip()
