"""Measure amp_patch and print each target with its verdict: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amp_patch.tools.machine import describe_machine
from benchmarks import calls, gradients, growth, inference, memory, startup, steps
from benchmarks.rows import Report, check_folder
from benchmarks.turns import QUICK, Settings

GROUPS = {
    "steps": steps,
    "inference": inference,
    "calls": calls,
    "gradients": gradients,
    "growth": growth,
    "memory": memory,
    "startup": startup,
}
HEAD = "# Results\n\nWritten by `python -m benchmarks --write`, never by hand."
RESULTS = Path(__file__).parent / "RESULTS.md"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(GROUPS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see it run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FILE",
        help="write the tables to FILE, in Markdown (default: benchmarks/RESULTS.md)",
    )
    return parser


def run_group(name: str, settings: Settings) -> dict[str, Any]:
    """Measure one group, and return it as Markdown and as data."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    started = time.perf_counter()
    measure: Callable[[Settings], Report] = GROUPS[name].measure
    report = measure(settings)
    report = report.without_verdicts() if settings.is_quick else report
    seconds = time.perf_counter() - started
    text = f"## {GROUPS[name].TITLE}\n\n`{name}`, {seconds:.0f} s\n\n{report}\n"
    print(text, flush=True)
    return {"text": text, "data": {"seconds": seconds, **report.as_data()}}


def describe_run(load: float, is_quick: bool) -> str:
    """Return what the figures depend on, in Markdown."""
    amx = "yes" if steps.has_amx() else "no"
    machine = f"{describe_machine()}, cores: {os.cpu_count()}, AMX: {amx}, load before: {load:.2f}."
    return f"{QUICK}\n\n{machine}" if is_quick else machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the groups that are named, or all."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in GROUPS]
    if unknown:
        parser.error(f"expected names among {', '.join(GROUPS)}, found {', '.join(unknown)}")
    if options.write == RESULTS and (options.quick or options.names):
        parser.error("expected a FILE after --write: the committed results are of a full run")
    for path in (options.json, options.write):
        check_folder(parser, path)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    about = describe_run(load, options.quick)
    print(about, end="\n\n", flush=True)
    settings = Settings(is_quick=options.quick)
    groups: dict[str, dict[str, Any]] = {}
    for name in options.names or GROUPS:
        groups[name] = run_group(name, settings)
        # Each time, so that a run that is cut short leaves something.
        if options.json is not None:
            write_data(options.json, groups, load, is_quick=options.quick)
        if options.write is not None:
            write_text(options.write, groups, about)
    return 0


def write_text(path: Path, groups: dict[str, dict[str, Any]], about: str) -> None:
    """Write all tables as Markdown."""
    texts = [HEAD, about, *(group["text"] for group in groups.values())]
    path.write_text("\n\n".join(map(str.strip, texts)) + "\n", encoding="utf-8")


def write_data(
    path: Path, groups: dict[str, dict[str, Any]], load: float, *, is_quick: bool
) -> None:
    """Write all figures as JSON."""
    data = {
        **asdict(describe_machine()),
        "load_before": load,
        "is_quick": is_quick,
        "groups": {name: group["data"] for name, group in groups.items()},
    }
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
