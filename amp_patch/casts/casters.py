"""What each rule does with the arguments of a call: a small caster a rule, made for one function.

Each maker takes the original function, its row and the shared context, and returns what is called
in place of the function. All of them leave a call untouched where no casts are active.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_patch.casts.arguments import (
    Args,
    Cast,
    Kwargs,
    cast_all,
    cast_keywords,
    cast_value,
    dtype_of_out,
    has_half,
    has_sparse,
    store,
)
from amp_patch.casts.context import CastContext
from amp_patch.casts.rules import CastRule, OpRule
from amp_patch.casts.safeguards import (
    Call,
    call_in_widest,
    make_fallback,
    make_match_self,
    make_promote,
    make_rnn_check,
    make_statistics,
)
from amp_patch.errors import AmpError, warn
from amp_patch.policy import CASTABLE

_ABSENT: Any = object()  # where no argument was given


def casting_call(original: Any, row: OpRule, context: CastContext) -> Call:
    """What is called in place of `original`, the operation of `row`."""
    make = _MAKERS[row.rule]
    if row.rule is CastRule.HALF:
        make = _HALF_BY_SIGNATURE.get(row.name, make)
    return make(original, row, context)


def _make_half(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = active_dtype()
        if dtype is None:
            return original(*args, **kwargs)
        try:
            if not kwargs:
                return original(*cast_all(cast, dtype, args))
            dtype = dtype_of_out(kwargs, dtype)
            return original(*cast_all(cast, dtype, args), **cast_keywords(cast, dtype, kwargs))
        except RuntimeError:
            if not has_sparse(args, kwargs):
                raise
        return call_in_widest(original, cast, args, kwargs)  # few sparse layouts have half kernels

    return call


def _make_half_of_two(original: Any, row: OpRule, context: CastContext) -> Call:
    """As `_make_half`, and quicker for what is called most: two operands."""
    in_half, active_dtype = _make_half(original, row, context), context.active_dtype
    cast, cast_weight = context.cast, context.cache.cast

    def call(one: Any = _ABSENT, two: Any = _ABSENT, /, *rest: Any, **kwargs: Any) -> Any:
        if kwargs or rest or two is _ABSENT:
            return in_half(*_given(one, two, *rest), **kwargs)
        dtype = active_dtype()
        if dtype is None:
            return original(one, two)
        is_ready = type(one) is Tensor and one.dtype is dtype
        first = one if is_ready else cast_value(cast, dtype, one)
        is_weight = type(two) is Parameter
        second = cast_weight(two, dtype) if is_weight else cast_value(cast, dtype, two)
        try:
            return original(first, second)
        except RuntimeError:
            if not has_sparse((one, two), kwargs):
                raise
        return call_in_widest(original, cast, (one, two), kwargs)

    return call


def _make_half_of_layer(original: Any, row: OpRule, context: CastContext) -> Call:
    """As `_make_half`, and quicker for layers: an input, a weight, a bias, and the geometry."""
    in_half, active_dtype = _make_half(original, row, context), context.active_dtype
    cast, cast_weight = context.cast, context.cache.cast

    def call(
        source: Any = _ABSENT,
        weight: Any = _ABSENT,
        bias: Any = _ABSENT,
        /,
        *geometry: Any,
        **kwargs: Any,
    ) -> Any:
        if kwargs or bias is _ABSENT:
            return in_half(*_given(source, weight, bias, *geometry), **kwargs)
        dtype = active_dtype()
        if dtype is None:
            return original(source, weight, bias, *geometry)
        is_ready = type(source) is Tensor and source.dtype is dtype
        half = source if is_ready else cast_value(cast, dtype, source)
        if type(weight) is not Parameter:
            own = cast_all(cast, dtype, (weight, bias))
        elif type(bias) is Parameter:
            own = cast_weight(weight, dtype), cast_weight(bias, dtype)
        else:
            own = cast_weight(weight, dtype), cast_value(cast, dtype, bias)
        try:
            return original(half, *own, *geometry)
        except RuntimeError:
            if not has_sparse((source, weight, bias), kwargs):
                raise
        args = source, weight, bias, *geometry
        return call_in_widest(original, cast, args, kwargs)

    return call


def _make_float(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(*args: Any, **kwargs: Any) -> Any:
        if active_dtype() is None:
            return original(*args, **kwargs)
        if kwargs:
            return _float_with_keywords(original, cast, args, kwargs)
        return original(*cast_all(cast, torch.float32, args))

    return call


def _make_float_throughout(original: Any, row: OpRule, context: CastContext) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        if context.active_dtype() is None:
            return original(*args, **kwargs)
        with context.suspended():
            return _float_with_keywords(original, context.cast, args, kwargs)

    return call


def _make_norm(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = active_dtype()
        if dtype is None:
            return original(*args, **kwargs)
        if dtype is torch.float16:
            return _float_with_keywords(original, cast, args, kwargs)
        source = args[0] if args else kwargs.get("input")
        if not isinstance(source, Tensor) or source.dtype not in CASTABLE:
            return original(*args, **kwargs)
        if kwargs:
            kwargs = cast_keywords(cast, source.dtype, kwargs)
        return original(*cast_all(cast, source.dtype, args), **kwargs)

    return call


def _make_write_back(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(*args: Any, **kwargs: Any) -> Any:
        if active_dtype() is None or not args:
            return original(*args, **kwargs)
        target, *rest = cast_all(cast, torch.float32, args)
        keywords = cast_keywords(cast, torch.float32, kwargs)
        if target is args[0]:
            return original(target, *rest, **keywords)
        if keywords.get("dtype") is args[0].dtype:
            del keywords["dtype"]  # torch wants that of the tensor, which is float32 for now
        return args[0].copy_(original(target, *rest, **keywords))

    return call


def _make_banned(original: Any, row: OpRule, context: CastContext) -> Call:
    in_float = _make_float(original, row, context)
    warned: list[str] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not warned and context.active_dtype() is not None and has_half(args, kwargs):
            warned.append(row.name)
            warn(f"{row.name}: computed in FP32. {row.hint}")
        return in_float(*args, **kwargs)

    return call


def _make_refused(original: Any, row: OpRule, context: CastContext) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        if context.active_dtype() is not None and has_half(args, kwargs):
            raise AmpError(
                f"{row.name}: expected float32 tensors, found half ones, which the cast rules in "
                f"force refuse; pass tensor.float(){f', or better: {row.hint}' if row.hint else ''}"
            )
        return original(*args, **kwargs)

    return call


_MAKERS: Mapping[CastRule, Callable[[Any, OpRule, CastContext], Call]] = MappingProxyType(
    {
        CastRule.HALF: _make_half,
        CastRule.FLOAT: _make_float,
        CastRule.FLOAT_THROUGHOUT: _make_float_throughout,
        CastRule.NORM: _make_norm,
        CastRule.STATISTICS: make_statistics,
        CastRule.PROMOTE: make_promote,
        CastRule.FALLBACK: make_fallback,
        CastRule.MATCH_SELF: make_match_self,
        CastRule.WRITE_BACK: _make_write_back,
        CastRule.RNN_CHECK: make_rnn_check,
        CastRule.BANNED: _make_banned,
        CastRule.REFUSED: _make_refused,
    }
)


_HALF_BY_SIGNATURE: Mapping[str, Callable[[Any, OpRule, CastContext], Call]] = MappingProxyType(
    {
        **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm", "mv"), _make_half_of_two),
        **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), _make_half_of_layer),
        **dict.fromkeys((f"conv_transpose{n}d" for n in (1, 2, 3)), _make_half_of_layer),
    }
)


def _given(*args: Any) -> Args:
    return tuple(value for value in args if value is not _ABSENT)


def _float_with_keywords(original: Any, cast: Cast, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("dtype") is not None:  # asked for by the user: torch does as it says
        return original(*args, **kwargs)
    args = cast_all(cast, torch.float32, args)
    kwargs = cast_keywords(cast, torch.float32, kwargs)
    out = kwargs.get("out")
    if out is None or not has_half((out,), {}):
        return original(*args, **kwargs)
    del kwargs["out"]
    return store(original(*args, **kwargs), out)
