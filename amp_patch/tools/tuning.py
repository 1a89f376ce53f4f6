"""What `tune` found: the arguments for `initialize`, and all that it measured on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from amp_patch.tools.plain_data import plain_data
from amp_patch.tools.text_table import TextTable

WHOLE_MODEL = "*"  # as `keep_fp32` takes it: what the model's own forward computes as well
_SHOWN = 4


@dataclass(frozen=True)
class Measurement:
    """One try: what was kept in FP32, and how far loss and gradients then were from FP32's.

    Both errors are relative; inf where something is not finite.
    """

    kept: tuple[str, ...]
    loss_error: float
    gradient_error: float

    @property
    def error(self) -> float:
        """The larger of the two."""
        return max(self.loss_error, self.gradient_error)


@dataclass(frozen=True)
class Tuning:
    """The smallest change to a level that stays inside a tolerance.

    `arguments` are for `initialize`; `kept` is what they keep in FP32; `is_within` is False where
    even all of the model, measured in FP32, is outside, so that precision is not what is wrong.
    `moved` are operations that the rules of the level compute in FP32 and that `arguments` let run
    in half.
    """

    arguments: Mapping[str, Any]
    kept: tuple[str, ...]
    tolerance: float
    is_within: bool
    measurements: tuple[Measurement, ...]
    moved: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self._conclusion()}"

    def table(self) -> TextTable:
        """Every measurement, in the order in which they were made."""
        rows = tuple(
            (
                _listed(one.kept),
                f"{one.loss_error:.2g}",
                f"{one.gradient_error:.2g}",
                "yes" if one.error <= self.tolerance else "no",
            )
            for one in self.measurements
        )
        heads = ("kept in FP32", "loss\nerror", "gradient\nerror", f"within\n{self.tolerance:g}")
        return TextTable(heads, rows)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        data: dict[str, Any] = plain_data(asdict(replace(self, arguments=self._named())))
        return data

    def _named(self) -> dict[str, Any]:
        """The arguments, with rules by the names of their operations."""
        named = {"half": self.moved} if self.moved else {"float": self.kept}
        return {k: named if k == "cast_rules" else v for k, v in self.arguments.items()}

    def _conclusion(self) -> str:
        if not self.is_within:
            return (
                "Even with everything kept in FP32 the result is outside the tolerance: it is not "
                "precision that makes the difference, or the tolerance is below what chance does."
            )
        return f"amp.initialize(model, optimizer, {', '.join(self._call())})"

    def _call(self) -> Iterator[str]:
        for name, value in self.arguments.items():
            if name == "cast_rules":
                yield f"cast_rules=amp.resolve_rules({self._rules()})"
            else:
                yield f"{name}={value!r}"

    def _rules(self) -> str:
        given = {"half": self.moved, "float": () if self.moved else self.kept}
        return ", ".join(f"{name}={list(value)!r}" for name, value in given.items() if value)


def _listed(kept: tuple[str, ...]) -> str:
    if not kept:
        return "nothing"
    if kept == (WHOLE_MODEL,):
        return "everything"
    more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
    return ", ".join(kept[:_SHOWN]) + more
