"""References to torch functions that were taken before the casts were installed.

`from torch.nn.functional import linear` copies the function into a module, where a patch of
`torch.nn.functional` does not reach. Names in loaded modules are rebound; functions that sit in
objects, classes or other functions are left and can be listed.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from amp_patch.casts.patcher import Patcher
from amp_patch.casts.wrappers import CastWrapper

_OWN = frozenset({"amp_patch", "functorch", "torch", "torchgen", "wrapt"})


@dataclass(frozen=True, slots=True)
class StoredReference:
    """A plain torch function, by its name, in a place where casts do not reach it."""

    function: str
    place: str

    def __str__(self) -> str:
        return f"{self.function} in {self.place}"


def rebind_references(patcher: Patcher, wrappers: Mapping[int, CastWrapper]) -> None:
    """Put wrappers in place of the functions that loaded modules hold under names of their own.

    `wrappers` has the wrapper of each function by the function's id. Wrappers that modules take
    while the casts are installed become plain functions again when they come off.
    """
    patcher.on_restore(_unwrap_references)
    for module in _foreign_modules():
        for name, value in list(vars(module).items()):
            wrapper = wrappers.get(id(value))
            if wrapper is not None and wrapper.__wrapped__ is value:
                patcher.replace(module, name, wrapper)


def stored_references(wrappers: Mapping[int, CastWrapper]) -> list[StoredReference]:
    """The plain functions that objects, classes and functions hold, and that escape the casts."""
    found = []
    for holder in gc.get_objects():
        for place, value in _held_by(holder):
            wrapper = wrappers.get(id(value))
            if wrapper is not None and wrapper.__wrapped__ is value:
                found.append(StoredReference(wrapper.qualified_name, place))
    return found


def _unwrap_references() -> None:
    for module in _foreign_modules():
        for name, value in list(vars(module).items()):
            if type(value) is CastWrapper:
                setattr(module, name, value.__wrapped__)


def _foreign_modules() -> Iterator[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name.partition(".")[0] not in _OWN:
            yield module


def _held_by(holder: Any) -> Iterator[tuple[str, Any]]:
    """The values that `holder` keeps, each with the words for where it is."""
    if isinstance(holder, types.FunctionType):
        if _is_foreign(holder.__module__):
            yield from _held_by_function(holder)
    elif isinstance(holder, type):
        if _is_foreign(holder.__module__):
            for name, value in vars(holder).items():
                yield f"class {holder.__qualname__}, attribute {name}", _opened(value)
    elif isinstance(holder, nn.Module) or _is_foreign(type(holder).__module__):
        attributes = getattr(holder, "__dict__", None)
        if type(attributes) is dict and not isinstance(holder, types.ModuleType):
            for name, value in list(attributes.items()):
                place = f"{type(holder).__qualname__} object, attribute {name}"
                for item in _items(value):
                    yield place, item


def _held_by_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    place = f"function {function.__qualname__}"
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in defaults:
        yield f"{place}, a default", value
    for value in inspect.getclosurevars(function).nonlocals.values():
        yield f"{place}, its closure", value


def _items(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        yield from map(_opened, value)
    elif type(value) is dict:
        yield from map(_opened, value.values())
    else:
        yield _opened(value)


def _opened(value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.func if type(value) is functools.partial else value


def _is_foreign(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _OWN
