"""What `tune` found: the arguments for `initialize`, and all that it measured on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from amp_patch.tools.plain_data import plain_data
from amp_patch.tools.text_table import TextTable

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
    even all of the model in FP32 is outside, so that precision is not what is wrong.
    """

    arguments: Mapping[str, Any]
    kept: tuple[str, ...]
    tolerance: float
    is_within: bool
    measurements: tuple[Measurement, ...]

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
        data: dict[str, Any] = plain_data(asdict(self))
        return data

    def _conclusion(self) -> str:
        call = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        if not self.is_within:
            return (
                "Even with everything kept in FP32 the result is outside the tolerance: it is not "
                "precision that makes the difference, or the tolerance is below what chance does."
            )
        return f"amp.initialize(model, optimizer, {call})"


def _listed(kept: tuple[str, ...]) -> str:
    if not kept:
        return "nothing"
    more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
    return ", ".join(kept[:_SHOWN]) + more
