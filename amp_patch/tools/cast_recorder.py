"""Take note of what each wrapper does to the arguments of a call, while a recording runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_patch.casts.casters import casting_call
from amp_patch.casts.context import CastContext
from amp_patch.casts.rules import CastRule
from amp_patch.casts.wrappers import CastWrapper, OperationWrapper
from amp_patch.policy import CASTABLE
from amp_patch.tools.call_sites import call_site
from amp_patch.tools.cast_report import SHORT, CastRecord, CastReport, Place, tensor_bytes
from amp_patch.tools.matrix_sizes import matrix_sizes
from amp_patch.tools.module_paths import ModuleStack

_ISLANDS = frozenset({CastRule.FLOAT, CastRule.FLOAT_THROUGHOUT, CastRule.NORM})


class CastRecorder:
    """Fills a report. Knows casts by their identity: an argument that became another tensor."""

    def __init__(self, report: CastReport, context: CastContext, modules: ModuleStack) -> None:
        self.report = report
        self.modules = modules
        self._context = context
        self._kept: dict[int, weakref.ref[Tensor]] = {}  # casts of weights that were seen made
        self._states: dict[tuple[int, torch.dtype], tuple[Any, int, int]] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], CastRecord]] = {}
        self._is_busy = False

    def recording_call(self, wrapper: OperationWrapper) -> Callable[..., Any]:
        """What a wrapper calls while the recording runs: what it called before, looked at."""
        row, before, name = wrapper.row, wrapper.call, _name_of(wrapper)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_idle():
                return before(*args, **kwargs)
            one = _OneCall(self, row.rule, name, (args, kwargs))
            result = casting_call(one.spied(wrapper.__wrapped__), row, self._context)(
                *args, **kwargs
            )
            one.note_result(result)
            return result

        return call

    def recording_user_call(self, wrapper: CastWrapper) -> Callable[..., Any]:
        """The same for a function of the user."""
        rule, before, name = wrapper.row.rule, wrapper.call, _name_of(wrapper)

        def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if self._is_idle():
                return before(wrapped, instance, args, kwargs)
            one = _OneCall(self, rule, name, (args, kwargs))
            result = before(one.spied(wrapped), instance, args, kwargs)
            one.note_result(result)
            return result

        return call

    def place(self, operation: str, rule: str, module: str | None = None) -> Place:
        """Here and now; in the module that is running, unless another is named."""
        return Place(operation, call_site(), self.modules.path if module is None else module, rule)

    def note_cast(self, record: CastRecord, source: Tensor, cast: Tensor) -> None:
        """`source` was replaced by `cast` on the way into the operation, or out of it."""
        if isinstance(source, Parameter) and self._is_kept(cast):
            record.saved += 1
            return
        record.casts += 1
        moved = tensor_bytes(source) + tensor_bytes(cast)
        record.cast_bytes += moved
        if isinstance(source, Parameter):
            self._kept[id(cast)] = weakref.ref(cast)
            self._note_weight(record, source, cast.dtype)
        origin = self._origins.get(id(source))
        if origin is not None and origin[0]() is source:
            origin[1].round_trips += 1
        self._watch_backward(record, cast, moved)

    def note_origin(self, record: CastRecord, result: Any) -> None:
        """`result` was computed from arguments that had been cast up."""
        for tensor in _tensors((result,)):
            self._origins[id(tensor)] = (weakref.ref(tensor), record)

    def largest(self, values: Any) -> float:
        """The largest magnitude among the tensors in `values`."""
        self._is_busy = True
        try:
            with torch.no_grad(), self._context.suspended():
                found = [float(one.abs().max()) for one in _tensors(values) if one.numel()]
        finally:
            self._is_busy = False
        return max(found, default=0.0)

    def _is_idle(self) -> bool:
        is_cast = self._context.active_dtype() is not None
        return self._is_busy or not is_cast or torch.compiler.is_compiling()

    def _is_kept(self, cast: Tensor) -> bool:
        known = self._kept.get(id(cast))
        return known is not None and known() is cast

    def _note_weight(self, record: CastRecord, weight: Parameter, dtype: torch.dtype) -> None:
        """Count a cast of a weight that has not changed since its last one."""
        state = (weakref.ref(weight), weight._version, weight.data_ptr())
        known = self._states.get((id(weight), dtype))
        if known is not None and known[0]() is weight and known[1:] == state[1:]:
            name = f"of shape {tuple(weight.shape)}"
            record.repeated[name] = record.repeated.get(name, 0) + 1
        self._states[id(weight), dtype] = state

    def _watch_backward(self, record: CastRecord, cast: Tensor, moved: int) -> None:
        if cast.grad_fn is None or not torch.is_grad_enabled():
            return

        def count(gradients: Any) -> None:
            if any(gradient is not None for gradient in gradients):
                record.backward_casts += 1
                record.backward_bytes += moved

        cast.grad_fn.register_prehook(count)


class _OneCall:
    """One call of one operation, from the arguments as the user gave them to the result."""

    def __init__(self, recorder: CastRecorder, rule: CastRule, name: str, given: Any) -> None:
        self._recorder = recorder
        self._rule = rule
        self._given = list(_tensors(given))
        self._record = recorder.report.at(recorder.place(name, rule.name))
        self._raw: list[Tensor] = []
        self._is_raised = False

    def spied(self, original: Any) -> Any:
        """`original`, with a look at the arguments that reach it."""

        def spy(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._note(args, kwargs, result)
            return result

        return spy

    def note_result(self, result: Any) -> None:
        """What the caller gets: cast once more by some rules."""
        final = list(_tensors((result,)))
        for raw, tensor in zip(self._raw, final, strict=False):
            if tensor is not raw and tensor.dtype is not raw.dtype:
                self._recorder.note_cast(self._record, raw, tensor)
        if self._is_raised:
            self._recorder.note_origin(self._record, result)

    def _note(self, args: Any, kwargs: Any, result: Any) -> None:
        recorder, record = self._recorder, self._record
        used = list(_tensors((args, kwargs)))
        self._raw = list(_tensors((result,)))
        record.calls += 1
        for source, tensor in zip(self._given, used, strict=False):
            if tensor is not source and tensor.dtype is not source.dtype:
                recorder.note_cast(record, source, tensor)
                self._is_raised |= tensor.dtype is torch.float32
        if used:
            widest = max(used, key=lambda one: one.element_size())
            record.dtypes[SHORT[widest.dtype]] += 1
        size = matrix_sizes(record.place.operation, args, kwargs)
        if size is not None:
            record.sizes.add(size)
        if self._is_raised and self._rule in _ISLANDS:
            record.largest = max(record.largest, recorder.largest((used, result)))


def _name_of(wrapper: CastWrapper) -> str:
    name = wrapper.row.qualified_name.replace(":", ".").removeprefix("torch.")
    return name.replace("nn.functional.", "F.")


def _tensors(values: Any) -> Iterator[Tensor]:
    """The castable tensors, in lists, tuples and dicts too, in order."""
    if isinstance(values, Tensor):
        if values.dtype in CASTABLE:
            yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
