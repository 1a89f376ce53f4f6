"""Who holds functions of torch that were taken before the casts were installed, and escape them.

Containers have no name, so from each function the way goes up, over what refers to it, until
something that a reader can find: a module, a class, an object, a function.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch import nn

from amp_patch.casts.namespaces import is_foreign, names_of, of_class
from amp_patch.casts.wrappers import CastWrapper

_MAX_NESTING = 16  # of containers
_MANY = 256  # `gc.get_referrers` compares every reference that there is with every argument

_Below = dict[int, set[int]]  # by the ids of objects on the way: ids of the functions below them


@dataclass(frozen=True, slots=True)
class StoredReference:
    """A function without its casts: `function` by its name, and the `place` that holds it."""

    function: str
    place: str

    def __str__(self) -> str:
        return f"{self.function} in {self.place}"


class _Way:
    """An object without a name, and how functions are reached from it."""

    # An instance of a class of ours is passed over as a holder; a tuple or list would be found.
    __slots__ = ("below", "held")

    def __init__(self, held: Any, below: _Below) -> None:
        self.held = held
        self.below = below


def stored_references(wrappers: Mapping[int, CastWrapper]) -> list[StoredReference]:
    """The plain functions that escape the casts, `wrappers` being by the ids of the functions."""
    found: dict[tuple[int, str], None] = {}
    reached: _Below = {one: {one} for one in wrappers}
    ways = _direct_holders(wrappers.keys(), found)
    kept = []  # alive, so that nothing else gets the id of one
    for _ in range(_MAX_NESTING):
        kept.append(ways)
        for one, way in ways.items():
            reached.setdefault(one, set()).update(way.below[one])
        if not ways:
            break
        ways = _one_up(ways, found)
    for frame in _running():
        _note(_variables(frame), reached, found)
    return [
        StoredReference(wrappers[one]._self_qualified_name.replace(":", "."), place)
        for one, place in found
    ]


def _direct_holders(known: AbstractSet[int], found: dict[tuple[int, str], None]) -> dict[int, _Way]:
    """The ways from what refers to functions, where that has no name."""
    ways: dict[int, _Way] = {}
    heap = gc.get_objects()
    internal = _closures_of_internals(heap)
    for holder in heap:
        if known.isdisjoint(map(id, gc.get_referents(holder))):
            continue
        if id(holder) not in internal and not _is_internal(holder):
            below = {one: {one} for one in map(id, gc.get_referents(holder)) if one in known}
            _name_or_go_up(holder, below, found, ways)
    return ways


def _closures_of_internals(heap: Iterable[Any]) -> set[int]:
    """The ids of the variables that functions of torch and ours share: most of what is found."""
    functions = (one for one in heap if type(one) is types.FunctionType and one.__closure__)
    return {id(cell) for one in functions if _is_internal(one) for cell in one.__closure__ or ()}


def _one_up(ways: dict[int, _Way], found: dict[tuple[int, str], None]) -> dict[int, _Way]:
    """The ways from what refers to the ends of `ways`, where that has no name either."""
    higher: dict[int, _Way] = {}
    for holder in _referrers(ways):
        if _is_internal(holder):
            continue
        below: _Below = {}
        for one in map(id, gc.get_referents(holder)):
            if one in ways and id(holder) not in ways[one].below:  # else it is a cycle
                for key, functions in ways[one].below.items():
                    below.setdefault(key, set()).update(functions)
        if below:
            _name_or_go_up(holder, below, found, higher)
    return higher


def _referrers(ways: dict[int, _Way]) -> Iterator[Any]:
    if len(ways) < _MANY:
        yield from gc.get_referrers(*(way.held for way in ways.values()))
        return
    known = ways.keys()
    for holder in gc.get_objects():
        if not known.isdisjoint(map(id, gc.get_referents(holder))):
            yield holder


def _name_or_go_up(
    holder: Any, below: _Below, found: dict[tuple[int, str], None], ways: dict[int, _Way]
) -> None:
    if _note(_parts(holder), below, found) or type(holder) in _WITH_NAMES:
        return
    ways[id(holder)] = _Way(holder, {**below, id(holder): set().union(*below.values())})


def _note(
    parts: Iterable[tuple[str, Any]], below: _Below, found: dict[tuple[int, str], None]
) -> bool:
    """Whether one of `parts`, each with the words for where it is, leads to functions."""
    places = [
        (one, place) for place, value in parts if id(value) in below for one in below[id(value)]
    ]
    found.update(dict.fromkeys(places))
    return bool(places)


_WITH_NAMES = (types.FunctionType, types.ModuleType, type)


def _is_internal(holder: Any) -> bool:
    """Whether it is torch's, or ours, and no part of a model."""
    kind = type(holder)  # `isinstance` would ask proxies of what is gone
    if kind is types.FunctionType:
        return not is_foreign(holder.__globals__.get("__name__", ""))
    if issubclass(kind, type):
        return not is_foreign(of_class(holder, "__module__"))
    if kind is dict and _is_of_module(holder):
        return not is_foreign(holder["__name__"])
    if issubclass(kind, types.ModuleType):
        return not is_foreign(names_of(holder).get("__name__"))
    if kind is types.FrameType:
        return True
    return not issubclass(kind, nn.Module) and not is_foreign(of_class(kind, "__module__"))


def _is_of_module(names: dict[Any, Any]) -> bool:
    """Whether these are the names of a loaded module, to which all its functions refer too."""
    name = names.get("__name__") if "__builtins__" in names else None
    module = sys.modules.get(name) if isinstance(name, str) else None
    return isinstance(module, types.ModuleType) and names_of(module) is names


def _parts(holder: Any) -> Iterator[tuple[str, Any]]:
    """What `holder` has under names, each with the words for where it is."""
    kind = type(holder)
    if kind is types.FunctionType:
        yield from _parts_of_function(holder)
    elif issubclass(kind, type):
        place = f"class {of_class(holder, '__qualname__')}, attribute"
        yield from _named(place, of_class(holder, "__dict__"))
    elif kind is dict and _is_of_module(holder):
        yield from _named(f"module {holder['__name__']}, name", holder)
    elif issubclass(kind, types.ModuleType):
        names = names_of(holder)
        yield from _named(f"module {names.get('__name__')}, name", names)
    elif of_class(kind, "__module__") not in sys.stdlib_module_names:  # as containers are
        place = f"{of_class(kind, '__qualname__')} object, attribute"
        yield from _named(place, _attributes(holder))


def _named(place: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{place} {name}", value) for name, value in list(values.items()))


def _attributes(holder: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for base in of_class(type(holder), "__mro__"):
        names = of_class(base, "__dict__")
        if "__slots__" in names:
            for name, slot in names.items():
                if type(slot) is types.MemberDescriptorType:
                    with contextlib.suppress(AttributeError):  # a slot without a value yet
                        attributes[name] = slot.__get__(holder)
    with contextlib.suppress(AttributeError):
        attributes.update(object.__getattribute__(holder, "__dict__"))
    return attributes


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    place = f"function {function.__qualname__}"
    yield from _named(f"{place}, attribute", vars(function))
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"{place}, a default", value
    for cell in function.__closure__ or ():
        yield f"{place}, its closure", cell
    yield f"{place}, its global names", function.__globals__


def _running() -> Iterator[types.FrameType]:
    """The functions of the user that are being called, on all threads."""
    for innermost in sys._current_frames().values():  # noqa: SLF001 - public, says its documentation
        frame: types.FrameType | None = innermost
        while frame is not None:
            is_function = frame.f_code.co_flags & _HAS_OWN_NAMES
            if is_function and is_foreign(frame.f_globals.get("__name__", "")):
                yield frame
            frame = frame.f_back


_HAS_OWN_NAMES = 0x2  # CO_NEWLOCALS: the code of a function, not of a module or a class


def _variables(frame: types.FrameType) -> Iterator[tuple[str, Any]]:
    place = f"function {frame.f_code.co_name}, variable"
    return _named(place, frame.f_locals)
