"""The wrapper around a torch function, and how all of them are put in place."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import wrapt

from amp_patch.casts.casters import casting_call
from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.rules import OP_RULES, CastRule, OpRule
from amp_patch.errors import warn

if TYPE_CHECKING:
    from typing_extensions import Self

_NEWER = frozenset({"grouped_mm"})  # operations that torch 2.6 does not have yet


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
    """A function that casts its tensors before it runs."""

    __bound_function_wrapper__ = _BoundCastWrapper

    def __init__(self, original: Any, row: OpRule, call: Callable[..., Any]) -> None:
        super().__init__(original, call)
        self._self_qualified_name = row.qualified_name
        self._self_row = row

    @property
    def row(self) -> OpRule:
        """The rule that decides what is cast."""
        return self._self_row

    @property
    def call(self) -> Callable[..., Any]:
        """What is called in place of the function."""
        found: Any = self._self_wrapper
        return found  # type: ignore[no-any-return]

    def set_call(self, call: Callable[..., Any]) -> None:
        """Let another be called: nothing stands between the wrapper and it, then or later."""
        # wrapt lets no attribute be set by which this could be done.
        wrapt.FunctionWrapper.__init__(self, self.__wrapped__, call)


class OperationWrapper(CastWrapper):
    """The same for an operation of torch, which is called too often to go through wrapt.

    A call reaches `call` with the arguments as they are, and a tensor among them for a method.
    wrapt takes 0.9 us to get to the same point for a function written in Python and 0.7 us for a
    method, this takes 0.45 and 0.4 us, and for what runs in half 0.1 and 0.35 us.
    """

    def __new__(cls, original: Any, row: OpRule, call: Callable[..., Any]) -> Self:
        """Python looks up on the class what calls an object: the busiest have one of their own.

        One for each would make `initialize` take 6 ms longer.
        """
        if row.rule is not CastRule.HALF:
            return super().__new__(cls)
        slots = {**_slots(original, call), "__module__": __name__}
        return super().__new__(type(cls.__name__, (cls,), slots))

    def __init__(self, original: Any, row: OpRule, call: Callable[..., Any]) -> None:
        super().__init__(original, row, call)
        self._self_is_bound = _is_bound(original)
        call.__name__ = row.name  # by which pickle finds a bound method again

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._self_wrapper(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        is_method = instance is not None and self._self_is_bound
        return MethodType(self._self_wrapper, instance) if is_method else self

    def set_call(self, call: Callable[..., Any]) -> None:
        """Let another be called: nothing stands between the wrapper and it, then or later."""
        super().set_call(call)
        call.__name__ = self.row.name
        if type(self) is not OperationWrapper:
            for name, slot in _slots(self.__wrapped__, call).items():
                setattr(type(self), name, slot)


def _slots(original: Any, call: Callable[..., Any]) -> dict[str, Any]:
    """What a class of its own defines so that `call` is called in place of `original`."""

    def bind(wrapper: OperationWrapper, instance: Any, owner: Any = None) -> Any:
        return wrapper if instance is None else MethodType(call, instance)

    slots: dict[str, Any] = {"__call__": staticmethod(call)}
    return {**slots, "__get__": bind} if _is_bound(original) else slots


def _is_bound(function: Any) -> bool:
    """Whether `function` becomes a method where it is the attribute of a class."""
    return hasattr(type(function), "__get__")


def wrap_operation(original: Any, row: OpRule, context: CastContext) -> OperationWrapper:
    """The wrapper of `original`, an operation of torch."""
    return OperationWrapper(original, row, casting_call(original, row, context))


def install_casts(
    patcher: Patcher, context: CastContext, rules: Iterable[OpRule] | None = None
) -> None:
    """Put a `CastWrapper` in place of every operation that has a rule, in `OP_RULES` by default.

    Operations that this torch does not have are left out, with one warning that names them.
    """
    missing = []
    for row in OP_RULES if rules is None else rules:
        if hasattr(row.owner, row.name):
            original = vars(row.owner).get(row.name, getattr(row.owner, row.name))
            patcher.replace(row.owner, row.name, wrap_operation(original, row, context))
        elif row.name not in _NEWER:
            missing.append(row.qualified_name)
    if missing:
        warn(
            f"this torch ({torch.__version__}) has no {', '.join(missing)}; expected by the cast "
            "rules, left out. Models that use them by another name run them in their own precision"
        )
