"""What a benchmark has found: rows with a target and a verdict, as a table or as plain data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HEADINGS = ("what", "measured", "target", "verdict")


@dataclass(frozen=True)
class Target:
    """A bound on a measured value."""

    limit: float
    is_floor: bool = False

    def __str__(self) -> str:
        return f"at {'least' if self.is_floor else 'most'} {self.limit:g}"

    def excess(self, value: float) -> float:
        """By how much the value is on the wrong side; not above zero where the target is met."""
        return self.limit - value if self.is_floor else value - self.limit


def at_most(limit: float) -> Target:
    """Return the target of a cost."""
    return Target(limit)


def at_least(limit: float) -> Target:
    """Return the target of a gain."""
    return Target(limit, is_floor=True)


@dataclass(frozen=True)
class Row:
    """A measured value. `excuse` says why its target does not count, or why there is no value."""

    what: str
    measured: float | None
    target: Target | None = None
    unit: str = ""  # empty for a ratio
    excuse: str = ""

    @property
    def verdict(self) -> str:
        """Whether the target was met."""
        if self.excuse or self.measured is None:
            return self.excuse or "not measured"
        if self.target is None:
            return "-"
        excess = self.target.excess(self.measured)
        return "met" if excess <= 0 else f"missed by {show(excess)}"

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        unit = f" {self.unit}" if self.unit else ""
        measured = "-" if self.measured is None else f"{show(self.measured)}{unit}"
        target = "-" if self.target is None else f"{self.target}{unit}"
        return self.what, measured, target, self.verdict

    def as_data(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "what": self.what,
            "measured": self.measured,
            "unit": self.unit,
            "target": None if self.target is None else str(self.target),
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Report:
    """The rows of a group, and lines that stand below them."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        table = markdown_table(HEADINGS, [row.cells for row in self.rows])
        return "\n\n".join([table, *self.notes])

    def without_verdicts(self) -> Report:
        """Return the report of a run that was too short for any."""
        rows = [replace(row, excuse=row.excuse or "quick run") for row in self.rows]
        return replace(self, rows=rows)

    def as_data(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {"rows": [row.as_data() for row in self.rows], "notes": list(self.notes)}


def show(value: float) -> str:
    """Return a value with three figures behind the point, or more where it is tiny."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown whose columns line up."""
    cells = [headings, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def check_folder(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """End with a message, before anything is measured, where no file can be written to `path`."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        parser.error(f"expected a file in a folder that exists, found {path}")
