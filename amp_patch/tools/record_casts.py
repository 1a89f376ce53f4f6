"""Record which casts happen, where, and by which rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import wrapt
from torch import nn

from amp_patch.casts.patcher import Patcher
from amp_patch.casts.wrappers import CastWrapper, OperationWrapper
from amp_patch.errors import AmpError
from amp_patch.slot import slot
from amp_patch.tools.call_sites import is_called_by_amp
from amp_patch.tools.cast_recorder import CastRecorder
from amp_patch.tools.cast_report import CastReport
from amp_patch.tools.module_paths import ModuleStack
from amp_patch.weights.model_casting import CastInputs, CastOutputs

_EXPLICIT = ("to", "half", "bfloat16", "float", "type")


@contextmanager
def record_casts() -> Iterator[CastReport]:
    """Inside, each cast is counted: `with amp.record_casts() as report:` around any code.

    For every operation that has a rule, at every line that calls it in every module: its calls, the
    dtype it ran in, the rule that decided, the casts made, those the cache saved, and the bytes
    that casts moved. Casts at a model's entry and exit (O2, O3, O5) and those that the code itself
    asks for (`x.half()`) are counted too. `print(report)` shows them by their cost, with advice.

    Records the whole process; code that is compiled is not seen. Slow inside, free outside: only
    while a recording runs do the wrappers do more than cast. The cast cache is empty at the start.
    Raises AmpError inside another recording, and where amp is not in use.

        >>> import amp_patch as amp
        >>> model = amp.initialize(torch.nn.Linear(8, 8, bias=False), opt_level="O1", verbosity=0)
        >>> with amp.record_casts() as report:
        ...     _ = model(torch.ones(8, 8))
        >>> (record,) = report.records
        >>> record.place.operation, record.place.rule, record.casts, record.cast_bytes
        ('F.linear', 'HALF', 2, 768)
        >>> amp.uninitialize()
    """
    session = slot.require("record_casts")
    if _is_recording():
        raise AmpError("record_casts: expected no recording inside another; end the first one")
    report = CastReport()
    modules = _WatchedModules(Patcher())
    recorder = CastRecorder(report, session.context, modules)
    modules.recorder = recorder
    session.context.cache.clear()
    try:
        with modules.following():
            _watch_wrappers(modules.patcher, recorder)
            _watch_explicit_casts(modules.patcher, recorder)
            yield report
    finally:
        modules.patcher.restore()


def _is_recording() -> bool:
    return isinstance(vars(torch.Tensor).get("half"), _ExplicitCast)


class _WatchedModules(ModuleStack):
    """Also finds the hooks that cast what goes into a model and comes out of it."""

    def __init__(self, patcher: Patcher) -> None:
        super().__init__()
        self.patcher = patcher
        self.recorder: CastRecorder | None = None
        self._known: set[int] = set()

    def entered(self, module: nn.Module) -> None:
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            for hook in vars(module).get(name, {}).values():
                is_cast = isinstance(hook, (CastInputs, CastOutputs))
                if is_cast and id(hook) not in self._known and self.recorder is not None:
                    self._known.add(id(hook))
                    recording = _RecordedHook(hook, self.recorder, self.path_of(module))
                    self.patcher.replace(hook, "cast", recording)


class _RecordedHook:
    """In place of the `cast` of a hook at the entry or exit of a model."""

    def __init__(self, hook: CastInputs | CastOutputs, recorder: CastRecorder, path: str) -> None:
        self._cast = hook.cast
        self._recorder = recorder
        self._path = path  # at the exit the module runs no longer
        self._name = "entry" if isinstance(hook, CastInputs) else "exit"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = self._cast(tensor)
        if cast is not tensor:
            recorder = self._recorder
            record = recorder.report.at(recorder.place(f"model {self._name}", "MODEL", self._path))
            record.calls += 1
            recorder.note_cast(record, tensor, cast)
        return cast


def _watch_wrappers(patcher: Patcher, recorder: CastRecorder) -> None:
    """Let every wrapper of this process do what it did, and tell."""
    for wrapper in slot.require("record_casts").casts.all_wrappers:
        patcher.on_restore(_Restored(wrapper, wrapper.call))
        if isinstance(wrapper, OperationWrapper):
            wrapper.set_call(recorder.recording_call(wrapper))
        else:
            wrapper.set_call(recorder.recording_user_call(wrapper))


class _Restored:
    """Gives a wrapper back what it called."""

    def __init__(self, wrapper: CastWrapper, call: Any) -> None:
        self._wrapper = wrapper
        self._call = call

    def __call__(self) -> None:
        self._wrapper.set_call(self._call)


class _ExplicitCast(wrapt.FunctionWrapper[..., Any]):
    """In place of a method of `torch.Tensor` by which code asks for a cast."""

    def __init__(self, name: str, original: Any, recorder: CastRecorder) -> None:
        def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            if torch.compiler.is_compiling() or not isinstance(result, torch.Tensor):
                return result
            source = args[0] if instance is None else instance
            if result.dtype is not source.dtype and not is_called_by_amp(1):
                record = recorder.report.at(recorder.place(f"Tensor.{name}", "EXPLICIT"))
                record.calls += 1
                recorder.note_cast(record, source, result)
            return result

        super().__init__(original, call)


def _watch_explicit_casts(patcher: Patcher, recorder: CastRecorder) -> None:
    for name in _EXPLICIT:
        original = getattr(torch.Tensor, name)
        patcher.replace(torch.Tensor, name, _ExplicitCast(name, original, recorder))
