"""Casters that only let run what plain torch refuses: mixed dtypes, and what has no half kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_patch.casts.arguments import (
    Args,
    Cast,
    Kwargs,
    cast_all,
    cast_keywords,
    cast_result,
    common_dtype,
    fitted,
    has_half,
    limited,
    widest_dtype,
    within_range,
)
from amp_patch.casts.context import CastContext
from amp_patch.casts.rules import OpRule
from amp_patch.policy import CASTABLE

Call = Callable[..., Any]


def make_promote(original: Any, row: OpRule, context: CastContext) -> Call:
    """What is called for an operation of the rule PROMOTE."""
    active_dtype, cast = context.active_dtype, context.cast

    def call(*args: Any, **kwargs: Any) -> Any:
        if active_dtype() is None:
            return original(*args, **kwargs)
        return call_in_widest(original, cast, args, kwargs)

    return call


def make_match_self(original: Any, row: OpRule, context: CastContext) -> Call:
    """What is called for an operation of the rule MATCH_SELF."""
    active_dtype, cast = context.active_dtype, context.cast

    def call(*args: Any, **kwargs: Any) -> Any:
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


def make_fallback(original: Any, row: OpRule, context: CastContext) -> Call:
    """What is called for an operation of the rule FALLBACK."""
    active_dtype, cast = context.active_dtype, context.cast
    is_in_place = row.name.endswith("_")

    def call(*args: Any, **kwargs: Any) -> Any:
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
        return cast_result(result, common_dtype((*args, *kwargs.values())))

    return call


def make_statistics(original: Any, row: OpRule, context: CastContext) -> Call:
    """What is called for an operation of the rule STATISTICS."""

    def call(*args: Any, **kwargs: Any) -> Any:
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


def make_rnn_check(original: Any, row: OpRule, context: CastContext) -> Call:
    """What is called for an operation of the rule RNN_CHECK."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # It looks at shapes and dtypes only: show it the shape, in the weights' dtype.
        module, source, *rest = args
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


def call_in_widest(original: Any, cast: Cast, args: Args, kwargs: Kwargs) -> Any:
    """The call with all castable tensors in the widest dtype among them."""
    dtype = widest_dtype(args, kwargs)
    if dtype is None:
        return original(*args, **kwargs)
    if kwargs:
        kwargs = {name: within_range(dtype, value) for name, value in kwargs.items()}
        kwargs = cast_keywords(cast, dtype, kwargs)
    args = tuple([within_range(dtype, value) for value in args])
    return original(*cast_all(cast, dtype, args), **kwargs)


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


def _is_one_of_the_mixes(args: Args) -> bool:
    """Whether the kernels take it: all of one dtype, or half input and the rest in float32."""
    dtypes = {one.dtype for one in args[1:5] if isinstance(one, torch.Tensor)}
    return not dtypes or dtypes == {args[0].dtype} or dtypes == {torch.float32}
