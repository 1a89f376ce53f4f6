"""The time of a training step, beside `torch.autocast` (and a `GradScaler` in float16)."""

from __future__ import annotations

import runpy
import statistics
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.large_models import TINY_PROBLEMS
from benchmarks.models import PROBLEMS
from benchmarks.races import AUTOCAST, LEVELS, PLAIN, Race, dtype_name, make_race, run_race
from benchmarks.rows import Report, Row, Target, at_least, at_most, markdown_table
from benchmarks.turns import Settings, seconds_a_call

TITLE = "Training step, ratio to autocast"
ROUNDS = 8
COLUMNS = (PLAIN, "O0", "O1, O4", "O2, O5", "O3")

# Many CPUs have no fast half arithmetic. Where matrix products take more than this many times as
# long as in FP32, the batches of the races are small, or they would take many minutes.
SLOW_HALF = 4.0

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
TARGETS: dict[tuple[str, torch.dtype], dict[str, Target]] = {
    ("mlp", BFLOAT16): {"O4": at_most(1.05), "O5": at_most(1.0)},
    ("mlp", FLOAT16): {"O1": at_most(0.9), "O2": at_most(0.88)},
    ("gpt", BFLOAT16): {"O4": at_most(1.02), "O5": at_most(1.0)},
    ("gpt", FLOAT16): {"O1": at_most(1.02), "O2": at_most(1.0)},
    ("resnet", BFLOAT16): {"O4": at_most(1.02), "O5": at_most(1.0)},
    ("erfnet", BFLOAT16): {"O4": at_most(1.02), "O5": at_most(1.0)},
    ("lstm", BFLOAT16): {"O4": at_most(1.02), "O5": at_most(1.05)},
}
MEAN_OF = ("gpt", "resnet", "erfnet", "lstm")
MEAN_TARGETS = {"O4": at_most(1.0), "O5": at_most(0.98)}
SPEED_UPS = {"gpt": at_least(1.5), "resnet": at_least(2.0)}  # over FP32, on a CPU with AMX

Races = dict[tuple[str, torch.dtype], Race]


def measure(settings: Settings) -> Report:
    """Check and time all contenders for all problems."""
    races = plan_races(settings)
    for race in races.values():
        print(f"  {race.title}", file=sys.stderr, flush=True)
        run_race(race, settings.rounds(ROUNDS))
    rows = [*level_rows(races), *mean_rows(races), *speed_up_rows(races), *recurrent_rows(races)]
    details = [make_table(list(races.values())), "\n".join(make_notes(list(races.values())))]
    return Report(rows, [note for note in details if note])


def plan_races(settings: Settings) -> Races:
    """Return a race for each problem and half dtype, ERFNet in bfloat16 only."""
    plan: Races = {}
    is_slow = {dtype: not settings.is_quick and is_slow_in(dtype) for dtype in (BFLOAT16, FLOAT16)}
    for name, problem in (TINY_PROBLEMS if settings.is_quick else PROBLEMS).items():
        load = problem.small if is_slow[BFLOAT16] else problem.full
        plan[name, BFLOAT16] = make_race(problem, load, BFLOAT16)
        if name != "erfnet":  # float16 convolutions have no fast backward pass on any CPU
            is_full = name != "resnet" and not is_slow[FLOAT16] and not settings.is_quick
            load = problem.full if is_full else problem.small
            plan[name, FLOAT16] = make_race(problem, load, FLOAT16)
    return plan


def is_slow_in(dtype: torch.dtype) -> bool:
    """Whether a matrix product in `dtype` takes far longer than one in FP32."""
    single = torch.randn(256, 256)
    half, full = (
        min(seconds_a_call("x @ x", {"x": x}, 3) for _ in range(3))
        for x in (single.to(dtype), single)
    )
    return half > SLOW_HALF * full


def level_rows(races: Races) -> Iterator[Row]:
    """Rows of each level beside autocast."""
    for key, targets in TARGETS.items():
        race = races[key]
        for level, target in targets.items():
            yield ratio_row(race, level, AUTOCAST, target)


def ratio_row(race: Race, level: str, base: str, target: Target) -> Row:
    """Return the row of a level's time to that of another contender."""
    what = f"{race.title}: {level}"
    for name in (level, base):
        if race.entries[name].verdict:
            return Row(what, None, target, excuse=f"{name} {race.entries[name].verdict}")
    return Row(what, race.ratio(race.entries[level], race.entries[base]), target)


def mean_rows(races: Races) -> Iterator[Row]:
    """Rows of the means over the networks of ordinary size, of which autocast may fail in some."""
    for level, target in MEAN_TARGETS.items():
        rows = {name: ratio_row(races[name, BFLOAT16], level, AUTOCAST, target) for name in MEAN_OF}
        ratios = {n: row.measured for n, row in rows.items() if row.measured is not None}
        missing = [f"{name}: {row.verdict}" for name, row in rows.items() if name not in ratios]
        left_out = f" (left out: {', '.join(missing)})" if missing else ""
        what = f"mean of {', '.join(ratios)}, bfloat16: {level}{left_out}"
        yield Row(what, statistics.fmean(ratios.values()) if ratios else None, target)


def speed_up_rows(races: Races) -> Iterator[Row]:
    """Rows of how many times faster than FP32 a level is."""
    for name, target in SPEED_UPS.items():
        race = races[name, BFLOAT16]
        for level in MEAN_TARGETS:
            ratio = ratio_row(race, level, PLAIN, target).measured
            speed_up = None if ratio is None else 1 / ratio
            what = f"{race.title}: {level}, times faster than FP32"
            excuse = "" if has_amx() else "no AMX here"
            yield Row(what, speed_up, target, excuse=excuse)


def has_amx() -> bool:
    """Whether this CPU multiplies matrices of half precision in hardware, as far as torch tells."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return supported is not None and supported()


def recurrent_rows(races: Races) -> Iterator[Row]:
    """A row of how many levels train the LSTM in float16, where autocast may raise."""
    race = races["lstm", FLOAT16]
    levels = LEVELS[FLOAT16]
    right = [level for level in levels if not race.entries[level].verdict]
    told = race.entries[AUTOCAST].verdict or "trains it too"
    what = f"{race.title}: levels that train as FP32 does (autocast: {told})"
    yield Row(what, len(right), at_least(len(levels)), unit="levels")


def make_table(races: Sequence[Race]) -> str:
    """Return a Markdown table of one row a race, with all contenders."""
    headings = ["model", "batch", "half dtype", f"{AUTOCAST}, ms", *COLUMNS]
    return markdown_table(headings, [make_row(race) for race in races])


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
        f"- {race.title}: {name} {entry.verdict}: {entry.reason}"
        for race in races
        for name, entry in race.entries.items()
        if entry.verdict
    ]
    if any(race.entries[AUTOCAST].verdict for race in races):
        notes.append(f"- \\* ratio to {PLAIN}, because there is no {AUTOCAST} to compare with")
    return notes


if __name__ == "__main__":  # as `python -m benchmarks steps`
    sys.argv.insert(1, "steps")
    runpy.run_module("benchmarks", run_name="__main__")
