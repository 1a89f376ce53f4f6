"""Stop at the operation that makes the first inf or NaN, and tell all about it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from amp_patch.errors import AmpError
from amp_patch.tools.call_sites import user_frames
from amp_patch.tools.operation_watch import Operation, OperationWatch, floating_tensors

FRAMES = 20
# What these return beyond their first output they keep for their backward pass: sums of
# exponentials as logarithms, where inf stands for a sum of nothing.
_KEEPS_LOGARITHMS = (
    "_ctc_loss",
    "_efficient_attention",
    "_flash_attention",
    "_scaled_dot_product",
)


@dataclass(frozen=True)
class TensorFacts:
    """What is known of a tensor. `largest` is the largest finite magnitude in it."""

    dtype: str
    shape: tuple[int, ...]
    largest: float
    infs: int
    nans: int

    def __str__(self) -> str:
        bad = ", ".join(f"{n} {what}" for n, what in ((self.infs, "inf"), (self.nans, "NaN")) if n)
        size = " x ".join(map(str, self.shape)) or "one number"
        found = f"{self.dtype} {size}, largest magnitude {self.largest:.4g}"
        return f"{found}, {bad}" if bad else found


@dataclass(frozen=True)
class EarlierOperation:
    """One of the operations before: its name, module, dtype, and the largest magnitude it gave."""

    operation: str
    module: str
    dtype: str
    largest: float

    def __str__(self) -> str:
        where = self.module or "no module"
        return f"{self.operation} in {where}: {self.dtype}, largest magnitude {self.largest:.4g}"


@dataclass(frozen=True)
class NonFiniteOperation:
    """The first operation with inf, or NaN, in its result and not in its inputs.

    `phase` is "forward" or "backward", `node` the step of autograd in the latter. `frames` are
    lines of the user's code that led there, the innermost last; `before` the operations before it.
    """

    operation: str
    phase: str
    module: str
    node: str
    inputs: tuple[TensorFacts, ...]
    output: TensorFacts
    frames: tuple[str, ...]
    before: tuple[EarlierOperation, ...]

    def __str__(self) -> str:
        node = f" ({self.node})" if self.node else ""
        lines = [f"{self.operation} in {self.module or 'no module'}, {self.phase} pass{node},"]
        lines[0] += f" made the first new inf or NaN: {self.output}"
        lines += [f"  input: {one}" for one in self.inputs]
        lines += ["  called from:", *(f"    {one}" for one in self.frames)]
        lines += ["  operations before, the latest last:", *(f"    {one}" for one in self.before)]
        return "\n".join(lines)


class NonFiniteError(AmpError):
    """Raised by `trace_nonfinite`. `found` has what is known as data."""

    def __init__(self, found: NonFiniteOperation) -> None:
        super().__init__(str(found))
        self.found = found


@contextmanager
def trace_nonfinite(model: nn.Module, *, backward: bool = True) -> Iterator[None]:
    """Inside, the first operation that makes an inf or NaN that it was not given raises.

    The `NonFiniteError` names the operation, the module of `model` by its path, the dtypes and the
    largest magnitudes of what went in and came out, the 20 innermost lines of the user's code and
    the 20 operations before. In the backward pass the module is the one whose gradient is being
    computed. An inf that is written on purpose (a mask filled with -inf) does not count.

    With a dynamic loss scale an overflow in the backward pass is normal at the start of a training,
    and handled: pass `backward=False` to look for others. Synchronises at every operation: slow.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softplus())
        >>> _ = nn.init.constant_(model[0].weight, 3e38)
        >>> with trace_nonfinite(model):
        ...     model(torch.ones(1, 2))
        Traceback (most recent call last):
        amp_patch.tools.trace_nonfinite.NonFiniteError: addmm in 0, forward pass, made ...
    """
    if not isinstance(model, nn.Module):
        raise AmpError(f"trace_nonfinite: expected a torch.nn.Module, found {type(model).__name__}")
    with _Tracer(model, backward=backward).watching():
        yield


class _Tracer(OperationWatch):  # type: ignore[no-untyped-call]  # torch's own gap
    def __init__(self, model: nn.Module, *, backward: bool) -> None:
        super().__init__(model)
        self._watches_backward = backward
        self._before: deque[tuple[Operation, str, Tensor]] = deque(maxlen=FRAMES)

    def before(self, func: Any, args: Any) -> Any:
        """An operation in place overwrites what it was given: look at it now."""
        return _facts(args) if func._schema.is_mutable else None  # noqa: SLF001

    def after(self, operation: Operation, seen: Any) -> None:
        if operation.is_backward and not self._watches_backward:
            return
        for output in _judged(operation):
            if output.numel() and not bool(output.isfinite().all()):
                inputs = _facts(operation.args) if seen is None else seen
                has_inf, has_nan = _marks(operation.args, inputs)
                is_new_nan = bool(output.isnan().any()) and not has_nan
                if is_new_nan or (bool(output.isinf().any()) and not has_inf and not has_nan):
                    raise NonFiniteError(self._described(operation, inputs, output))
        self._remember(operation)

    def _remember(self, operation: Operation) -> None:
        for output in operation.outputs[:1]:
            if output.numel():
                kept = Operation(operation.name, operation.module, operation.node, (), None)
                self._before.append((kept, _name(output.dtype), output.abs().max()))

    def _described(
        self, operation: Operation, inputs: tuple[TensorFacts, ...], output: Tensor
    ) -> NonFiniteOperation:
        before = [
            EarlierOperation(one.name, one.module, dtype, float(largest))
            for one, dtype, largest in self._before
        ]
        return NonFiniteOperation(
            operation.name,
            "backward" if operation.is_backward else "forward",
            operation.module,
            operation.node,
            inputs,
            tensor_facts(output),
            user_frames(FRAMES),
            tuple(before),
        )


def tensor_facts(tensor: Tensor) -> TensorFacts:
    """Look at every value. Synchronises."""
    finite = tensor.detach()[tensor.isfinite()]
    return TensorFacts(
        _name(tensor.dtype),
        tuple(tensor.shape),
        float(finite.abs().max()) if finite.numel() else 0.0,
        int(tensor.isinf().sum()),
        int(tensor.isnan().sum()),
    )


def _facts(args: Any) -> tuple[TensorFacts, ...]:
    return tuple(map(tensor_facts, floating_tensors(args)))


def _judged(operation: Operation) -> list[Tensor]:
    """The results that the caller of the operation sees."""
    return operation.outputs[: 1 if operation.name.startswith(_KEEPS_LOGARITHMS) else None]


def _marks(args: Any, inputs: tuple[TensorFacts, ...]) -> tuple[bool, bool]:
    """Whether inf, and whether NaN, is among the arguments, numbers included."""
    numbers = [value for value in tree_iter(args) if isinstance(value, float)]
    has_inf = any(map(math.isinf, numbers)) or any(one.infs for one in inputs)
    has_nan = any(map(math.isnan, numbers)) or any(one.nans for one in inputs)
    return has_inf, has_nan


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
