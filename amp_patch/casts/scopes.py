"""The forward of a model as a scope: inside it, operations are cast as its own policy says."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.hooks import ModelHook


class _EnterScope(ModelHook):
    def __init__(
        self, context: CastContext, half_dtype: torch.dtype | None, *, is_cast: bool
    ) -> None:
        self.context = context
        self.half_dtype = half_dtype
        self.is_cast = is_cast
        self.known: Any = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # such code has its scope from where it is called
            return
        if self.known is None or self.known() is not module:
            self.known = weakref.ref(module)
            self.context.clear_cache_after(module)
        self.context.enter(module, self.half_dtype, is_cast=self.is_cast, frame=sys._getframe(1))


class _LeaveScope(ModelHook):
    def __init__(self, context: CastContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            self.context.leave(module)


def scope_model(
    model: nn.Module,
    context: CastContext,
    half_dtype: torch.dtype | None,
    patcher: Patcher,
    *,
    is_cast: bool = True,
) -> None:
    """Make every forward of `model` a scope with `half_dtype`; None suspends casts inside it.

    `is_cast` says whether amp casts the model in any way, so that `torch.autocast` must not.
    The scope is the outermost thing around the forward: first to begin, and last to end, also when
    the forward raises. Scripted modules take no such hooks and run in what holds outside.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return
    enter = model.register_forward_pre_hook(
        _EnterScope(context, half_dtype, is_cast=is_cast), prepend=True
    )
    patcher.on_restore(enter.remove)
    leave = model.register_forward_hook(_LeaveScope(context), always_call=True)
    patcher.on_restore(leave.remove)
