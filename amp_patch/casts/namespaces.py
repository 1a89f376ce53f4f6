"""The global names of code: of loaded modules, and of files that ran without being listed as one.

torch.hub and loaders of configurations run a file that `sys.modules` never shows. The functions,
classes and objects that came out of it lead to its names.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

_OWN = frozenset({"amp_patch", "functorch", "torch", "torchgen", "wrapt"})


def is_foreign(module: Any) -> bool:
    """Whether a module of that name is neither torch's nor ours."""
    return isinstance(module, str) and module.partition(".")[0] not in _OWN


def names_of(module: types.ModuleType) -> dict[str, Any]:
    """The names in `module`; asked so, a lazy one is not loaded by it."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def of_class(owner: type, name: str) -> Any:
    """What every class has under `name`; asked so, no code of a metaclass runs."""
    return type.__getattribute__(owner, name)


def loaded_modules() -> list[tuple[str, types.ModuleType]]:
    """What `sys.modules` has under which path, without things that are no module."""
    return [
        (path, module)
        for path, module in list(sys.modules.items())
        if issubclass(type(module), types.ModuleType)
    ]


def unlisted_namespaces(values: Iterable[Any]) -> Iterator[tuple[dict[str, Any], object]]:
    """Global names of the code that `values` come from, and of what that code itself has loaded.

    Each with the function or module that leads to it. Namespaces of loaded modules are left out.
    """
    seen = {id(names_of(module)) for _, module in loaded_modules()}
    looked_at: set[int] = set()
    waiting = [values]
    while waiting:
        for source in _sources(waiting.pop(), looked_at):
            is_module = isinstance(source, types.ModuleType)
            names = names_of(source) if is_module else source.__globals__
            if id(names) not in seen and is_foreign(names.get("__name__", "")):
                seen.add(id(names))
                yield names, source
                waiting.append(list(names.values()))


def users_of(names: dict[str, Any], source: object) -> weakref.WeakSet[Any]:
    """Those of the functions in `names` that run in it, besides `source`: a weak hold on it."""
    functions = [one for one in _sources(list(names.values()), set()) if _runs_in(one, names)]
    return weakref.WeakSet([source, *functions])


def _runs_in(source: Any, names: dict[str, Any]) -> bool:
    return type(source) is types.FunctionType and source.__globals__ is names


def _sources(values: Iterable[Any], looked_at: set[int]) -> Iterator[Any]:
    """The functions, methods and modules among `values`, and the methods of other objects."""
    for value in values:
        kind = type(value)
        if kind is types.FunctionType:
            yield _innermost(value)
        elif issubclass(kind, types.ModuleType):
            yield value
        else:
            owner = value if issubclass(kind, type) else kind
            if id(owner) not in looked_at:
                yield from _methods(owner, looked_at)


def _methods(owner: type, looked_at: set[int]) -> Iterator[types.FunctionType]:
    for base in of_class(owner, "__mro__"):
        if id(base) in looked_at:
            continue
        looked_at.add(id(base))
        if not is_foreign(of_class(base, "__module__")) or _is_listed(base):
            continue
        for value in list(of_class(base, "__dict__").values()):
            method = _bare(value)
            if type(method) is types.FunctionType:
                yield _innermost(method)


def _bare(value: Any) -> Any:
    if type(value) in (staticmethod, classmethod):
        return value.__func__
    return value.fget if type(value) is property else value


def _is_listed(owner: type) -> bool:
    """Whether `owner` is what its module has under its name, as most classes are."""
    module = sys.modules.get(of_class(owner, "__module__"))
    if not issubclass(type(module), types.ModuleType):
        return False
    return names_of(module).get(of_class(owner, "__name__")) is owner  # type: ignore[arg-type]


def _innermost(function: types.FunctionType) -> types.FunctionType:
    """What decorators have been put around."""
    seen = set()
    while id(function) not in seen:
        seen.add(id(function))
        inner = vars(function).get("__wrapped__")
        if type(inner) is types.FunctionType:
            function = inner
    return function
