"""References to torch functions that were taken before the casts were installed.

`from torch.nn.functional import linear` copies the function into a module, where a patch of
`torch.nn.functional` does not reach. Names in modules are rebound; functions that sit in objects,
classes or other functions are left, and `holders` lists them.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.fx
import wrapt
from torch import nn

from amp_patch.casts.namespaces import (
    is_foreign,
    loaded_modules,
    names_of,
    unlisted_namespaces,
    users_of,
)
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.tracing import is_tracing
from amp_patch.casts.wrappers import CastWrapper


def rebind_references(patcher: Patcher, wrappers: Mapping[int, CastWrapper]) -> None:
    """Put wrappers in place of the functions that modules hold under names of their own.

    `wrappers` has the wrapper of each function by the function's id. Wrappers that modules take
    while the casts are installed become plain functions again when they come off.
    """
    patcher.on_restore(functools.partial(_unwrap_references, _by_id(wrappers)))
    for module in _modules_with(wrappers.keys()):
        for name, wrapper in _plain_names(names_of(module), wrappers):
            with contextlib.suppress(Exception):  # a module may refuse, by code of its own
                patcher.replace(module, name, wrapper)
    users = _modules_with({*wrappers, *map(id, (torch, nn, nn.functional))})
    _rebind_unlisted(patcher, wrappers, (one for user in users for one in _values(user)))
    for wrapper in wrappers.values():
        _rebind_at_home(patcher, wrapper)
    _rebind_in_graphs(patcher, wrappers)


def rebind_in_model(
    patcher: Patcher, wrappers: Mapping[int, CastWrapper], model: nn.Module
) -> None:
    """The same for attributes of the modules in `model`, as `self.activation = F.kl_div`.

    Also for the names that their methods use, where these came from a file that is no module.
    """
    reached: list[Any] = []
    for module in model.modules():
        for name, wrapper in _plain_names(vars(module), wrappers):
            patcher.replace(module, name, wrapper)
        reached += (type(module), *vars(module).values())
    _rebind_unlisted(patcher, wrappers, reached)


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


def _rebind_in_graphs(patcher: Patcher, wrappers: Mapping[int, CastWrapper]) -> None:
    """Nodes of torch.fx hold functions, which `torch.fx.Interpreter` calls without generated code.

    When it runs a graph to trace it anew, as torch.compile does, that has its casts by then.
    """

    def call_function(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        target, *rest = args
        if not is_tracing():
            target = wrappers.get(id(target), target)
        return wrapped(target, *rest, **kwargs)

    kind = torch.fx.Interpreter
    patcher.replace(kind, "call_function", wrapt.FunctionWrapper(kind.call_function, call_function))


def _rebind_unlisted(
    patcher: Patcher, wrappers: Mapping[int, CastWrapper], values: Iterable[Any]
) -> None:
    for names, source in unlisted_namespaces(values):
        found = _plain_names(names, wrappers)
        if found:
            users = users_of(names, source)
            patcher.on_restore(functools.partial(_unwrap_unlisted, users, _by_id(wrappers)))
            names.update(found)


def _plain_names(
    names: Mapping[str, Any], wrappers: Mapping[int, CastWrapper]
) -> list[tuple[str, CastWrapper]]:
    """The names for functions without casts, with the wrappers to put in their place."""
    return [
        (name, wrappers[id(value)])
        for name, value in list(names.items())
        if id(value) in wrappers and wrappers[id(value)].__wrapped__ is value
    ]


def _unwrap_references(wrappers: Mapping[int, CastWrapper]) -> None:
    for module in _modules_with(wrappers.keys()):
        for name, value in list(names_of(module).items()):
            if id(value) in wrappers:
                with contextlib.suppress(Exception):
                    setattr(module, name, value.__wrapped__)


def _unwrap_unlisted(users: weakref.WeakSet[Any], wrappers: Mapping[int, CastWrapper]) -> None:
    for user in users:  # any of them, as long as one is left
        names = user.__globals__ if isinstance(user, types.FunctionType) else names_of(user)
        plain = [(name, one.__wrapped__) for name, one in names.items() if id(one) in wrappers]
        names.update(plain)


def _by_id(wrappers: Mapping[int, CastWrapper]) -> dict[int, CastWrapper]:
    return {id(wrapper): wrapper for wrapper in wrappers.values()}


def _modules_with(ids: AbstractSet[int]) -> Iterator[types.ModuleType]:
    """The loaded modules of the user with a name for an object with one of `ids`."""
    for path, module in loaded_modules():
        if is_foreign(path) and not ids.isdisjoint(map(id, _values(module))):
            yield module


def _values(module: types.ModuleType) -> list[Any]:
    return list(names_of(module).values())
