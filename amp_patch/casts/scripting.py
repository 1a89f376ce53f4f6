"""TorchScript beside the casts: it compiles source code, and sees neither wrappers nor hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import wrapt
from torch import nn

from amp_patch.casts.arguments import tensors
from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.errors import warn
from amp_patch.hooks import ModelHook
from amp_patch.policy import HALF_DTYPES


def make_scriptable(patcher: Patcher) -> None:
    """Let `torch.jit.script` take models with hooks of amp."""

    def script(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with _without_hooks(args[0] if args else kwargs.get("obj")):
            return wrapped(*args, **kwargs)

    _wrap_compiler(patcher, script)


def cast_scripted(patcher: Patcher, context: CastContext, wrappers: Mapping[int, Any]) -> None:
    """Cast inside scripted code when it runs, which wrappers do not reach.

    It runs under `torch.autocast` with the half dtype of the casts in force, by torch's own choice
    of operations. Traced code has its casts in the graph and runs as it is.
    """

    def script(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with _known_to_script(wrappers):
            return wrapped(*args, **kwargs)

    _wrap_compiler(patcher, script)

    def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with _autocast_of(context, instance, args, kwargs):
            return wrapped(*args, **kwargs)

    for kind in (torch.jit.ScriptModule, torch.jit.ScriptFunction):
        patcher.replace(kind, "__call__", wrapt.FunctionWrapper(kind.__call__, call))

    def call_method(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if instance.name == "forward":  # for the module to call, which knows if it was traced
            return wrapped(*args, **kwargs)
        return call(wrapped, instance, args, kwargs)

    method = torch._C.ScriptMethod
    patcher.replace(method, "__call__", wrapt.FunctionWrapper(method.__call__, call_method))


def _wrap_compiler(patcher: Patcher, call: Any) -> None:
    """Around what `torch.jit.script` calls: of that itself, other modules have references."""
    original: Any = torch.jit._script._script_impl  # type: ignore[attr-defined]
    patcher.replace(torch.jit._script, "_script_impl", wrapt.FunctionWrapper(original, call))


def _autocast_of(
    context: CastContext, scripted: Any, args: Any, kwargs: Any
) -> AbstractContextManager[Any]:
    dtype = context.active_dtype()
    if dtype is None or isinstance(scripted, torch.jit._trace.TopLevelTracedModule):
        return nullcontext()
    for tensor in tensors((*args, *kwargs.values())):
        return _autocast(context, tensor.device.type, dtype)
    return nullcontext()


@contextmanager
def _autocast(context: CastContext, device: str, dtype: torch.dtype) -> Iterator[None]:
    with context.suspended(), torch.autocast(device, dtype):
        yield


@contextmanager
def _known_to_script(wrappers: Mapping[int, Any]) -> Iterator[None]:
    """The compiler knows operations by their id: while it runs, by that of their wrapper too."""
    known: Any = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    added = {
        id(wrapper): known[key]
        for key, wrapper in wrappers.items()
        if key in known and id(wrapper) not in known
    }
    known.update(added)
    try:
        yield
    finally:
        for key in added:
            known.pop(key, None)


@contextmanager
def _without_hooks(model: Any) -> Iterator[None]:
    """The compiler would compile the hooks of amp as well, and cannot."""
    if not isinstance(model, nn.Module):
        yield
        return
    taken = [
        (hooks, dict(hooks))
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        if any(isinstance(hook, ModelHook) for hook in hooks.values())
    ]
    if taken and any(parameter.dtype in HALF_DTYPES for parameter in model.parameters()):
        warn(
            "torch.jit.script: the scripted model has half weights, and no casts at its entry and "
            "exit; pass it half tensors, script inside amp.full_precision(model), or use "
            "torch.jit.trace, which keeps the casts"
        )
    for hooks, _ in taken:
        for key in [key for key, hook in hooks.items() if isinstance(hook, ModelHook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, all_of_them in taken:
            hooks.clear()
            hooks.update(all_of_them)
