"""References to torch functions that were taken before the casts were installed.

`from torch.nn.functional import linear` copies the function into a module, where a patch of
`torch.nn.functional` does not reach. Names in loaded modules are rebound; functions that sit in
objects, classes or other functions are left and can be listed.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
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
    """A function without its casts: `function` by its name, and the `place` that holds it."""

    function: str
    place: str

    def __str__(self) -> str:
        return f"{self.function} in {self.place}"


def rebind_references(patcher: Patcher, wrappers: Mapping[int, CastWrapper]) -> None:
    """Put wrappers in place of the functions that loaded modules hold under names of their own.

    `wrappers` has the wrapper of each function by the function's id. Wrappers that modules take
    while the casts are installed become plain functions again when they come off.
    """
    plain = {id(wrapper): wrapper for wrapper in wrappers.values()}
    patcher.on_restore(functools.partial(_unwrap_references, plain))
    for module, name, value in _names_of(wrappers):
        wrapper = wrappers[id(value)]
        if wrapper.__wrapped__ is value:
            patcher.replace(module, name, wrapper)
    for wrapper in wrappers.values():
        _rebind_at_home(patcher, wrapper)


def rebind_in_model(
    patcher: Patcher, wrappers: Mapping[int, CastWrapper], model: nn.Module
) -> None:
    """The same for attributes of the modules in `model`, as `self.activation = F.kl_div`."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            wrapper = wrappers.get(id(value))
            if wrapper is not None and wrapper.__wrapped__ is value:
                patcher.replace(module, name, wrapper)


def pickle_by_name(patcher: Patcher, wrappers: Mapping[int, CastWrapper]) -> None:
    """Let objects that hold a plain function of torch be pickled while it has a wrapper.

    Pickle refuses a function that is not what stands under its name. It asks nobody about those
    written in Python: of these, only what `rebind_in_model` reaches can be pickled.
    """
    kind = types.BuiltinFunctionType
    earlier = copyreg.dispatch_table.get(kind)

    def reduce(function: Any) -> Any:
        wrapper = wrappers.get(id(function))
        if wrapper is not None and wrapper.__wrapped__ is function:
            return wrapper.__reduce__()
        return function.__reduce__() if earlier is None else earlier(function)

    def put_back() -> None:
        del copyreg.dispatch_table[kind]
        if earlier is not None:
            copyreg.pickle(kind, earlier)

    copyreg.pickle(kind, reduce)
    patcher.on_restore(put_back)


def stored_references(wrappers: Mapping[int, CastWrapper]) -> list[StoredReference]:
    """The plain functions that objects, classes and functions hold, and that escape the casts."""
    found: dict[StoredReference, None] = {}
    for holder in gc.get_objects():
        for place, value in _held_by(holder):
            wrapper = wrappers.get(id(value))
            if wrapper is not None and wrapper.__wrapped__ is value:
                name = wrapper._self_qualified_name
                found[StoredReference(name.replace(":", "."), place)] = None
    return list(found)


def _rebind_at_home(patcher: Patcher, wrapper: CastWrapper) -> None:
    """Generated code, of torch.fx and torch.compile, names a function by where it says it is from.

    `torch.nn.functional.linear` is `torch._C._nn.linear` there.
    """
    original = wrapper.__wrapped__
    path = getattr(original, "__module__", None)
    name = getattr(original, "__name__", "")
    if not isinstance(path, str) or path.partition(".")[0] != "torch":
        return
    home: Any = sys.modules["torch"]
    for part in path.split(".")[1:]:
        home = getattr(home, part, None)
    if isinstance(home, types.ModuleType) and vars(home).get(name) is original:
        patcher.replace(home, name, wrapper)


def _unwrap_references(wrappers: Mapping[int, CastWrapper]) -> None:
    for module, name, value in _names_of(wrappers):
        setattr(module, name, value.__wrapped__)


def _names_of(ids: Mapping[int, Any]) -> list[tuple[types.ModuleType, str, Any]]:
    """The names in loaded modules of the user for objects with one of `ids`."""
    known = ids.keys()
    return [
        (module, name, value)
        for path, module in list(sys.modules.items())
        if _is_foreign(path) and issubclass(type(module), types.ModuleType)
        if not known.isdisjoint(map(id, list(vars(module).values())))  # quick, for most
        for name, value in list(vars(module).items())
        if id(value) in known
    ]


def _held_by(holder: Any) -> Iterator[tuple[str, Any]]:
    """The values that `holder` keeps, each with the words for where it is."""
    kind = type(holder)  # `isinstance` would ask proxies of what is gone
    if kind is types.FunctionType:
        if _is_foreign(holder.__module__):
            yield from _held_by_function(holder)
    elif issubclass(kind, type):
        if _is_foreign(holder.__module__):
            place = f"class {holder.__qualname__}"
            yield from _held_in(place, "attribute", vars(holder))
    elif issubclass(kind, types.ModuleType):
        if _is_foreign(holder.__name__):
            containers = {
                name: value
                for name, value in vars(holder).items()
                if type(value) in (dict, list, tuple, functools.partial)
            }
            yield from _held_in(f"module {holder.__name__}", "name", containers)
    elif issubclass(kind, nn.Module) or _is_foreign(kind.__module__):
        attributes = None
        with contextlib.suppress(AttributeError):
            attributes = object.__getattribute__(holder, "__dict__")
        if type(attributes) is dict:
            yield from _held_in(f"{kind.__qualname__} object", "attribute", attributes)


def _held_in(place: str, what: str, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(attributes.items()):
        for item in _items(value):
            yield f"{place}, {what} {name}", item


def _held_by_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    place = f"function {function.__qualname__}"
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"{place}, a default", value
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable without a value yet
            yield f"{place}, its closure", cell.cell_contents


def _items(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        yield from map(_opened, value)
    elif type(value) is dict:
        yield from map(_opened, list(value.values()))
    else:
        yield _opened(value)


def _opened(value: Any) -> Any:
    if type(value) in (staticmethod, classmethod):
        return value.__func__
    return value.func if type(value) is functools.partial else value


def _is_foreign(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _OWN
