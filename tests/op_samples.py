"""Samples of torch's own operation database, made half in part, and how close a result must be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from amp_patch.casts.rules import OP_RULES, CastRule, OpRule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db

OPERATIONS = [info for info in op_db if torch.float32 in info.dtypes and info.get_op() is not None]
VARIANTS: dict[str, Callable[[Any], Any]] = {
    "function": lambda info: info.get_op(),
    "method": lambda info: info.get_method(),
    "in-place": lambda info: info.get_inplace(),
    "operator": lambda info: info.get_operator(),
    "in-place operator": lambda info: info.get_inplace_operator(),
}
MIXES = ("all", "only the first", "all but the first")
PERTURBATIONS = 3

# For its own messages the database searches the stack, which takes longer than the samples.
_NO_TRACKING = mock.patch.object(common_utils, "extract_test_fn", return_value=None)
# The database holds the functions themselves; under casts they are called by their names.
_ROWS: dict[Any, OpRule] = {
    getattr(row.owner, row.name): row for row in OP_RULES if hasattr(row.owner, row.name)
}
_RUNS_IN_FLOAT = frozenset({CastRule.FLOAT, CastRule.FLOAT_THROUGHOUT, CastRule.WRITE_BACK})


@dataclass(frozen=True)
class MixedCall:
    """One sample of one operation, with some of its float32 tensors rounded to half."""

    function: Any
    label: str
    half_dtype: torch.dtype
    arguments: list[Any]  # flat
    rounded: list[Any]  # the same in float32
    floats: list[int]  # positions of what was float32
    spec: TreeSpec

    def in_float(self) -> Any:
        """The result in FP32 of the same rounded tensors."""
        return _call(self.function, self.rounded, self.spec)

    def as_it_comes(self) -> Any:
        """The result of whatever stands in the place of the function now."""
        row = _row_of(self.function)
        function = self.function if row is None else getattr(row.owner, row.name)
        return _call(function, self.arguments, self.spec)

    def disagreement(self, result: Any, expected: Any) -> str | None:
        """How `result` differs from `expected`, by more than rounding explains; None if it agrees.

        A stable algorithm gives the exact result of arguments that are off by some units of
        rounding. So the FP32 result is taken again of arguments that are off by one unit of the
        dtype in which the operation ran; a result may be off by eight times as much as those are,
        plus four units of its largest value for the rounding of intermediate and final results.
        """
        found, wanted = _tensors(result), _tensors(expected)
        if [one.shape for one in found] != [one.shape for one in wanted]:
            return (
                f"shapes {[one.shape for one in found]}, expected {[one.shape for one in wanted]}"
            )
        if all(map(_are_equal, found, wanted)) or self._is_random():
            return None
        unit = torch.finfo(self._dtype_it_ran_in()).eps / 2
        others = [self._perturbed(unit, seed) for seed in range(PERTURBATIONS)]
        for position, (one, want) in enumerate(zip(found, wanted, strict=True)):
            near = [other[position] for other in others if len(other) == len(wanted)]
            error = _excess(one, want, near, unit) if near else 0.0
            if error:
                return (
                    f"output {position} in {one.dtype} is off by {error:.3g} times what is allowed"
                )
        return None

    def _dtype_it_ran_in(self) -> torch.dtype:
        row = _row_of(self.function)
        if row is None:
            return self.half_dtype
        if row.rule is CastRule.NORM and self.half_dtype is torch.float16:
            return torch.float32
        return torch.float32 if row.rule in _RUNS_IN_FLOAT else self.half_dtype

    def _perturbed(self, unit: float, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        arguments = list(self.rounded)
        for position in self.floats:
            value = arguments[position]
            if value.layout is torch.strided:
                signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
                arguments[position] = value * (1 + unit * signs)
        try:
            return _tensors(_call(self.function, arguments, self.spec))
        except RuntimeError:  # a matrix that is no longer symmetric
            return []

    def _is_random(self) -> bool:
        """Whether it draws numbers; those of a half tensor are others than those of float32."""
        results = [_tensors(_call(self.function, self.rounded, self.spec, seed)) for seed in (1, 2)]
        return not all(map(_are_equal, *results))


def mixed_calls(
    info: Any, variant: str, half_dtype: torch.dtype, limit: int
) -> Iterator[MixedCall]:
    """Up to `limit` samples of the operation, each in every mix of half and float32 there is."""
    function = VARIANTS[variant](info)
    if function is None:
        return
    for number, sample in enumerate(_samples(info, limit)):
        flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        floats = [place for place, value in enumerate(flat) if _is_float(value)]
        for mix in MIXES if len(floats) > 1 else MIXES[: len(floats)]:
            half = {"all": floats, "only the first": floats[:1], "all but the first": floats[1:]}
            arguments, rounded = list(flat), list(flat)
            for place in half[mix]:
                arguments[place] = flat[place].detach().to(half_dtype)
                rounded[place] = arguments[place].float()
            label = f"{info.formatted_name}, {variant}, sample {number}, {mix}"
            yield MixedCall(function, label, half_dtype, arguments, rounded, floats, spec)


def passes(call: Callable[[], Any]) -> bool:
    """Whether `call()` does not raise."""
    try:
        call()
    except Exception:  # noqa: BLE001 (whatever an operation raises for what it cannot do)
        return False
    return True


def _samples(info: Any, limit: int) -> list[Any]:
    try:
        with _seeding(torch.default_generator.manual_seed), _NO_TRACKING:
            samples = list(info.sample_inputs("cpu", torch.float32))
    except Exception:  # noqa: BLE001 (some samples need CUDA, or a package that is not here)
        return []
    step = max(1.0, len(samples) / limit)
    return [samples[int(number * step)] for number in range(min(limit, len(samples)))]


def _seeding(manual_seed: Callable[[int], Any]) -> AbstractContextManager[Any]:
    """`torch.manual_seed` itself formats the stack for each kind of device: 1 ms a call."""
    return mock.patch.object(torch, "manual_seed", manual_seed)


def _row_of(function: Any) -> OpRule | None:
    try:
        return _ROWS.get(function)
    except TypeError:  # no hash
        return None


def _call(function: Any, flat: list[Any], spec: TreeSpec, seed: int | None = None) -> Any:
    """A fresh call. With `seed`, that one goes before those that some samples set themselves."""
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in flat]
    first, args, kwargs = tree_unflatten(copies, spec)
    with _seeding(lambda own: torch.default_generator.manual_seed(own if seed is None else seed)):
        torch.manual_seed(0)
        return function(first, *args, **kwargs)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor)]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _are_equal(one: torch.Tensor, want: torch.Tensor) -> bool:
    if one.layout is not torch.strided or one.is_quantized:
        return one.layout is want.layout
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return one.dtype is want.dtype and torch.equal(one, want)
    wide = torch.promote_types(want.dtype, torch.float64)
    return torch.equal(one.to(wide).nan_to_num(), want.to(wide).nan_to_num())


def _excess(one: torch.Tensor, want: torch.Tensor, near: list[torch.Tensor], unit: float) -> float:
    """The largest error in units of what is allowed if that is above 1, else 0."""
    if one.numel() == 0 or _are_equal(one, want):
        return 0.0
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        is_stable = all(torch.equal(other, want) for other in near)  # else it hangs on the rounding
        return float("inf") if is_stable else 0.0
    unit = max(unit, torch.finfo(one.dtype).eps / 2)
    matters = want.isfinite() & (want.abs() < torch.finfo(one.dtype).max)
    if not matters.any():
        return 0.0
    wide = torch.promote_types(want.dtype, torch.float64)
    one, want = one.to(wide), want.to(wide)
    spread = torch.stack([(other.to(wide) - want).abs() for other in near]).amax(0)
    spread = spread.nan_to_num(nan=0.0, posinf=torch.inf)
    largest = want[matters].abs().amax()
    smallest = torch.finfo(torch.float16).tiny * unit
    allowed = 8 * spread + 2 * spread[matters].amax() + 8 * unit * largest + smallest
    error = ((one - want).abs() / allowed)[matters].nan_to_num(nan=torch.inf).amax().item()
    return error if error > 1 else 0.0
