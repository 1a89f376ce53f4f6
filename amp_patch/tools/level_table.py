"""Compare runs of one training at several opt levels: as a table and as plain data for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from amp_patch.tools.plain_data import plain_data

BASELINE = "O0"
HEADINGS = (
    "test\naccuracy, %",
    "final\nloss",
    f"step /\n{BASELINE}",
    "weight\nbytes",
    "master\nbytes",
    "loss\nscale",
    "skipped\nsteps",
)


@dataclass(frozen=True)
class LevelRun:
    """What one training run at one opt level from one seed came to."""

    opt_level: str
    seed: int
    accuracy: float  # percent of the held-out scans
    final_loss: float  # mean training loss of the last epoch
    step_seconds: float  # median, without the first steps
    weight_bytes: int  # the model's parameters, as they are while it trains
    master_bytes: int  # the FP32 copies that the optimizer steps on in their place
    loss_scale: float  # at the end
    skipped_steps: int


@dataclass(frozen=True)
class LevelSummary:
    """The runs of one opt level, one a seed, and how long its steps took beside the baseline's."""

    opt_level: str
    runs: tuple[LevelRun, ...]
    step_ratio: float | None  # None without a run of the baseline

    @property
    def accuracy(self) -> float:
        """Mean over the seeds, in percent."""
        return statistics.fmean(run.accuracy for run in self.runs)

    @property
    def final_loss(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(run.final_loss for run in self.runs)

    @property
    def skipped_steps(self) -> int:
        """Sum over the seeds."""
        return sum(run.skipped_steps for run in self.runs)

    def as_data(self) -> dict[str, Any]:
        """Return all figures as plain data. A figure that is not finite becomes None."""
        first = self.runs[0]
        return {
            "level": self.opt_level,
            "accuracy": self.accuracy,
            "final_loss": plain_data(self.final_loss),
            "step_ratio": self.step_ratio,
            "weight_bytes": first.weight_bytes,
            "master_bytes": first.master_bytes,
            "loss_scale": [run.loss_scale for run in self.runs],
            "skipped_steps": self.skipped_steps,
            "runs": [asdict(run) | {"final_loss": plain_data(run.final_loss)} for run in self.runs],
        }


def summarize(runs: Sequence[LevelRun]) -> list[LevelSummary]:
    """Group the runs by opt level, in the order in which the levels first appear."""
    by_level: dict[str, list[LevelRun]] = {}
    for run in runs:
        by_level.setdefault(run.opt_level, []).append(run)
    baseline = by_level.get(BASELINE)
    return [
        LevelSummary(
            level,
            tuple(members),
            median_step(members) / median_step(baseline) if baseline else None,
        )
        for level, members in by_level.items()
    ]


def median_step(runs: Iterable[LevelRun]) -> float:
    """Return the median over the runs of their median step, in seconds."""
    return statistics.median(run.step_seconds for run in runs)


def make_table(summaries: Sequence[LevelSummary], caption: str) -> Table:
    """Return one row a level. With several seeds, means are followed by what they range over."""
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    table.add_column("level")
    for name in HEADINGS:
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(*make_row(summary))
    return table


def make_row(summary: LevelSummary) -> list[str]:
    """Return the cells of one level."""
    first = summary.runs[0]
    accuracy = f"{summary.accuracy:.2f}"
    if len(summary.runs) > 1:
        accuracy += "\n" + value_range((run.accuracy for run in summary.runs), ".2f")
    return [
        summary.opt_level,
        accuracy,
        f"{summary.final_loss:.4f}",
        "-" if summary.step_ratio is None else f"{summary.step_ratio:.2f}",
        f"{first.weight_bytes:,}",
        f"{first.master_bytes:,}" if first.master_bytes else "-",
        value_range((run.loss_scale for run in summary.runs), "g"),
        str(summary.skipped_steps),
    ]


def value_range(values: Iterable[float], spec: str) -> str:
    """Return "lowest to highest", or the one value if they do not differ."""
    ordered = sorted(values)
    ends = dict.fromkeys(format(value, spec) for value in (ordered[0], ordered[-1]))
    return " to ".join(ends)
