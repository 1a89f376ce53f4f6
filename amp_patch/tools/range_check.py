"""Run a model in FP32 and say what of it would leave the range of float16 or bfloat16."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.errors import AmpError
from amp_patch.slot import slot
from amp_patch.tools.jobs import Loss, default_loss
from amp_patch.tools.operation_watch import Operation, OperationWatch, floating_tensors
from amp_patch.tools.plain_data import plain_data
from amp_patch.tools.surroundings import model_kept, random_numbers_kept
from amp_patch.tools.text_table import TextTable, share_text
from amp_patch.weights.checkpoints import held_tensors
from amp_patch.weights.model_casting import forward_arguments

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NOTED_FLUSH = 0.01  # a smaller share of values that become zero is no finding
_HEADINGS = (
    "module",
    "pass",
    "operation",
    "largest",
    "float16:\ninf",
    "float16:\nzero",
    "bfloat16:\ninf",
    "bfloat16:\nzero",
)


@dataclass
class RangeRecord:
    """What one operation of one module gave, over all its calls.

    `phase` is "weights", "input", "forward" or "backward". For weights, buffers and other tensors
    that a module holds, and for the inputs of the model, `operation` is their name; the gradient of
    what a module returns is called "output".
    `overflowed` and `flushed` count the values that become inf and zero in each half dtype, of
    `values` that are finite and not zero.
    """

    module: str
    phase: str
    operation: str
    largest: float = 0.0
    values: int = 0
    overflowed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HALF, 0))
    flushed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HALF, 0))

    def add(self, tensor: Tensor) -> None:
        """Count the values of one result."""
        present = tensor[tensor.isfinite() & (tensor != 0)]
        if not present.numel():
            return
        self.values += present.numel()
        self.largest = max(self.largest, float(present.abs().max()))
        for name, dtype in HALF.items():
            half = present.to(dtype)
            self.overflowed[name] += int(half.isinf().sum())
            self.flushed[name] += int((half == 0).sum())

    def share(self, counts: Mapping[str, int], name: str) -> float:
        """The part of its values that `counts` has for a dtype."""
        return counts[name] / max(self.values, 1)


@dataclass(frozen=True)
class RangeReport:
    """The records of a check, in the order in which the operations first ran."""

    records: tuple[RangeRecord, ...]

    @property
    def findings(self) -> tuple[RangeRecord, ...]:
        """Those that leave a range: an overflow in either pass, or values lost going forward.

        Small gradients are no finding: a loss scale lifts them (see `largest_scale`).
        """
        return tuple(
            one
            for one in self.records
            if any(one.overflowed.values())
            or (one.phase != "backward" and one.share(one.flushed, "float16") > NOTED_FLUSH)
        )

    @property
    def largest_scale(self) -> float:
        """The largest power of two by which the loss can be multiplied in float16; inf if any."""
        gradients = [one.largest for one in self.records if one.phase == "backward"]
        largest = max(gradients, default=0.0)
        if largest == 0.0:
            return math.inf
        return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest))

    def __str__(self) -> str:
        return str(self.table()) if self.findings else self._note()

    def table(self) -> TextTable:
        """The findings, a row each."""
        rows = tuple(_row(one) for one in self.findings)
        return TextTable(_HEADINGS, rows, left=frozenset({0, 1, 2}), notes=(self._note(),))

    def _note(self) -> str:
        counts = (
            f"{len(self.records)} operations were looked at. In float16 the loss scale may be up to"
            f" {self.largest_scale:g}: then the largest gradient is still below 65504."
        )
        if not self.findings:
            return f"Nothing leaves the range of float16 or bfloat16. {counts}"
        return (
            "The first row is the first to leave the range; what follows may be its consequence. "
            "Keep that module in FP32 (keep_fp32 at O2, O3 and O5), make its values smaller, or "
            f"use bfloat16 (O4, O5) if only float16 is too small. {counts}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Findings and all records as plain data."""
        return {
            "findings": [asdict(one) for one in self.findings],
            "records": [asdict(one) for one in self.records],
            "largest_scale": plain_data(self.largest_scale),
        }


def range_check(model: nn.Module, batches: Iterable[Any], loss: Loss | None = None) -> RangeReport:
    """Run `model` in FP32 on `batches` and report what would leave a half dtype's range, by module.

    Every operation of the forward and the backward pass is looked at, as well as the weights,
    buffers and other tensors of the modules, and what goes into the forward of `model`. The
    backward pass is that of the loss itself, so that gradients are at loss scale 1.

    Args:
        model: in FP32, on any device. Its gradients, buffers and random numbers are afterwards what
            they were; its weights are not changed.
        batches: a few batches, all of which are run.
        loss: a function `loss(model, batch)`; None takes what the model returns, or the loss
            against the targets of `(inputs, targets)`.

    Raises AmpError for a model with half weights. Synchronises at every operation: slow.

        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> _ = nn.init.constant_(model[1].weight, 1e5)
        >>> report = range_check(model, [(torch.ones(1, 4), torch.zeros(1, 4))])
        >>> report.findings[0].module
        '1'
    """
    _refuse_half(model)
    watch = _RangeWatch(model)
    watch.look_at_weights()
    with _left_as_it_was(model), watch.at_the_edges():
        for batch in batches:
            with watch.watching():
                found = (loss or default_loss)(model, batch)
                if found.requires_grad:
                    found.backward()  # type: ignore[no-untyped-call]  # torch's own gap
            model.zero_grad()
    return RangeReport(tuple(watch.records.values()))


class _RangeWatch(OperationWatch):  # type: ignore[no-untyped-call]  # torch's own gap
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.records: dict[tuple[str, str, str], RangeRecord] = {}
        self._model = model
        self._is_at_an_edge = False  # what is computed there is no operation of the model

    def record(self, module: str, phase: str, operation: str) -> RangeRecord:
        """The record of an operation, made when it is first asked for."""
        key = (module, phase, operation)
        return self.records.setdefault(key, RangeRecord(*key))

    def look_at_weights(self) -> None:
        """Record what the modules hold: parameters, buffers, and tensors that are neither."""
        for path, module in self._model.named_modules():
            plain = {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}
            for name, tensor in (*held_tensors(module), *plain.items()):
                self._look(path, "weights", name, [tensor])

    @contextmanager
    def at_the_edges(self) -> Iterator[None]:
        """Inside, no operation is needed to see what enters the model, forward and backward.

        The gradient of what a module returns may come as it is, or as a view.
        """
        with ExitStack() as stack:
            names = forward_arguments(self._model) or ["input"]
            for path, module in self._model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                if module is self._model:
                    enter = functools.partial(self._entered, names=names)
                    handle = module.register_forward_pre_hook(enter, with_kwargs=True)
                    stack.callback(handle.remove)
                left = functools.partial(self._left, path, stack)
                stack.callback(module.register_forward_hook(left).remove)
            yield

    def _entered(
        self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], *, names: list[str]
    ) -> None:
        for i, value in enumerate(args):
            self._look("", "input", names[min(i, len(names) - 1)], floating_tensors(value))
        for name, value in kwargs.items():
            self._look("", "input", name, floating_tensors(value))

    def _left(self, path: str, stack: ExitStack, module: nn.Module, args: Any, result: Any) -> None:
        for output in floating_tensors(result):
            if output.requires_grad:
                look = functools.partial(self._came_back, path)
                handle = output.register_hook(look)  # type: ignore[no-untyped-call]  # torch's own gap
                stack.callback(handle.remove)

    def _came_back(self, path: str, gradient: Tensor) -> None:
        self._look(path, "backward", "output", [gradient])

    def _look(self, module: str, phase: str, name: str, tensors: Iterable[Tensor]) -> None:
        self._is_at_an_edge = True
        where = module or type(self._model).__name__
        try:
            for tensor in tensors:
                if tensor.dtype is torch.float32 and tensor.layout is torch.strided:
                    self.record(where, phase, name).add(tensor.detach())
        finally:
            self._is_at_an_edge = False

    def before(self, func: Any, args: Any) -> Any:
        """Whether it only looks at memory in another way, so that nothing in its result is new."""
        return func.is_view

    def after(self, operation: Operation, seen: Any) -> None:
        is_seen = seen and not operation.is_backward  # there, of what nobody may have looked at
        if self._is_at_an_edge or is_seen or operation.name == "detach":
            return
        for output in operation.outputs:
            if output.dtype is torch.float32 and output.numel():
                phase = "backward" if operation.is_backward else "forward"
                self.record(operation.module, phase, operation.name).add(output)


def _refuse_half(model: nn.Module) -> None:
    half = [path for path, p in model.named_parameters() if p.dtype in HALF.values()]
    if half:
        raise AmpError(
            f"range_check: expected a model in FP32, found {half[0]!r} in half; call it before "
            "initialize, or inside `with amp.full_precision(model)`"
        )


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts gradients, buffers and the state of random numbers back. No casts inside."""
    session = slot.session
    with ExitStack() as stack:
        stack.enter_context(random_numbers_kept())
        if session is not None:
            stack.enter_context(session.context.suspended())
        stack.enter_context(model_kept(model))
        yield


def _row(record: RangeRecord) -> tuple[str, ...]:
    shares = [
        share_text(record.share(counts, name))
        for name in HALF
        for counts in (record.overflowed, record.flushed)
    ]
    return (record.module, record.phase, record.operation, f"{record.largest:.3g}", *shares)
