"""What else of torch must know of casts: compiled code, recomputation, fused attention."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.utils.checkpoint
import wrapt

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.scripting import make_scriptable


def adjust_surroundings(patcher: Patcher, context: CastContext) -> None:
    """Make torch's own machinery agree with the casts, until `patcher` restores it."""
    _forget_compiled_code()
    patcher.on_restore(_forget_compiled_code)
    _recompute_in_scope(patcher, context)
    # In eval mode nn.MultiheadAttention calls one fused kernel, and no function with a cast.
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    patcher.on_restore(lambda: torch.backends.mha.set_fastpath_enabled(was_enabled))
    torch.backends.mha.set_fastpath_enabled(False)


def meet_torchs_own_amp_and_script(patcher: Patcher, context: CastContext) -> None:
    """The same for models at any level: in regions of `torch.autocast`, and when scripted."""
    make_scriptable(patcher)
    _notice_autocast(patcher, context)


def _forget_compiled_code() -> None:
    """Code that torch.compile made with casts must not run without them, nor the other way."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _recompute_in_scope(patcher: Patcher, context: CastContext) -> None:
    """Activation checkpointing runs a part of the forward again: with the casts it had.

    Patched where both of its variants take the function to run again, below the public function,
    of which other modules have references.
    """

    def with_function(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        function, *rest = args
        return wrapped(functools.partial(_run_in, context.captured(), function), *rest, **kwargs)

    def with_state_and_function(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        state, function, *rest = args
        scoped = functools.partial(_run_in, context.captured(), function)
        return wrapped(state, scoped, *rest, **kwargs)

    for owner, name, call in (
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", with_function),
        (torch.utils.checkpoint.CheckpointFunction, "forward", with_state_and_function),
    ):
        patcher.replace(owner, name, wrapt.FunctionWrapper(vars(owner)[name], call))


def _run_in(scope: Any, function: Any, /, *inputs: Any, **keywords: Any) -> Any:
    with scope():
        return function(*inputs, **keywords)


def _notice_autocast(patcher: Patcher, context: CastContext) -> None:
    """In a region of `torch.autocast` torch casts, and nobody else."""
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__

    @functools.wraps(enter)
    def enter_and_tell(region: torch.autocast) -> Any:
        result = enter(region)
        if torch.is_autocast_enabled(region.device) and not torch.compiler.is_compiling():
            context.enter_autocast(region)
        return result

    @functools.wraps(leave)
    def leave_and_tell(region: torch.autocast, *exception: Any) -> Any:
        if not torch.compiler.is_compiling():
            context.leave(region)
        return leave(region, *exception)

    patcher.replace(torch.autocast, "__enter__", enter_and_tell)
    patcher.replace(torch.autocast, "__exit__", leave_and_tell)
