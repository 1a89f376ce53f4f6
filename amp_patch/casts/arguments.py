"""Look at, cast and write the tensors of one call. No pytree: this is the hot path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_patch.policy import CASTABLE, HALF_DTYPES

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Cast = Callable[[Tensor, torch.dtype], Tensor]

_LARGEST: Mapping[torch.dtype, float] = MappingProxyType(
    {dtype: torch.finfo(dtype).max for dtype in CASTABLE}
)
# The quickest way to a dtype: `tensor.to(dtype)` takes 1.5 times the time.
CONVERSIONS: Mapping[torch.dtype, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        torch.float16: torch.Tensor.half,
        torch.bfloat16: torch.Tensor.bfloat16,
        torch.float32: torch.Tensor.float,
    }
)
_FLAT = frozenset({int, float, bool, str, type(None), torch.dtype})  # holds no tensor


def cast_all(cast: Cast, dtype: torch.dtype, args: Any) -> Any:
    """`args` with every castable tensor in `dtype`; `args` itself if there is nothing to cast."""
    changed: list[Any] | None = None
    for position, value in enumerate(args):
        kind = type(value)
        if kind in _FLAT or (kind is Tensor and value.dtype is dtype):
            continue
        new = cast_value(cast, dtype, value)
        if new is not value:
            if changed is None:
                changed = list(args)
            changed[position] = new
    return args if changed is None else changed


def cast_value(cast: Cast, dtype: torch.dtype, value: Any) -> Any:
    """`value` in `dtype` if it is a castable tensor; lists and tuples of tensors likewise.

    Weights go through `cast`, which keeps their casts.
    """
    if isinstance(value, Tensor):
        found = value.dtype
        if found is dtype or found not in CASTABLE:
            return value
        return cast(value, dtype) if type(value) is Parameter else CONVERSIONS[dtype](value)
    if type(value) in (list, tuple):
        items = cast_all(cast, dtype, value)
        return value if items is value else type(value)(items)
    return value


def cast_keywords(cast: Cast, dtype: torch.dtype, kwargs: Kwargs) -> Kwargs:
    """`kwargs` with every castable tensor but `out=` in `dtype`."""
    return {
        name: value if name == "out" else cast_value(cast, dtype, value)
        for name, value in kwargs.items()
    }


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The castable tensors among `values`, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in CASTABLE:
                yield value
        elif type(value) in (list, tuple):
            yield from tensors(value)


def has_half(args: Args, kwargs: Kwargs) -> bool:
    """Whether a tensor among the arguments is half."""
    return any(one.dtype in HALF_DTYPES for one in tensors((*args, *kwargs.values())))


def widest_dtype(args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """The dtype in which all castable tensors meet, as torch promotes; None if there are none.

    Tensors without dimensions count only among themselves. Numbers that the dtype cannot hold,
    as a mask value of -1e9, make it float32. The dtype of `out=` goes before all.
    """
    values = (*args, *kwargs.values())
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out.dtype if out.dtype in CASTABLE else None
    dtype = common_dtype(values)
    if dtype is None:
        return None
    largest = _LARGEST[dtype]
    is_beyond = any(largest < _size(value) < math.inf for value in values)
    return torch.float32 if is_beyond else dtype


def common_dtype(values: Iterable[Any]) -> torch.dtype | None:
    """The dtype to which torch promotes the castable tensors among `values`; None without any."""
    found = list(tensors(values))
    dtypes = {one.dtype for one in found if one.dim()} or {one.dtype for one in found}
    if len(dtypes) > 1:
        return torch.float32  # any two of the three meet in it
    return dtypes.pop() if dtypes else None


def fitted(cast: Cast, dtype: torch.dtype, value: Any) -> Any:
    """`value` in `dtype` if it is a castable tensor; a number within the range of `dtype`."""
    if type(value) is float:
        return limited(dtype, value)
    return cast_value(cast, dtype, within_range(dtype, value))


def within_range(dtype: torch.dtype, value: Any) -> Any:
    """`value`, or what `limited` would make of it if it is a tensor that holds one FP32 number.

    Asks the device nothing. Infinities stay.
    """
    if dtype not in HALF_DTYPES or not isinstance(value, Tensor) or value.dim():
        return value
    if value.dtype is not torch.float32:
        return value
    largest = _LARGEST[dtype]
    return value.where(value.isinf(), value.clamp(-largest, largest))


def limited(dtype: torch.dtype, number: Any) -> Any:
    """`number`, or the largest or smallest that `dtype` holds if that is nearer to 0."""
    largest = _LARGEST[dtype]
    return math.copysign(largest, number) if largest < abs(number) < math.inf else number


def store(result: Any, out: Any) -> Any:
    """Write `result` into `out`, a tensor or a tuple of them, as `out=` does."""
    if not isinstance(out, Tensor):
        return type(result)([store(*pair) for pair in zip(result, out, strict=True)])
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def cast_result(result: Any, dtype: torch.dtype | None) -> Any:
    """`result`, or what it holds, in `dtype` where it is float32 and `dtype` is half."""
    if dtype not in HALF_DTYPES:
        return result
    if isinstance(result, Tensor):
        return result.to(dtype) if result.dtype is torch.float32 else result
    return type(result)([cast_result(one, dtype) for one in result])


def dtype_of_out(kwargs: Kwargs, dtype: torch.dtype) -> torch.dtype:
    """The dtype of `out=` if that is given and castable, else `dtype`."""
    out = kwargs.get("out")
    return out.dtype if isinstance(out, Tensor) and out.dtype in CASTABLE else dtype


def has_sparse(args: Args, kwargs: Kwargs) -> bool:
    """Whether a tensor among the arguments is of a sparse layout."""
    found = tensors((*args, *kwargs.values()))
    return any(tensor.layout is not torch.strided for tensor in found)


def _size(value: Any) -> float:
    return abs(value) if type(value) in (int, float) else 0.0
