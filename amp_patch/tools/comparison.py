"""What a comparison of levels found: as a table, a verdict, plain data, a picture and a page."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amp_patch.tools.comparison_page import comparison_page
from amp_patch.tools.comparison_plot import comparison_figure
from amp_patch.tools.gradient_figures import ExponentHistogram
from amp_patch.tools.ink import check_picture_name
from amp_patch.tools.level_result import LevelResult
from amp_patch.tools.machine import Machine
from amp_patch.tools.plain_data import plain_data
from amp_patch.tools.text_table import TextTable, bytes_text, seconds_text, share_text
from amp_patch.tools.verdict import Standing, verdict

_HEADINGS = (
    "level",
    "step",
    "time /\nO0",
    "peak\nmemory",
    "final\nloss",
    "minus\nO0",
    "lowest\ncosine",
    "skipped\nsteps",
    "loss\nscale",
    "lost,\nat 1",
    "lost,\nat scale",
)

_LEGEND = (
    "Cosine: of the gradient of the layer that is turned furthest from O0's on the same weights. "
    "Lost: gradient values that float16 rounds to zero or inf, at loss scale 1 and at the last one."
)


@dataclass(frozen=True)
class Comparison:
    """One training at several levels. `print` it for a table and a verdict of two sentences.

    The first of `levels` is O0. `baseline_losses` has its final losses, from more seeds than the
    others had. `exponents` counts the gradient values of O0 at its last weights, by exponent.
    """

    levels: tuple[LevelResult, ...]
    steps: int
    seeds: int
    baseline_losses: tuple[float, ...]
    exponents: ExponentHistogram
    machine: Machine
    weights_of_probe: tuple[str, ...] = ("start", "end")

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.verdict}"

    def __getitem__(self, label: str) -> LevelResult:
        for level in self.levels:
            if level.label == label:
                return level
        raise KeyError(label)

    @property
    def baseline(self) -> LevelResult:
        """The level that the others are compared with: O0."""
        return self.levels[0]

    @property
    def spread(self) -> float:
        """How far the final losses of O0 lie apart over its seeds, those that diverge left out."""
        finals = [loss for loss in self.baseline_losses if not math.isnan(loss)]
        return max(finals) - min(finals) if finals else math.nan

    @property
    def verdict(self) -> str:
        """Two sentences that follow from the figures."""
        return verdict([self._standing(level) for level in self.levels], self.spread)

    def distance(self, level: LevelResult) -> float:
        """How much higher the final loss is than O0's, from the same seeds."""
        reference = {run.seed: run.final_loss for run in self.baseline.runs}
        pairs = [run.final_loss - reference[run.seed] for run in level.runs]
        return statistics.fmean(pairs) if pairs else math.nan

    def table(self) -> TextTable:
        """The figures, a row a level."""
        return TextTable(
            _HEADINGS, tuple(self._row(level) for level in self.levels), notes=self._notes()
        )

    def gap_table(self) -> TextTable:
        """The gradients of each layer beside O0's: cosine, relative error, at the last weights."""
        others = [level for level in self.levels[1:] if level.gaps]
        point = self.weights_of_probe[-1]
        layers = [gap.layer for gap in others[0].gaps[point]] if others else []
        rows = []
        for i, layer in enumerate(layers):
            gaps = [level.gaps[point][i] for level in others]
            rows.append((layer, *(f"{gap.cosine:.4f}\n{gap.relative_error:.2g}" for gap in gaps)))
        heads = [f"{level.label}: cosine,\nrelative error" for level in others]
        return TextTable(("layer", *heads), tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data. A number that is not finite becomes None."""
        data = asdict(self) | {"verdict": self.verdict, "spread": self.spread}
        for level, plain in zip(self.levels, data["levels"], strict=True):
            plain["final_loss"] = level.final_loss
            plain["distance"] = self.distance(level)
            plain["skipped_steps"] = level.skipped_steps
            plain["lowest_cosine"] = level.lowest_cosine
        cleaned: dict[str, Any] = plain_data(data)
        return cleaned

    def to_json(self, file: str | Path | None = None) -> str:
        """`to_dict` as JSON text; written to `file` too if one is given."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if file is not None:
            Path(file).write_text(text + "\n", encoding="utf-8")
        return text

    def plot(self, file: str | Path) -> None:
        """Write one picture (PNG, SVG or PDF, by the name): losses, time, memory, scale, range.

        A PNG tells the SHA-256 of `to_json()` under the key "Figures". Raises AmpError for the name
        of another kind of file, and where matplotlib, of the extra "plots", is not installed.
        """
        check_picture_name(file)
        is_png = Path(file).suffix.lower() == ".png"
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()
        figure = comparison_figure(self.levels, self.exponents)
        figure.savefig(file, metadata={"Figures": digest} if is_png else None)

    def to_html(self, file: str | Path) -> None:
        """Write one page that needs no other file: the table, the verdict and the picture."""
        figure = comparison_figure(self.levels, self.exponents)
        page = comparison_page(self.verdict, figure, self.table(), self.gap_table())
        Path(file).write_text(page, encoding="utf-8")

    def _standing(self, level: LevelResult) -> Standing:
        return Standing(
            level.label,
            level.step_ratio,
            self.distance(level),
            self._trouble(level),
            sum(len(run.losses) for run in level.runs) == level.skipped_steps > 0,
        )

    def _trouble(self, level: LevelResult) -> str:
        ends = [run.divergence for run in level.runs if run.divergence is not None]
        if level.failure:
            return f"fails ({level.failure})"
        if ends:
            return f"diverges {ends[0]}"
        seeds = self._seeds_that_diverge() if level is self.baseline else []
        return f"diverges from {_listed(seeds)} of {len(self.baseline_losses)}" if seeds else ""

    def _seeds_that_diverge(self) -> list[int]:
        return [seed for seed, loss in enumerate(self.baseline_losses) if math.isnan(loss)]

    def _row(self, level: LevelResult) -> tuple[str, ...]:
        if level.failure:
            return (level.label, "fails", *("-" for _ in _HEADINGS[2:]))
        ends = [run.divergence for run in level.runs if run.divergence is not None]
        ratio = level.step_ratio
        return (
            level.label,
            seconds_text(level.step_seconds),
            "-" if ratio is None else f"{ratio:.2f}",
            bytes_text(level.peak_bytes),
            "diverges" if ends else f"{level.final_loss:.4g}",
            f"step {ends[0].step}" if ends else f"{self.distance(level):+.2g}",
            "-" if level.lowest_cosine is None else f"{level.lowest_cosine:.4f}",
            str(level.skipped_steps),
            f"{level.runs[0].scales[-1]:g}",
            share_text(level.range_at_one.lost if level.range_at_one else None),
            share_text(level.range_at_scale.lost if level.range_at_scale else None),
        )

    def _on_losses(self) -> str:
        count = len(self.baseline_losses)
        gone = self._seeds_that_diverge()
        means = "Final losses are means of the last tenth"
        if gone:
            rest = f", those from the others lie {self.spread:.2g} apart" * (count > len(gone))
            return f"{means}: O0 diverges from {_listed(gone)} of {count}{rest}."
        if self.spread == 0 and count > 1:
            return (
                f"{means}: those of O0 are the same from all {count} seeds, so that they have no "
                "spread to judge others by. Leave seeding out of build and batches."
            )
        return f"{means}: those of O0 from {count} seeds lie {self.spread:.2g} apart."

    def _notes(self) -> tuple[str, ...]:
        notes = [
            f"{self.steps} steps from {self.seeds} seed(s). {self._on_losses()}",
            _LEGEND,
            f"{self.machine}.",
        ]
        notes += [f"{one.label} fails: {one.failure}" for one in self.levels if one.failure]
        notes += [f"{one.label} warns: {text}" for one in self.levels for text in one.warnings]
        return tuple(notes)


def _listed(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
