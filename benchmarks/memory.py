"""The peak memory of a training step: weights, gradients, optimizer state and activations."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch

from amp_patch.tools.live_memory import LiveMemory
from benchmarks.contenders import Contender
from benchmarks.large_models import TINY_PROBLEMS
from benchmarks.models import PROBLEMS, Gpt, Problem, Workload, texts
from benchmarks.races import ATTEMPTS, AUTOCAST, PLAIN, check_training, dtype_name, make_race
from benchmarks.rows import Report, Row, at_most, markdown_table
from benchmarks.turns import Settings

TITLE = "Peak memory of a training step"
CHECKED_STEPS = 1  # `steps` checks more of them
MEBIBYTE = 2**20

# Float16 arithmetic is slow on most CPUs, and its bytes are those of bfloat16: a narrow one does.
NARROW_GPT = Problem(
    "GPT, 4 layers of 64",
    lambda: Gpt(layers=4, width=64, heads=4, context=128),
    full=Workload("8 x 128 tokens", lambda: texts(8, 128), steps_a_turn=1),
    small=Workload("1 x 16 tokens", lambda: texts(1, 16), steps_a_turn=1),
)
PLAN = [
    *((PROBLEMS[name], torch.bfloat16) for name in ("gpt", "resnet", "erfnet", "lstm")),
    (NARROW_GPT, torch.float16),
]
QUICK_PLAN = [(TINY_PROBLEMS["gpt"], torch.bfloat16), (TINY_PROBLEMS["mlp"], torch.float16)]
PATCHED = {torch.bfloat16: "O4", torch.float16: "O1"}  # casts around operations
MASTERED = {torch.bfloat16: "O5", torch.float16: "O2"}  # half weights with masters


def peak_bytes(contender_of: Any, device: torch.device) -> int:
    """Return the most bytes in use during a step, from `contender_of()`, made inside, on."""
    allocator = torch.get_device_module(device)
    if not hasattr(allocator, "max_memory_allocated"):
        with LiveMemory() as live:
            contender = contender_of()
            with contender.active():
                make_step(contender)
                live.peak = live.now
                make_step(contender)
        return live.peak
    gc.collect()
    allocator.empty_cache()
    before = allocator.memory_allocated(device)
    contender = contender_of()
    with contender.active():
        make_step(contender)
        allocator.reset_peak_memory_stats(device)
        make_step(contender)
        return allocator.max_memory_allocated(device) - before


def make_step(contender: Contender) -> None:
    """Train until a step was made: only then are masters and momentum there."""
    for _ in range(ATTEMPTS):
        contender.step().item()
        if not contender.was_skipped():
            return
    raise RuntimeError(f"{contender.name}: expected a step, found {ATTEMPTS} that were skipped")


def measure(settings: Settings) -> Report:
    """Check the contenders, then count."""
    rows: list[Row] = []
    counts: list[list[str]] = []
    for problem, half_dtype in QUICK_PLAN if settings.is_quick else PLAN:
        print(f"  {problem.name}, {dtype_name(half_dtype)}", file=sys.stderr, flush=True)
        peaks, told = count_problem(problem, problem.full, half_dtype, settings.device)
        title = f"{problem.name}, {problem.full.size}, {dtype_name(half_dtype)}"
        rows += problem_rows(title, peaks, told, half_dtype)
        levels = (PATCHED[half_dtype], MASTERED[half_dtype])
        names = (PLAIN, AUTOCAST, *levels)
        shown = [f"{peaks[name] / MEBIBYTE:.1f}" if name in peaks else "-" for name in names]
        counts.append([title, *shown])
    headings = ("MiB at the peak", PLAIN, AUTOCAST, "O1, O4", "O2, O5")
    return Report(rows, [markdown_table(headings, counts)])


def count_problem(
    problem: Problem, load: Workload, half_dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the peak of each contender that trains as FP32 does, and why the others do not."""
    race = make_race(problem, load, half_dtype, device)
    wanted = (PLAIN, AUTOCAST, PATCHED[half_dtype], MASTERED[half_dtype])
    for name in race.entries.keys() - set(wanted):
        del race.entries[name]
    check_training(race, CHECKED_STEPS)
    told = {name: race.entries[name].verdict for name in wanted if race.entries[name].verdict}
    kinds = {name: type(race.entries[name].contender) for name in wanted if name not in told}
    del race
    return {
        name: peak_bytes(lambda: kind(name, half_dtype, problem, load, device), device)  # noqa: B023
        for name, kind in kinds.items()
    }, told


def problem_rows(
    title: str, peaks: dict[str, int], told: dict[str, str], half_dtype: torch.dtype
) -> Iterator[Row]:
    """Rows of one problem."""
    patched, mastered = PATCHED[half_dtype], MASTERED[half_dtype]
    for level, base, limit in (
        (patched, AUTOCAST, 1.02),
        (mastered, AUTOCAST, 1.0),
        (mastered, PLAIN, 0.75),
    ):
        what = f"{title}: {level}, ratio to {base}"
        missing = [name for name in (level, base) if name not in peaks]
        if missing:
            yield Row(what, None, at_most(limit), excuse=f"{missing[0]} {told[missing[0]]}")
        else:
            yield Row(what, peaks[level] / peaks[base], at_most(limit))
