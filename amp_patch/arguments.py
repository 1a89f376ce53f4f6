"""Check what users pass, and turn one object or many into a list. Raises AmpError."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from amp_patch.casts.presets import resolve_rules
from amp_patch.casts.rules import OpRule
from amp_patch.errors import AmpError

_MOST = 10_000


def as_list(one_or_many: Any) -> list[Any]:
    """One object or a list of them, as a list."""
    return list(one_or_many) if isinstance(one_or_many, (list, tuple)) else [one_or_many]


def checked_models(models: Any) -> list[nn.Module]:
    """The models as a list, different ones."""
    found = as_list(models)
    for model in found:
        if not isinstance(model, nn.Module):
            raise AmpError(
                f"models: expected a torch.nn.Module or a list of them, found {_described(model)}"
            )
    refuse_duplicates("models", found)
    return found


def checked_optimizers(optimizers: Any) -> list[Any]:
    """The optimizers as a list, different ones; anything with parameter groups and a step."""
    found = [] if optimizers is None else as_list(optimizers)
    for optimizer in found:
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
            raise AmpError(
                "optimizers: expected an optimizer (with param_groups and step), a list of them or "
                f"None, found {_described(optimizer)}"
            )
    for optimizer in found:
        if not hasattr(optimizer, "__dict__") or type(optimizer).__weakrefoffset__ == 0:
            raise AmpError(
                f"optimizers: expected an object that takes attributes and weak references, found "
                f"{_described(optimizer)}; leave out __slots__, or add '__dict__' and '__weakref__'"
            )
    refuse_duplicates("optimizers", found)
    return found


def refuse_duplicates(name: str, objects: list[Any]) -> None:
    """AmpError if one of `objects` is there twice."""
    first: dict[int, int] = {}
    for i, one in enumerate(objects):
        earlier = first.setdefault(id(one), i)
        if earlier != i:
            raise AmpError(
                f"{name}: expected different objects, found one of them twice: the "
                f"{type(one).__name__} at {earlier} and {i}; leave one out"
            )


def checked_rules(rules: Any) -> tuple[OpRule, ...]:
    """The cast rules of a preset, or those that were passed."""
    if isinstance(rules, str):
        return resolve_rules(rules)
    found = tuple(rules) if isinstance(rules, Iterable) else ()
    if not found or not all(isinstance(row, OpRule) for row in found):
        raise AmpError(
            f"cast_rules: expected the name of a preset or what resolve_rules gave, found "
            f"{_described(rules)}"
        )
    return found


def checked_count(name: str, value: Any, minimum: int) -> int:
    """An integer of at least `minimum`, also from a string."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or not minimum <= value <= _MOST:
        at_most = f" and at most {_MOST}" if isinstance(value, int) and value > _MOST else ""
        raise AmpError(
            f"{name}: expected an integer of at least {minimum}{at_most}, found {value!r}"
        )
    return value


def checked_names(name: str, names: Any) -> frozenset[str]:
    """One name or several."""
    if names is None:
        return frozenset()
    if isinstance(names, str) or not isinstance(names, Iterable):
        names = (names,)
    found = tuple(names)
    for one in found:
        if not isinstance(one, str):
            raise AmpError(f"{name}: expected names of arguments, found {_described(one)}")
    return frozenset(found)


def check_loss(loss: Any) -> None:
    """Refuse what backward cannot start from."""
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        raise AmpError(f"loss: expected a floating-point tensor, found {_described(loss)}")
    if not loss.requires_grad:
        raise AmpError(
            "loss: expected a tensor that requires grad, found one without history; was it "
            "computed under no_grad, detached, or from frozen parameters only?"
        )


def _described(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"
