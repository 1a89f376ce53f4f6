"""The lists of functions that scripts edit before `initialize`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from amp_patch.casts.presets import PRESETS, resolve_rules
from amp_patch.casts.rules import CastRule, OpRule

_PRESET = "apex-2019"
_MEANING = {
    "FP16_FUNCS": (CastRule.HALF,),
    "FP32_FUNCS": (CastRule.FLOAT, CastRule.NORM),
    "CASTS": (CastRule.PROMOTE,),
}
_SEQUENCES = ("cat", "stack")
_OF_REGISTRATION = {
    "FP16_FUNCS": CastRule.HALF,
    "FP32_FUNCS": CastRule.FLOAT,
    "CASTS": CastRule.PROMOTE,
    "SEQUENCE_CASTS": CastRule.PROMOTE,
}


class Edit(NamedTuple):
    """What a script has said of one function: its rule, None for no cast at all."""

    owner: Any
    name: str
    rule: CastRule | None


class OverrideLists:
    """The names of one namespace, a list for each way to cast. It tells what was edited."""

    def __init__(self, owner: Any, rows: tuple[OpRule, ...]) -> None:
        self.MODULE = owner
        self._original = {
            key: list(dict.fromkeys(_names(owner, rows, rules))) for key, rules in _MEANING.items()
        }
        casts = self._original["CASTS"]
        self._original["SEQUENCE_CASTS"] = [name for name in casts if name in _SEQUENCES]
        self._original["CASTS"] = [name for name in casts if name not in _SEQUENCES]
        self.FP16_FUNCS: list[str] = []
        self.FP32_FUNCS: list[str] = []
        self.CASTS: list[str] = []
        self.SEQUENCE_CASTS: list[str] = []
        self.BANNED_FUNCS: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget all edits; the lists stay the same objects."""
        for name, original in self._original.items():
            getattr(self, name)[:] = original

    def edits(self) -> Iterator[Edit]:
        """What was put into a list, and what is in none any more."""
        kept = set()
        for key, rule in _OF_REGISTRATION.items():
            names = getattr(self, key)
            kept.update(names)
            for name in names:
                if name not in self._original[key]:
                    yield Edit(self.MODULE, name, rule)
        for name in dict.fromkeys(name for one in self._original.values() for name in one):
            if name not in kept:
                yield Edit(self.MODULE, name, None)


def _names(owner: Any, rows: tuple[OpRule, ...], rules: tuple[CastRule, ...]) -> Iterator[str]:
    """Operations by the names under which `owner` has them, and its operators."""
    for name, rule in PRESETS[_PRESET].items():
        if rule in rules and hasattr(owner, name):
            yield name
    for row in rows:
        if row.owner is owner and row.rule in rules:
            yield row.name


_rows = resolve_rules(_PRESET)
functional_overrides = OverrideLists(torch.nn.functional, _rows)
torch_overrides = OverrideLists(torch, _rows)
tensor_overrides = OverrideLists(torch.Tensor, _rows)
ALL = (functional_overrides, torch_overrides, tensor_overrides)


def edits() -> list[Edit]:
    """What a script has changed in any of the lists."""
    return [edit for lists in ALL for edit in lists.edits()]


def reset() -> None:
    """Forget all edits."""
    for lists in ALL:
        lists.reset()
