"""Time of a call of a cast operation: before a recording of casts, inside one, and after it.

Run it with `python -m benchmarks.recording`. Off, a recording costs nothing: what is called is the
same function as ever, which the first line of the output says, and the times say it too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn import functional

import amp_patch as amp
from amp_patch.casts.wrappers import CastWrapper
from amp_patch.tools.machine import describe_machine
from benchmarks.rows import markdown_table
from benchmarks.turns import median_ratio

BEFORE, INSIDE, AFTER = "before", "inside", "after"
CALLS = 500  # in one turn
DEFAULT_REPEATS = 20

Call = Callable[[], object]


@dataclass
class Row:
    """Calls of one operation: microseconds a call in each turn, by when the turn was."""

    name: str
    turns: dict[str, list[float]] = field(default_factory=dict)

    def median(self, when: str) -> float:
        """Of the turns at that time."""
        return statistics.median(self.turns[when])

    @property
    def ratio(self) -> float:
        """Of the turn after a recording to the one before it."""
        return median_ratio(self.turns[AFTER], self.turns[BEFORE])


def make_calls(device: str) -> dict[str, Call]:
    """Operations so small that calling them is all of their time: a rule of each kind."""
    half = torch.ones(4, 4, dtype=torch.bfloat16, device=device)
    weight = torch.nn.Parameter(torch.ones(4, 4, device=device))
    return {
        "F.linear, weight in the cache": lambda: functional.linear(half, weight),
        "torch.mm, both in half": lambda: torch.mm(half, half),
        "softmax, up to FP32": lambda: half.softmax(-1),
        "torch.where, follows its inputs": lambda: torch.where(half > 0, half, half),
    }


def microseconds(call: Call) -> float:
    """Of one call, the mean over a turn."""
    for _ in range(CALLS // 10):
        call()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - started) / CALLS


def installed_calls() -> list[object]:
    """What each wrapper that is in place in `torch.nn.functional` calls."""
    found = list(vars(functional).values())
    return [wrapper.call for wrapper in found if isinstance(wrapper, CastWrapper)]


def measure(device: str, repeats: int) -> tuple[list[Row], bool]:
    """The rows, and whether the wrappers called the same functions after the recordings."""
    rows = [Row(name) for name in make_calls(device)]
    are_same = True
    for _ in range(repeats):
        model = amp.initialize(torch.nn.Linear(4, 4).to(device), opt_level="O4", verbosity=0)
        try:
            earlier = installed_calls()
            take_turn(rows, device, BEFORE)
            take_turn(rows, device, INSIDE)
            are_same &= installed_calls() == earlier
            take_turn(rows, device, AFTER)
        finally:
            del model
            amp.uninitialize()
    return rows, are_same


def take_turn(rows: Sequence[Row], device: str, when: str) -> None:
    """Time every call once."""
    calls = make_calls(device)
    with torch.no_grad(), amp.record_casts() if when == INSIDE else nullcontext():
        for row in rows:
            row.turns.setdefault(when, []).append(microseconds(calls[row.name]))


def make_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of one row an operation."""
    moments = (BEFORE, INSIDE, AFTER)
    return markdown_table(
        ["us a call", *moments, "after / before"],
        [
            [row.name, *(f"{row.median(when):.2f}" for when in moments), f"{row.ratio:.2f}"]
            for row in rows
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    parser.add_argument("--repeats", type=int, default=DEFAULT_REPEATS, metavar="N")
    parser.add_argument("--device", default="cpu", help="in torch's words (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"expected at least 1 repeat, found {options.repeats}")
    load = os.getloadavg()[0]
    rows, are_same = measure(options.device, options.repeats)
    print(f"the same functions are called after a recording as before: {are_same}\n")
    print(make_table(rows))
    print(f"\n{describe_machine()}, repeats: {options.repeats}, load before: {load:.2f}")
    if options.json is not None:
        data = {"machine": asdict(describe_machine()), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0 if are_same else 1


if __name__ == "__main__":
    sys.exit(main())
