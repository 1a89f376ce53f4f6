"""The wrapper around a torch function, with one small caster for each rule."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import torch
import wrapt

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.rules import OP_RULES, CastRule, OpRule
from amp_patch.errors import warn
from amp_patch.policy import CASTABLE

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Caster = Callable[[CastContext, torch.dtype, tuple[Any, ...], dict[str, Any]], Arguments]


class _Picklable:
    """Pickles as the name of the torch function and deep-copies to itself, as a function does.

    wrapt's proxies do neither, and a module that holds `F.softmax` could not be saved or copied.
    The name resolves to plain torch where amp_patch is not in use or not installed.
    """

    __slots__ = ()
    _self_qualified_name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return (pkgutil.resolve_name, (self._self_qualified_name,))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __copy__(self) -> _Picklable:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Picklable:
        return self


class _BoundCastWrapper(_Picklable, wrapt.BoundFunctionWrapper[..., Any]):
    """What attribute access on a class or an instance gives, as `torch.Tensor.matmul`."""

    @property
    def _self_qualified_name(self) -> str:  # type: ignore[override]
        return self._self_parent._self_qualified_name  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._self_instance is None:
            return super().__reduce__()
        return (getattr, (self._self_instance, self._self_qualified_name.rpartition(".")[2]))


class CastWrapper(_Picklable, wrapt.FunctionWrapper[..., Any]):
    """A torch function that casts its tensors before it runs."""

    __bound_function_wrapper__ = _BoundCastWrapper

    def __init__(self, original: Any, row: OpRule, context: CastContext) -> None:
        super().__init__(original, _casting_call(original, row, context))
        self._self_qualified_name = row.qualified_name


def install_casts(patcher: Patcher, context: CastContext) -> None:
    """Put a `CastWrapper` in place of every operation that has a rule.

    Operations that this torch does not have are left out, with one warning that names them.
    """
    missing = []
    for row in OP_RULES:
        if hasattr(row.owner, row.name):
            original = vars(row.owner).get(row.name, getattr(row.owner, row.name))
            patcher.replace(row.owner, row.name, CastWrapper(original, row, context))
        else:
            missing.append(row.qualified_name)
    if missing:
        warn(
            f"this torch ({torch.__version__}) has no {', '.join(missing)}; expected by the cast "
            "rules, left out. Models that use them by another name run them in their own precision"
        )


def _casting_call(original: Any, row: OpRule, context: CastContext) -> Callable[..., Any]:
    """The function wrapt calls for every call of the operation."""
    caster = _CASTERS[row.rule]
    active_dtype = context.active_dtype
    banned_hint = f"{row.name}: {row.hint}" if row.rule is CastRule.BANNED else ""

    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            instance is not None
        ):  # wrapt has bound `wrapped` to the tensor as it was before the cast
            args = (instance, *args)
        half_dtype = active_dtype()
        if half_dtype is None:
            return original(*args, **kwargs)
        if banned_hint:
            warn(banned_hint)
        args, kwargs = caster(context, half_dtype, args, kwargs)
        return original(*args, **kwargs)

    return call


def _cast_to_half(
    context: CastContext, half_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    return _cast_all(context, half_dtype, args, kwargs)


def _cast_to_float(
    context: CastContext, half_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    return _cast_all(context, torch.float32, args, kwargs)


def _cast_norm(
    context: CastContext, half_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    if half_dtype is torch.float16:
        return _cast_all(context, torch.float32, args, kwargs)
    source = args[0] if args else kwargs.get("input")
    if isinstance(source, torch.Tensor) and source.dtype in CASTABLE:
        return _cast_all(context, source.dtype, args, kwargs)
    return args, kwargs


def _cast_to_widest(
    context: CastContext, half_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    dtypes: set[torch.dtype] = set()
    _collect_dtypes((*args, *kwargs.values()), dtypes)
    if len(dtypes) < 2:
        return args, kwargs
    return _cast_all(context, torch.float32, args, kwargs)  # any two of the three meet in float32


def _cast_to_self(
    context: CastContext, half_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    if not args or args[0].dtype not in CASTABLE:
        return args, kwargs
    rest, kwargs = _cast_all(context, args[0].dtype, args[1:], kwargs)
    return (args[0], *rest), kwargs


def _show_in_weight_dtype(
    context: CastContext, half_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    # RNNBase.check_input looks at shapes and dtypes only: show it the shape, in the weights' dtype.
    module, source, *rest = args
    weight = module._flat_weights[0]
    if source.dtype in CASTABLE and weight.dtype in CASTABLE and source.dtype is not weight.dtype:
        source = torch.empty_like(source, dtype=weight.dtype, device="meta")
    return (module, source, *rest), kwargs


_CASTERS: dict[CastRule, Caster] = {
    CastRule.HALF: _cast_to_half,
    CastRule.FLOAT: _cast_to_float,
    CastRule.NORM: _cast_norm,
    CastRule.PROMOTE: _cast_to_widest,
    CastRule.MATCH_SELF: _cast_to_self,
    CastRule.RNN_CHECK: _show_in_weight_dtype,
    CastRule.BANNED: _cast_to_float,
}


def _cast_all(
    context: CastContext, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """The arguments with every castable tensor in `dtype`, or in the dtype of `out=` if given."""
    if kwargs:
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor) and out.dtype in CASTABLE:
            dtype = out.dtype
        kwargs = {
            name: value if value is out else _cast_value(context, dtype, value)
            for name, value in kwargs.items()
        }
    return tuple([_cast_value(context, dtype, value) for value in args]), kwargs


def _cast_value(context: CastContext, dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or value.dtype not in CASTABLE:
            return value
        return context.cast(value, dtype)
    if type(value) in (list, tuple):
        return type(value)([_cast_value(context, dtype, item) for item in value])
    return value


def _collect_dtypes(values: Any, found: set[torch.dtype]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype in CASTABLE:
                found.add(value.dtype)
        elif type(value) in (list, tuple):
            _collect_dtypes(value, found)
