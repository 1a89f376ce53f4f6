"""Casts for functions of the user: decorators, and registrations by module and name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import wrapt

from amp_patch.casts.context import CastContext
from amp_patch.casts.rules import CastRule, OpRule
from amp_patch.errors import AmpError, warn
from amp_patch.policy import CASTABLE
from amp_patch.structures import map_tensors

Function = TypeVar("Function", bound=Callable[..., Any])
FindContext = Callable[[], CastContext | None]


def casting_decorator(rule: CastRule, find_context: FindContext) -> Callable[[Any], Any]:
    """A decorator that casts the tensors in the arguments of a function, however deeply nested.

    Works on functions, methods, static and class methods, from either side of their decorators.
    Where no casts are active the function gets its arguments as they are.
    """

    def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        context = find_context()
        half_dtype = None if context is None else context.active_dtype()
        if context is None or half_dtype is None:
            return wrapped(*args, **kwargs)
        dtype = _target_dtype(rule, half_dtype, (args, kwargs))

        cast = functools.partial(_cast, context, dtype)
        args, kwargs = map_tensors(cast, args), map_tensors(cast, kwargs)
        if rule is not CastRule.FLOAT:
            return wrapped(*args, **kwargs)
        with context.suspended():  # what asks for FP32 runs in FP32 inside as well
            return wrapped(*args, **kwargs)

    return wrapt.decorator(call)


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


class UserRules:
    """The registrations of this process, the latest for each operation."""

    def __init__(self) -> None:
        self._rules: dict[tuple[int, str], OpRule] = {}

    def register(self, owner: Any, name: str, rule: CastRule) -> OpRule:
        """Add a registration. The last one wins, with a warning if it says something else."""
        if not isinstance(name, str) or not hasattr(owner, name):
            raise AmpError(
                f"register: expected a module or class and the name of a function in it, found "
                f"{owner!r} and {name!r}"
            )
        if not callable(getattr(owner, name)):
            raise AmpError(f"register: expected a function, found {getattr(owner, name)!r}")
        earlier = self._rules.get((id(owner), name))
        if earlier is not None and earlier.rule is not rule:
            warn(
                f"{name} was registered as {earlier.rule.name} and is {rule.name} from now on; "
                "the last registration wins"
            )
        row = OpRule(owner, name, rule)
        self._rules[id(owner), name] = row
        return row

    def forget(self, owner: Any, name: str) -> None:
        """Take a registration back."""
        if self._rules.pop((id(owner), name), None) is None:
            raise AmpError(f"unregister: expected a function that was registered, found {name!r}")

    def rows(self) -> tuple[OpRule, ...]:
        """All registrations."""
        return tuple(self._rules.values())


user_rules = UserRules()
