"""Casts for the user's own functions; registrations last until they are taken back together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_patch import casting
from amp_patch.casting import float_function, half_function, promote_function
from amp_patch.casts.rules import CastRule
from amp_patch.errors import AmpError

__all__ = [
    "float_function",
    "half_function",
    "promote_function",
    "register",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "take_back",
]

_register: dict[CastRule, Callable[[Any, str], None]] = {
    CastRule.HALF: casting.register_half_function,
    CastRule.FLOAT: casting.register_float_function,
    CastRule.PROMOTE: casting.register_promote_function,
}
_registered: dict[tuple[int, str], Any] = {}


def register(owner: Any, name: str, rule: CastRule) -> None:
    """Register as the user asks for, and note it for `take_back`."""
    _register[rule](owner, name)
    _registered[id(owner), name] = owner


def register_half_function(module: Any, name: str) -> None:
    """As `amp_patch.register_half_function`."""
    register(module, name, CastRule.HALF)


def register_float_function(module: Any, name: str) -> None:
    """As `amp_patch.register_float_function`."""
    register(module, name, CastRule.FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """As `amp_patch.register_promote_function`."""
    register(module, name, CastRule.PROMOTE)


def take_back() -> None:
    """Forget the registrations that were made here. A second call does nothing."""
    while _registered:
        (_, name), owner = _registered.popitem()
        try:
            casting.unregister_function(owner, name)
        except AmpError:  # the user was faster
            continue
