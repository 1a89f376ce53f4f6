"""Draw a comparison on one page: losses, time and memory, loss scale, exponents of gradients."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from amp_patch.tools.gradient_figures import ExponentHistogram
from amp_patch.tools.ink import BLUE, GREY, ORANGE, colour_of, dashes_of, ink, new_figure
from amp_patch.tools.level_result import LevelResult
from amp_patch.tools.text_table import bytes_text, seconds_text

WIDTH, HEIGHT = 1200, 900
_LEGEND_COLUMNS, _COLUMNS_OF_LONG, _LEGEND_LETTERS = 6, 4, 22  # 22 letters are a fifth of the width
_TICK_LETTERS, _LABEL_LINES, _SHORT = 20, 4, 4
_SMOOTHED = 60  # curves with more points than this are drawn smoothed, over the raw ones
# float16, IEEE 754: smallest subnormal, smallest normal and largest number, as exponents of 2.
_SUBNORMAL, _NORMAL, _LARGEST = -24, -14, 16


def comparison_figure(levels: Sequence[LevelResult], exponents: ExponentHistogram) -> Any:
    """The page as a matplotlib figure, 1200 pixels wide. The first of `levels` is the baseline."""
    with ink():
        figure, axes = new_figure(WIDTH, HEIGHT, 2, 2)
        _draw_losses(axes[0, 0], levels)
        _draw_costs(axes[0, 1], levels)
        _draw_scales(axes[1, 0], levels)
        _draw_exponents(axes[1, 1], levels, exponents)
        _add_legend(figure, levels)
    return figure


def _add_legend(figure: Any, levels: Sequence[LevelResult]) -> None:
    """One for all curves, above them: names of levels may be long."""
    lines = []
    for i, level in enumerate(levels):
        ends = [run.divergence for run in level.runs[:1] if run.divergence is not None]
        end = f"diverges at step {ends[0].step}" if ends else "fails" if level.failure else ""
        label = _wrapped(level.label, _LEGEND_LETTERS)
        (line,) = figure.axes[0].plot(
            [],
            color=colour_of(level.label, i),
            linestyle=dashes_of(level.label),
            lw=1.8,
            label=f"{label}\n{end}" if end else label,
        )
        lines.append(line)
    longest = max(len(row) for line in lines for row in line.get_label().split("\n"))
    columns = _LEGEND_COLUMNS if longest <= _SHORT else _COLUMNS_OF_LONG
    figure.legend(
        handles=lines, loc="outside upper center", ncols=min(len(lines), columns), fontsize=10
    )


def _wrapped(text: str, width: int) -> str:
    """In a few lines, cut where it is longer; no letter of it is taken for mathematics."""
    lines = textwrap.wrap(
        text, width, max_lines=_LABEL_LINES, placeholder=" …", break_on_hyphens=False
    )
    return "\n".join(lines).replace("$", r"\$")


def _draw_losses(axes: Any, levels: Sequence[LevelResult]) -> None:
    longest = max(len(run.losses) for level in levels for run in level.runs)
    for i, level in enumerate(levels):
        if not level.runs:
            continue
        colour = colour_of(level.label, i)
        losses = level.runs[0].losses
        smooth = _smoothed(losses, longest)
        if smooth is not losses:
            axes.plot(losses, color=colour, alpha=0.2, linewidth=0.7)
        axes.plot(smooth, color=colour, linestyle=dashes_of(level.label), lw=1.8)
        if level.runs[0].divergence is not None:
            finite = [one for one in smooth if math.isfinite(one)]
            if finite:
                axes.plot(len(finite) - 1, finite[-1], "X", color=colour, markersize=9)
            else:  # there is no loss to put the mark at: at the upper edge, one below the other
                height = 0.96 - 0.06 * i
                place = axes.get_xaxis_transform()
                axes.plot(0, height, "X", color=colour, markersize=9, transform=place)
    if all(one > 0 for level in levels for run in level.runs for one in run.losses):
        axes.set_yscale("log")
    axes.set(title="Training loss (crosses: where it diverges)", xlabel="step", ylabel="loss")


def _smoothed(losses: tuple[float, ...], longest: int) -> tuple[float, ...]:
    """Exponential moving average over a twentieth of the longest curve, the same for all."""
    if longest <= _SMOOTHED:
        return losses
    keep = 1 - 20 / longest
    out, mean = [], losses[0]
    for loss in losses:
        mean = keep * mean + (1 - keep) * loss
        out.append(mean)
    return tuple(out)


def _draw_costs(axes: Any, levels: Sequence[LevelResult]) -> None:
    """Two bars a level: time of a step and peak memory, both as parts of O0's."""
    baseline = levels[0]
    levels = [level for level in levels if not level.failure]
    names = [_wrapped(level.label, _TICK_LETTERS) for level in levels]
    rows = range(len(levels))
    times = [level.step_ratio or 0.0 for level in levels]
    memories = [(level.peak_bytes or 0) / (baseline.peak_bytes or 1) for level in levels]
    bars = axes.barh([row - 0.2 for row in rows], times, 0.36, color=BLUE, label="step time")
    axes.bar_label(bars, [seconds_text(one.step_seconds) for one in levels], padding=4)
    bars = axes.barh([row + 0.2 for row in rows], memories, 0.36, color=ORANGE, label="peak memory")
    axes.bar_label(bars, [bytes_text(one.peak_bytes) for one in levels], padding=4)
    axes.axvline(1.0, color=GREY, linewidth=0.8)
    axes.set_yticks(list(rows), names, fontsize=11 if max(map(len, names)) <= _SHORT else 9)
    axes.invert_yaxis()
    axes.set_xlim(0, max([1.0, *times, *memories]) * 1.35)
    axes.set(title="Cost of a step", xlabel="times that of O0 (less is better)")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.0)


def _draw_scales(axes: Any, levels: Sequence[LevelResult]) -> None:
    for i, level in enumerate(levels):
        for run in level.runs[:1]:
            colour = colour_of(level.label, i)
            style = dashes_of(level.label)
            axes.step(
                range(len(run.scales)),
                run.scales,
                where="post",
                color=colour,
                linestyle=style,
                lw=1.8,
            )
            axes.plot(
                run.skipped,
                [run.scales[step] for step in run.skipped],
                "v",
                color=colour,
                markersize=7,
            )
    axes.set_yscale("log", base=2)
    axes.margins(y=0.15)
    axes.set(
        title="Loss scale (triangles: skipped steps)",
        xlabel="step",
        ylabel="loss scale, powers of 2",
    )


def _draw_exponents(axes: Any, levels: Sequence[LevelResult], histogram: ExponentHistogram) -> None:
    first, last = _extent(histogram)
    places = range(first, last + 1)
    shares = _shares(histogram, first, last)
    axes.bar(places, shares, 1.0, align="edge", color=GREY, label="O0's gradients, scale 1")
    scale = max(level.runs[0].scales[-1] for level in levels if level.runs)
    shift = round(math.log2(scale))
    if shift:
        axes.stairs(
            shares,
            [place + shift for place in range(first, last + 2)],
            color=BLUE,
            lw=1.6,
            label=f"times the loss scale, 2^{shift}",
        )
    top = max(shares, default=0.0) * 1.45 or 1.0
    axes.axvspan(_NORMAL, _LARGEST, color=ORANGE, alpha=0.16, lw=0, zorder=0)
    axes.axvspan(_SUBNORMAL, _NORMAL, color=ORANGE, alpha=0.07, lw=0, zorder=0)
    axes.text((_NORMAL + _LARGEST) / 2, top * 0.97, "float16", ha="center", va="top")
    axes.text(
        (_SUBNORMAL + _NORMAL) / 2, top * 0.97, "subnormal", ha="center", va="top", fontsize=9
    )
    axes.text(_SUBNORMAL - 0.4, top * 0.97, "lost: 0", ha="right", va="top", fontsize=9)
    axes.text(_LARGEST + 0.4, top * 0.97, "inf", ha="left", va="top", fontsize=9)
    axes.set_ylim(0, top)
    axes.set_xlim(min(first, _SUBNORMAL - 6), max(last + 1 + shift, _LARGEST + 4))
    axes.set(title="Sizes of gradient values", xlabel="exponent of 2", ylabel="share of values, %")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.9), fontsize=9)


def _extent(histogram: ExponentHistogram) -> tuple[int, int]:
    present = [histogram.lowest + i for i, count in enumerate(histogram.counts) if count]
    return (present[0], present[-1]) if present else (_SUBNORMAL, _LARGEST)


def _shares(histogram: ExponentHistogram, first: int, last: int) -> list[float]:
    total = max(sum(histogram.counts), 1)
    counts = histogram.counts[first - histogram.lowest : last - histogram.lowest + 1]
    return [100.0 * count / total for count in counts]
