"""Casts for functions of the user: decorators, and registrations by module and name."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import wrapt

from amp_patch.casts.context import CastContext
from amp_patch.casts.rules import CastRule, OpRule
from amp_patch.errors import AmpError, warn
from amp_patch.policy import CASTABLE
from amp_patch.structures import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Self

FindContext = Callable[[], CastContext | None]
Call = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


def casting_decorator(rule: CastRule, find_context: FindContext) -> Callable[[Any], Any]:
    """A decorator that casts the tensors in the arguments of a function, however deeply nested.

    Works on functions, methods, static and class methods, from either side of their decorators.
    Where no casts are active the function gets its arguments as they are.
    """
    call = nested_call(rule, find_context)

    def decorate(function: Any) -> Any:
        if not callable(function) and not isinstance(function, (classmethod, staticmethod)):
            raise AmpError(f"{rule.name.lower()}_function: expected a function, found {function!r}")
        return _Decorated(function, call)

    return decorate


class _Decorated(wrapt.FunctionWrapper[..., Any]):
    """A function of the user with casts. wrapt binds methods; a plain call goes past it.

    wrapt asks a function written in Python for its `__self__` at every call, which takes it longer
    than all that is done here where no casts are active.
    """

    def __new__(cls, function: Any, call: Call) -> Self:
        """Python looks up on the class what calls an object: a plain function has its own."""
        if type(function) is not types.FunctionType:
            return super().__new__(cls)

        def direct(*args: Any, **kwargs: Any) -> Any:
            return call(function, None, args, kwargs)

        slots = {"__call__": staticmethod(direct), "__module__": __name__}
        return super().__new__(type(cls.__name__, (cls,), slots))


def nested_call(rule: CastRule, find_context: FindContext) -> Call:
    """What wrapt calls in place of a function of the user that is to be cast by `rule`."""

    def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        context = find_context()
        half_dtype = None if context is None else context.active_dtype()
        if context is None or half_dtype is None:
            return wrapped(*args, **kwargs)
        cast = functools.partial(_cast, context, _target_dtype(rule, half_dtype, (args, kwargs)))
        args, kwargs = map_tensors(cast, args), _map_keywords(cast, kwargs)
        if rule is not CastRule.FLOAT:
            return wrapped(*args, **kwargs)
        with context.suspended():  # what asks for FP32 runs in FP32 inside as well
            return wrapped(*args, **kwargs)

    return call


def is_of_torch(function: Any) -> bool:
    """Whether `function` is an operation of torch: written to by `out=`, bound to tensors."""
    if isinstance(function, (torch._ops.OpOverloadPacket, torch._ops.OpOverload)):
        return True
    kinds = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
    return isinstance(function, kinds) and not isinstance(function, types.FunctionType)


class UserRules:
    """The registrations of this process, the latest for each operation."""

    def __init__(self) -> None:
        self._rules: dict[tuple[int, str], OpRule] = {}

    def register(self, owner: Any, name: str, rule: CastRule) -> None:
        """Add a registration. The last one wins, with a warning if it says something else."""
        if not isinstance(owner, (types.ModuleType, type)) or not isinstance(name, str):
            raise AmpError(
                f"register: expected a module or class and the name of a function in it, found "
                f"{owner!r} and {name!r}"
            )
        function = inspect.getattr_static(owner, name, None) or getattr(owner, name, None)
        if not callable(function) and not isinstance(function, (classmethod, staticmethod)):
            raise AmpError(
                f"register: expected the name of a function in {owner!r}, found {name!r}, which is "
                f"{'not there' if function is None else repr(function)}"
            )
        earlier = self._rules.get((id(owner), name))
        if earlier is not None and earlier.rule is not rule:
            warn(
                f"{name} was registered as {earlier.rule.name} and is {rule.name} from now on; "
                "the last registration wins"
            )
        self._rules[id(owner), name] = OpRule(owner, name, rule)

    def forget(self, owner: Any, name: str) -> None:
        """Take a registration back."""
        if self._rules.pop((id(owner), name), None) is None:
            raise AmpError(
                f"unregister_function: expected a function that was registered, found {name!r} of "
                f"{owner!r}"
            )

    def rows(self) -> tuple[OpRule, ...]:
        """All registrations."""
        return tuple(self._rules.values())


user_rules = UserRules()


def _map_keywords(cast: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Never `kwargs` itself, and what is written to is never a copy."""
    return {k: value if k == "out" else map_tensors(cast, value) for k, value in kwargs.items()}


def _cast(context: CastContext, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is dtype or tensor.dtype not in CASTABLE:
        return tensor
    return context.cast(tensor, dtype)


def _target_dtype(rule: CastRule, half_dtype: torch.dtype, arguments: Any) -> torch.dtype:
    if rule is CastRule.HALF:
        return half_dtype
    if rule is CastRule.FLOAT:
        return torch.float32
    found: set[torch.dtype] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in CASTABLE:
            found.add(tensor.dtype)
        return tensor

    map_tensors(note, arguments)
    return found.pop() if len(found) == 1 else torch.float32  # any two of the three meet there
