"""What was measured of one level."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_patch.tools.gradient_figures import GradientGap, RangeShare
from amp_patch.tools.level_runs import SeedRun


@dataclass(frozen=True)
class LevelResult:
    """What was measured of one level. Figures that could not be measured are None.

    `gaps` are those of the gradients, by layer, at the first weights ("start") and at the last ones
    of O0 ("end"). `range_at_one` and `range_at_scale` are about the gradients of O0 at "end".
    """

    label: str
    runs: tuple[SeedRun, ...] = ()
    failure: str = ""
    step_seconds: float | None = None
    step_ratio: float | None = None
    peak_bytes: int | None = None
    gaps: Mapping[str, tuple[GradientGap, ...]] = field(default_factory=dict)
    range_at_one: RangeShare | None = None
    range_at_scale: RangeShare | None = None
    warnings: tuple[str, ...] = ()

    @property
    def final_loss(self) -> float:
        """The mean over the seeds; nan if one of them diverged."""
        return statistics.fmean([run.final_loss for run in self.runs]) if self.runs else math.nan

    @property
    def skipped_steps(self) -> int:
        """The sum over the seeds."""
        return sum(len(run.skipped) for run in self.runs)

    @property
    def lowest_cosine(self) -> float | None:
        """That of the layer whose gradient is turned furthest from O0's, at any of the weights."""
        found = [gap.cosine for gaps in self.gaps.values() for gap in gaps]
        return min(found, key=_nan_first) if found else None


def _nan_first(value: float) -> float:
    return -math.inf if math.isnan(value) else value
