"""One run for an accelerator, from a bare checkout: `python -m benchmarks.gpu`.

FP32 (without TF32), autocast and the levels train GPT-2 small, ResNet-50, ERFNet at 512 x 1024, an
LSTM and an MLP: time of a step by the device's own events, peak memory, and how often a step waits
for the device. Then small calls, gradients and inference as `python -m benchmarks` has them.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amp_patch.tools.machine import describe_machine
from benchmarks import calls, gradients, inference
from benchmarks.contenders import Contender
from benchmarks.large_models import PROBLEMS, TINY_PROBLEMS
from benchmarks.memory import MEBIBYTE, peak_bytes
from benchmarks.models import Problem
from benchmarks.races import (
    ATTEMPTS,
    AUTOCAST,
    PLAIN,
    WARM_UP_STEPS,
    check_training,
    dtype_name,
    make_race,
)
from benchmarks.rows import Report, Row, at_most, check_folder, markdown_table, show
from benchmarks.turns import QUICK, Settings, median_ratio, synchronize, take_turns

ROUNDS = 5
LIMIT_S = 300.0  # after which no other problem is begun
HEADINGS = ("contender", "ms a step", "to FP32", "to autocast", "peak, MiB", "waits a step")
OTHER_GROUPS = (calls, gradients, inference)
PEAK_TARGETS = {  # contender and what it is compared with
    ("O1", AUTOCAST): at_most(1.02),
    ("O4", AUTOCAST): at_most(1.02),
    ("O2", AUTOCAST): at_most(0.85),
    ("O5", AUTOCAST): at_most(0.85),
    ("O2", PLAIN): at_most(0.75),
    ("O5", PLAIN): at_most(0.75),
}
WAITS = at_most(1)


@dataclass(frozen=True)
class Finding:
    """What was found of one contender."""

    milliseconds: list[float]  # of a step, one a turn
    peak: int  # bytes
    waits: int | None  # of the host for the device in one step; None where torch cannot tell


def find_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, FP32 is FP32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def time_steps(contender: Contender, steps: int) -> float:
    """Return the milliseconds of a step, by events of the device where it has them."""
    with contender.active():
        warm_up(contender)
        if contender.device.type == "cpu":
            started = time.perf_counter()
            for _ in range(steps):
                contender.step()
            return 1e3 * (time.perf_counter() - started) / steps
        events = torch.get_device_module(contender.device).Event
        begin, end = events(enable_timing=True), events(enable_timing=True)
        begin.record()
        for _ in range(steps):
            contender.step()
        end.record()
        synchronize(contender.device)
        return float(begin.elapsed_time(end)) / steps


def warm_up(contender: Contender) -> None:
    """Train until the loss scale has found its place."""
    for attempt in range(ATTEMPTS):
        contender.step()
        if not contender.was_skipped() and attempt + 1 >= WARM_UP_STEPS:
            break
    synchronize(contender.device)


def count_waits(contender: Contender) -> int | None:
    """Return how often the host waits for the device in one step, as torch warns of it."""
    set_mode = getattr(torch.get_device_module(contender.device), "set_sync_debug_mode", None)
    if set_mode is None:
        return None
    with contender.active():
        warm_up(contender)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_mode("warn")
            try:
                contender.step()
            finally:
                set_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def run_problem(
    problem: Problem, half_dtype: torch.dtype, settings: Settings
) -> tuple[str, Report]:
    """Check, time and count all contenders for a problem."""
    race = make_race(problem, problem.full, half_dtype, settings.device)
    check_training(race)
    entries = {name: entry for name, entry in race.entries.items() if not entry.verdict}
    steps = race.workload.steps_a_turn
    turns = take_turns(
        {name: partial(time_steps, entry.contender, steps) for name, entry in entries.items()},
        settings.rounds(ROUNDS),
    )
    waits = {name: count_waits(entry.contender) for name, entry in entries.items()}
    notes = [f"- {n} {e.verdict}: {e.reason}" for n, e in race.entries.items() if e.verdict]
    makers = {name: maker_of(entry.contender, problem) for name, entry in entries.items()}
    title = race.title
    del race, entries
    findings = {
        name: Finding(turns[name], peak_bytes(make, settings.device), waits[name])
        for name, make in makers.items()
    }
    return title, make_report(findings, notes)


def maker_of(contender: Contender, problem: Problem) -> Callable[[], Contender]:
    """Return what makes the same contender anew."""
    kind, name, half_dtype = type(contender), contender.name, contender.half_dtype
    return partial(kind, name, half_dtype, problem, problem.full, contender.device)


def make_report(findings: dict[str, Finding], notes: Sequence[str]) -> Report:
    """Return the rows that have a target, and a table of all contenders."""
    table = markdown_table(HEADINGS, [make_cells(name, findings) for name in findings])
    return Report(list(target_rows(findings)), [table, *(["\n".join(notes)] if notes else [])])


def make_cells(name: str, findings: dict[str, Finding]) -> list[str]:
    """Return the figures of a contender."""
    found = findings[name]
    ratios = [
        show(median_ratio(found.milliseconds, findings[base].milliseconds))
        if base in findings
        else "-"
        for base in (PLAIN, AUTOCAST)
    ]
    waits = "-" if found.waits is None else str(found.waits)
    middle = sorted(found.milliseconds)[len(found.milliseconds) // 2]
    return [name, show(middle), *ratios, f"{found.peak / MEBIBYTE:.1f}", waits]


def target_rows(findings: dict[str, Finding]) -> Iterator[Row]:
    """Rows of peak memory and of waits."""
    for (name, base), target in PEAK_TARGETS.items():
        if name in findings and base in findings:
            ratio = findings[name].peak / findings[base].peak
            yield Row(f"{name}: peak memory, ratio to {base}", ratio, target)
    for name in ("O1", "O2"):
        waits = findings[name].waits if name in findings else None
        if waits is not None:
            yield Row(f"{name}: waits for the device in a step", waits, WAITS, "times")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: runs anywhere, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser


def reports(settings: Settings, started: float) -> Iterator[tuple[str, Report]]:
    """Measure one thing after the other."""
    problems = TINY_PROBLEMS if settings.is_quick else PROBLEMS
    for problem in problems.values():
        for half_dtype in (torch.float16, torch.bfloat16):
            if time.perf_counter() - started > LIMIT_S:
                title = f"{problem.name}, {dtype_name(half_dtype)}"
                yield title, Report([], [f"Left out: {LIMIT_S:.0f} s have passed."])
            else:
                yield run_problem(problem, half_dtype, settings)
    for group in OTHER_GROUPS:
        if time.perf_counter() - started > LIMIT_S:
            yield group.TITLE, Report([], [f"Left out: {LIMIT_S:.0f} s have passed."])
        else:
            yield group.TITLE, group.measure(settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print Markdown as it comes, and write JSON."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    check_folder(parser, options.json)
    with without_tf32():
        return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Do what the command line asks for. Returns the exit code."""
    started = time.perf_counter()
    device = find_device()
    name = "the CPU" if device.type == "cpu" else device_name(device)
    about = f"{describe_machine()}\n\n{QUICK}" if options.tiny else f"{describe_machine()}"
    print(f"# On {name}\n\n{about}\n", flush=True)
    data: dict[str, Any] = {"device": name, "torch": torch.__version__, "reports": {}}
    for title, report in reports(Settings(options.tiny, device), started):
        if options.tiny:
            report = report.without_verdicts()  # noqa: PLW2901
        text = f"## {title}\n\n{report}\n"
        print(text, f"{time.perf_counter() - started:.0f} s so far\n", sep="\n", flush=True)
        data["reports"][title] = report.as_data()
        if options.json is not None:  # each time, so that a run that is cut short leaves something
            options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator as its maker gives it."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


if __name__ == "__main__":
    raise SystemExit(main())
