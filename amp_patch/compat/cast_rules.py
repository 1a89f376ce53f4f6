"""The cast rules that scripts choose: by editing the lists, or by being of 2018."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from amp_patch.casts.presets import resolve_rules
from amp_patch.casts.rules import CastRule, OpRule
from amp_patch.casts.spellings import operation_name
from amp_patch.compat.lists import Edit, edits
from amp_patch.compat.registrations import register

_PATHS = {id(torch): "torch", id(torch.nn.functional): "torch.nn.functional"}


def rules_of_today() -> tuple[OpRule, ...]:
    """The default rules, as a script has changed the lists."""
    return _edited("default", edits())


def rules_of_2019(*, allow_banned: bool) -> tuple[OpRule, ...]:
    """The rules of 2019, as a script has changed the lists."""
    banned = [Edit(torch.nn.functional, "binary_cross_entropy", CastRule.FLOAT)]
    return _edited("apex-2019", [*edits(), *(banned if allow_banned else ())])


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
