"""Time a training step at each opt level beside `torch.autocast`: `python -m benchmarks.steps`."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from amp_patch.tools.machine import describe_machine
from benchmarks.models import PROBLEMS, Problem
from benchmarks.races import AUTOCAST, PLAIN, Race, dtype_name, make_race, run_race

COLUMNS = (PLAIN, "O0", "O1, O4", "O2, O5", "O3")
DEFAULT_REPEATS = 10


def make_table(races: Sequence[Race]) -> str:
    """Return a Markdown table of one row a race."""
    rows = [["model", "batch", "half dtype", f"{AUTOCAST}, ms", *COLUMNS]]
    rows += [make_row(race) for race in races]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def make_row(race: Race) -> list[str]:
    """Return the cells of a race. A ratio to FP32 in place of autocast carries a star."""
    autocast = race.entries[AUTOCAST]
    star = "*" if autocast.verdict else ""
    cells = [race.problem.name, race.workload.size, dtype_name(race.half_dtype)]
    cells.append(autocast.verdict or f"{1e3 * statistics.median(autocast.turn_seconds):.2f}")
    for column in COLUMNS:
        found = [race.entries[name] for name in column.split(", ") if name in race.entries]
        cells += [entry.verdict or f"{race.ratio(entry):.2f}{star}" for entry in found] or ["-"]
    return cells


def make_notes(races: Sequence[Race]) -> list[str]:
    """Return one line for each contender that was ruled out, and what the star means."""
    notes = [
        f"{race.title}: {name} {entry.verdict}: {entry.reason}"
        for race in races
        for name, entry in race.entries.items()
        if entry.verdict
    ]
    if any(race.entries[AUTOCAST].verdict for race in races):
        notes.append(f"* ratio to {PLAIN}, because there is no {AUTOCAST} to compare with")
    return notes


def make_data(races: Sequence[Race], repeats: int) -> dict[str, Any]:
    """Return all figures as plain data."""
    return {
        **asdict(describe_machine()),
        "repeats": repeats,
        "races": [
            {
                "model": race.problem.name,
                "batch": race.workload.size,
                "half_dtype": dtype_name(race.half_dtype),
                "baseline": race.baseline.contender.name,
                "contenders": {
                    name: {
                        "verdict": entry.verdict or "timed",
                        "reason": entry.reason,
                        "ratio": None if entry.verdict else race.ratio(entry),
                        "turn_seconds": entry.turn_seconds,
                    }
                    for name, entry in race.entries.items()
                },
            }
            for race in races
        ],
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument(
        "--models",
        default=",".join(PROBLEMS),
        help="which of the models to train, with commas between (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=DEFAULT_REPEATS,
        metavar="N",
        help="turns of each contender (default: %(default)s)",
    )
    parser.add_argument(
        "--float16",
        choices=("none", "small", "full"),
        default="small",
        help="size of the batches in float16, which most CPUs compute very slowly; "
        "full takes many minutes there (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="in torch's words (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser


def plan_races(options: argparse.Namespace, problems: Sequence[Problem]) -> list[Race]:
    """Return the races of a run, bfloat16 first for each model."""
    races = []
    for problem in problems:
        plan = [(problem.full, torch.bfloat16)]
        if options.float16 != "none":
            float16_load = problem.full if options.float16 == "full" else problem.small
            plan.append((float16_load, torch.float16))
        races += [make_race(problem, load, half, options.device) for load, half in plan]
    return races


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    unknown = [name for name in names if name not in PROBLEMS]
    if unknown or options.repeats < 1:
        parser.error(
            f"expected models among {', '.join(PROBLEMS)} and at least 1 repeat, "
            f"found {options.models!r} and {options.repeats}"
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    races = plan_races(options, [PROBLEMS[name] for name in names])
    for race in races:
        print(f"{race.title} ...", file=sys.stderr)
        run_race(race, options.repeats)
    print(make_table(races), *make_notes(races), sep="\n")
    print(f"{describe_machine()}, repeats: {options.repeats}, load before: {load:.2f}")
    if options.json is not None:
        data = make_data(races, options.repeats)
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
