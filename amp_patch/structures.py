"""Map a function over the tensors of any argument structure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(function: TensorMap, value: Any) -> Any:
    """Return `value` with `function` applied to each tensor in it.

    Walks lists, tuples (named ones too), mappings, dataclasses and any nesting of them. Containers
    keep their type and their extra attributes; a container in which no tensor changed is returned
    as it is, the same object. Nothing that was passed in is mutated. Everything else (numbers,
    strings, modules, sets, user classes) comes back untouched.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return _map_sequence(function, value)
    if isinstance(value, Mapping):
        return _map_mapping(function, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(function, value)
    return value


def _map_sequence(function: TensorMap, value: Any) -> Any:
    mapped = [map_tensors(function, item) for item in value]
    if all(new is old for new, old in zip(mapped, value, strict=True)):
        return value
    if isinstance(value, list):
        return _refilled_list(value, mapped)
    # A namedtuple has its own way; torch.return_types and torch.Size take a sequence as tuple does.
    refilled = value._make(mapped) if hasattr(value, "_make") else type(value)(mapped)
    if getattr(value, "__dict__", None):
        vars(refilled).update(vars(value))
    return refilled


def _refilled_list(value: list[Any], mapped: list[Any]) -> list[Any]:
    if type(value) is list:
        return mapped
    refilled = copy.copy(value)
    refilled[:] = mapped
    return refilled


def _map_mapping(function: TensorMap, value: Mapping[Any, Any]) -> Any:
    changed = {}
    for key, item in value.items():
        mapped = map_tensors(function, item)
        if mapped is not item:
            changed[key] = mapped
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    if isinstance(value, dict) or hasattr(type(value), "__copy__"):
        refilled: Any = copy.copy(value)  # keeps default factories, attributes and the keys' order
        for key, item in changed.items():
            refilled[key] = item
        return refilled
    return _rebuilt(value, changed)


def _rebuilt(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping of the user's own kind, with its attributes; its containers are not shared."""
    if not isinstance(value, MutableMapping):
        kind: Any = type(value)
        return kind({**value, **changed})
    refilled: Any = copy.copy(value)
    for name, attribute in list(getattr(refilled, "__dict__", {}).items()):
        if isinstance(attribute, (dict, list)):
            vars(refilled)[name] = copy.copy(attribute)
    for key, item in changed.items():
        refilled[key] = item
    return refilled


def _map_dataclass(function: TensorMap, value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name, None)
        mapped = map_tensors(function, item)
        if mapped is not item:
            changed[field.name] = mapped
    if not changed:
        return value
    refilled = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(refilled, name, item)  # frozen dataclasses refuse plain assignment
    return refilled
