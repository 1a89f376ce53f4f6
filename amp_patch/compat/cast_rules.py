"""The cast rules that scripts choose: by editing the lists, or by being of 2018."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from amp_patch.casts.presets import resolve_rules
from amp_patch.casts.rules import CastRule, OpRule
from amp_patch.casts.spellings import operation_name
from amp_patch.compat.lists import Edit, edits
from amp_patch.compat.registrations import register
from amp_patch.slot import slot

_PATHS = {id(torch): "torch", id(torch.nn.functional): "torch.nn.functional"}


def apply_edits() -> None:
    """Let what a script has changed in the lists hold from now on."""
    found = edits()
    if found:
        _install(_edited("default", found))


def use_rules_of_2019(*, allow_banned: bool) -> None:
    """Let the lists of 2019 hold, as the script has changed them."""
    banned = [Edit(torch.nn.functional, "binary_cross_entropy", CastRule.FLOAT)]
    _install(_edited("apex-2019", [*edits(), *(banned if allow_banned else ())]))


def _edited(preset: str, changes: Iterable[Edit]) -> tuple[OpRule, ...]:
    """The rules of `preset`, changed. Functions that are no operation of torch are registered."""
    by_rule: dict[CastRule | None, set[str]] = {CastRule.HALF: set(), CastRule.FLOAT: set()}
    left: set[str] = set()
    for edit in changes:
        name = operation_name(f"{_PATHS.get(id(edit.owner), 'Tensor')}.{edit.name}", frozenset())
        if edit.rule is None:
            left.add(name or edit.name)
        elif name is None or edit.rule not in by_rule:
            register(edit.owner, edit.name, edit.rule)
        else:
            by_rule[edit.rule].add(name)
    half, full = by_rule[CastRule.HALF], by_rule[CastRule.FLOAT]
    return resolve_rules(preset, half=half, float=full, leave=left - half - full)


def _install(rules: tuple[OpRule, ...]) -> None:
    session = slot.open()
    half_dtype = session.context.half_dtype
    session.casts.remove()
    session.casts.install(rules)
    session.context.half_dtype = half_dtype  # of the models that are there already
