"""What each rule does with the arguments of a call: a small caster a rule, made for one function.

Each maker takes the original function, its row and the shared context, and returns what wrapt calls
in place of the function. All of them leave a call untouched where no casts are active.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from amp_patch.casts.arguments import (
    Args,
    Cast,
    Kwargs,
    cast_all,
    cast_keywords,
    cast_value,
    fitted,
    has_half,
    limited,
    tensors,
    widest_dtype,
)
from amp_patch.casts.context import CastContext
from amp_patch.casts.rules import CastRule, OpRule
from amp_patch.errors import AmpError, warn
from amp_patch.policy import CASTABLE, HALF_DTYPES

Call = Callable[[Any, Any, Args, Kwargs], Any]


def casting_call(original: Any, row: OpRule, context: CastContext) -> Call:
    """The function that wrapt calls for every call of the operation of `row`."""
    call = _MAKERS[row.rule](original, row, context)
    if isinstance(original, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return _without_instance(call)
    return call


def _without_instance(call: Call) -> Call:
    """For callables whose `__self__`, which wrapt takes for the instance, is no argument."""

    def call_without(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        return call(wrapped, None, args, kwargs)

    return call_without


def _make_half(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if instance is not None:  # wrapt has bound `wrapped` to the tensor before the cast
            args = (instance, *args)
        dtype = active_dtype()
        if dtype is None:
            return original(*args, **kwargs)
        try:
            if not kwargs:
                return original(*cast_all(cast, dtype, args))
            dtype = _dtype_of_out(kwargs, dtype)
            keywords = cast_keywords(cast, dtype, kwargs)
            return original(*cast_all(cast, dtype, args), **keywords)
        except RuntimeError:
            if not _has_sparse(args, kwargs):
                raise
        return _call_in_widest(original, cast, args, kwargs)  # few sparse layouts have half kernels

    return call


def _make_float(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if instance is not None:
            args = (instance, *args)
        if active_dtype() is None:
            return original(*args, **kwargs)
        if kwargs:
            return _float_with_keywords(original, cast, args, kwargs)
        return original(*cast_all(cast, torch.float32, args))

    return call


def _make_float_throughout(original: Any, row: OpRule, context: CastContext) -> Call:
    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if context.active_dtype() is None:
            return original(*args, **kwargs)
        with context.suspended():
            return _float_with_keywords(original, context.cast, args, kwargs)

    return call


def _make_norm(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
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


def _make_statistics(original: Any, row: OpRule, context: CastContext) -> Call:
    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if context.active_dtype() is None or len(args) < 5 or _is_one_of_the_mixes(args):
            return original(*args, **kwargs)
        source, weight, bias, mean, variance, *rest = args
        floats = cast_all(context.cast, torch.float32, (weight, bias, mean, variance))
        result = original(source, *floats, *rest, **kwargs)
        for statistic, used in zip((mean, variance), floats[2:], strict=True):
            if used is not statistic:
                statistic.copy_(used)
        return result

    return call


def _make_promote(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if instance is not None:
            args = (instance, *args)
        if active_dtype() is None:
            return original(*args, **kwargs)
        return _call_in_widest(original, cast, args, kwargs)

    return call


def _make_fallback(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast
    is_in_place = row.name.endswith("_")

    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if instance is not None:
            args = (instance, *args)
        try:
            return original(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if active_dtype() is None or not has_half(args, kwargs):
                raise
            result = _call_in_float(original, cast, args, kwargs, error)
        if is_in_place:
            return args[0].copy_(result)
        return _cast_result(result, widest_dtype(args, kwargs))

    return call


def _make_match_self(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if instance is not None:
            args = (instance, *args)
        dtype = args[0].dtype if args else None
        if active_dtype() is None or dtype not in CASTABLE:
            return original(*args, **kwargs)
        rest = [fitted(cast, dtype, value) for value in args[1:]]
        if kwargs:
            kwargs = {name: fitted(cast, dtype, value) for name, value in kwargs.items()}
        if rest and type(rest[-1]) is int:  # a value comes last; an index may be any number
            rest[-1] = limited(dtype, rest[-1])
        return original(args[0], *rest, **kwargs)

    return call


def _make_write_back(original: Any, row: OpRule, context: CastContext) -> Call:
    active_dtype, cast = context.active_dtype, context.cast

    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if instance is not None:
            args = (instance, *args)
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


def _make_rnn_check(original: Any, row: OpRule, context: CastContext) -> Call:
    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        # RNNBase.check_input looks at shapes and dtypes only: show it the shape, in the weights' dtype.
        module, (source, *rest) = instance, args
        weight = module._flat_weights[0]
        if (
            context.active_dtype() is not None
            and source.dtype is not weight.dtype
            and source.dtype in CASTABLE
            and weight.dtype in CASTABLE
        ):
            source = torch.empty_like(source, dtype=weight.dtype, device="meta")
        return original(module, source, *rest, **kwargs)

    return call


def _make_banned(original: Any, row: OpRule, context: CastContext) -> Call:
    in_float = _make_float(original, row, context)
    warned: list[str] = []

    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if not warned and context.active_dtype() is not None and has_half(args, kwargs):
            warned.append(row.name)
            warn(f"{row.name}: computed in FP32. {row.hint}")
        return in_float(wrapped, instance, args, kwargs)

    return call


def _make_refused(original: Any, row: OpRule, context: CastContext) -> Call:
    def call(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if instance is not None:
            args = (instance, *args)
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
        CastRule.STATISTICS: _make_statistics,
        CastRule.PROMOTE: _make_promote,
        CastRule.FALLBACK: _make_fallback,
        CastRule.MATCH_SELF: _make_match_self,
        CastRule.WRITE_BACK: _make_write_back,
        CastRule.RNN_CHECK: _make_rnn_check,
        CastRule.BANNED: _make_banned,
        CastRule.REFUSED: _make_refused,
    }
)


def _call_in_widest(original: Any, cast: Cast, args: Args, kwargs: Kwargs) -> Any:
    dtype = widest_dtype(args, kwargs)
    if dtype is None:
        return original(*args, **kwargs)
    if kwargs:
        kwargs = cast_keywords(cast, dtype, kwargs)
    return original(*cast_all(cast, dtype, args), **kwargs)


def _float_with_keywords(original: Any, cast: Cast, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("dtype") is not None:  # asked for by the user: torch does as it says
        return original(*args, **kwargs)
    args = cast_all(cast, torch.float32, args)
    kwargs = cast_keywords(cast, torch.float32, kwargs)
    out = kwargs.get("out")
    if out is None or not has_half((out,), {}):
        return original(*args, **kwargs)
    del kwargs["out"]
    return _store(original(*args, **kwargs), out)


def _store(result: Any, out: Any) -> Any:
    """Write `result` into `out`, a tensor or a tuple of them, as `out=` does."""
    if not isinstance(out, Tensor):
        return type(result)([_store(*pair) for pair in zip(result, out, strict=True)])
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _call_in_float(
    original: Any, cast: Cast, args: Args, kwargs: Kwargs, error: RuntimeError
) -> Any:
    """The call in float32; raises `error`, of the call as it was, if that fails as well."""
    try:
        return original(
            *cast_all(cast, torch.float32, args), **cast_keywords(cast, torch.float32, kwargs)
        )
    except RuntimeError:
        raise error from None


def _cast_result(result: Any, dtype: torch.dtype | None) -> Any:
    if dtype not in HALF_DTYPES:
        return result
    if isinstance(result, Tensor):
        return result.to(dtype) if result.dtype is torch.float32 else result
    return type(result)([_cast_result(one, dtype) for one in result])


def _dtype_of_out(kwargs: Kwargs, dtype: torch.dtype) -> torch.dtype:
    out = kwargs.get("out")
    return out.dtype if isinstance(out, Tensor) and out.dtype in CASTABLE else dtype


def _has_sparse(args: Args, kwargs: Kwargs) -> bool:
    found = tensors((*args, *kwargs.values()))
    return any(tensor.layout is not torch.strided for tensor in found)


def _is_one_of_the_mixes(args: Args) -> bool:
    """Whether the kernels take it: all of one dtype, or half input and the rest in float32."""
    dtypes = {tensor.dtype for tensor in tensors(args[1:5])}
    return not dtypes or dtypes == {args[0].dtype} or dtypes == {torch.float32}
