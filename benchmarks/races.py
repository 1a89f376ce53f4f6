"""Contenders that train the same model, checked beside FP32 and timed in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from benchmarks.contenders import Autocast, Contender, OptLevel, Plain
from benchmarks.models import Problem, Workload
from benchmarks.turns import median_ratio, take_turns

PLAIN = "FP32"
AUTOCAST = "autocast"
LEVELS = {torch.bfloat16: ("O0", "O4", "O5"), torch.float16: ("O0", "O1", "O2", "O3")}
WARM_UP_STEPS = 2
TURN_S = 1.0  # of one contender, where arithmetic is slow: so long a step needs no repeats
LIMIT_S = 20.0  # of a race, where arithmetic is slow: so long a turn needs fewer of them

# Who trains wrongly is not timed. The losses of the first steps may be off FP32's by this much,
# relative to them: one rounding is off by up to 2^-11 in float16 and 2^-8 in bfloat16, and tens of
# them in a model, with those of the updates between the losses, add up to a few times that.
CHECKED_STEPS = 3
LOSS_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01}
# The sum of the first updates may be off FP32's by half its length: half precision alone moves it
# by a fifth in a network with BatchNorm, and an update that was left out is off by all of it.
UPDATE_TOLERANCE = 0.5
ROUNDED_WEIGHTS = "O3"  # loses updates that are small beside a half weight: known, so not checked
ATTEMPTS = 20  # of which those that overflow do not count; each halves the loss scale


@dataclass(frozen=True)
class FirstSteps:
    """The losses of the first steps that were made, and how far they moved the weights."""

    losses: list[float]
    update: torch.Tensor


@dataclass
class Entry:
    """A contender in a race: how its turns went, or why it takes no part."""

    contender: Contender
    verdict: str = ""  # "", "raises" or "wrong"
    reason: str = ""
    turn_seconds: list[float] = field(default_factory=list)

    def rule_out(self, verdict: str, reason: str) -> None:
        """Take it out of the race."""
        self.verdict, self.reason = verdict, reason


@dataclass(frozen=True)
class Race:
    """All contenders for one workload in one half dtype."""

    problem: Problem
    workload: Workload
    half_dtype: torch.dtype
    entries: dict[str, Entry]

    @property
    def title(self) -> str:
        """What was trained, in words."""
        return f"{self.problem.name}, {self.workload.size}, {dtype_name(self.half_dtype)}"

    @property
    def baseline(self) -> Entry:
        """Autocast, or plain FP32 where autocast cannot take part."""
        autocast = self.entries[AUTOCAST]
        return self.entries[PLAIN] if autocast.verdict else autocast

    def ratio(self, entry: Entry, base: Entry | None = None) -> float:
        """Median over the turns of the entry's time to the baseline's in the same round."""
        return median_ratio(entry.turn_seconds, (base or self.baseline).turn_seconds)


def make_race(
    problem: Problem,
    workload: Workload,
    half_dtype: torch.dtype,
    device: str | torch.device = "cpu",
) -> Race:
    """Return a race in which nothing has run yet."""
    kinds: dict[str, type[Contender]] = {PLAIN: Plain, AUTOCAST: Autocast}
    kinds |= dict.fromkeys(LEVELS[half_dtype], OptLevel)
    entries = {
        name: Entry(kind(name, half_dtype, problem, workload, device))
        for name, kind in kinds.items()
    }
    return Race(problem, workload, half_dtype, entries)


def check_training(race: Race, steps: int = CHECKED_STEPS) -> None:
    """Rule out who fails or whose first steps are not those of FP32. These steps are not timed."""
    expected = train_first_steps(race.entries[PLAIN].contender, steps)
    for name, entry in race.entries.items():
        if name == PLAIN:
            continue
        try:
            found = train_first_steps(entry.contender, steps)
        except (RuntimeError, TypeError, ValueError) as error:  # as torch reports what it lacks
            entry.rule_out("raises", f"{type(error).__name__}: {first_sentence(error)}")
            continue
        if not are_close(found.losses, expected.losses, LOSS_TOLERANCE[race.half_dtype]):
            entry.rule_out("wrong", f"expected losses of {expected.losses}, found {found.losses}")
            continue
        distance = ((found.update - expected.update).norm() / expected.update.norm()).item()
        if name != ROUNDED_WEIGHTS and not distance < UPDATE_TOLERANCE:
            entry.rule_out(
                "wrong",
                f"expected updates within {UPDATE_TOLERANCE:.0%} of FP32's, found {distance:.0%}",
            )


def train_first_steps(contender: Contender, steps: int) -> FirstSteps:
    """Train until so many steps were made, or `ATTEMPTS` tried."""
    losses: list[float] = []
    before = contender.flat_weights()
    with contender.active(), without_dropout(contender.model):
        for _ in range(ATTEMPTS):
            loss = contender.step()
            if not contender.was_skipped():
                losses.append(loss.item())
            if len(losses) == steps:
                break
    return FirstSteps(losses, contender.flat_weights() - before)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Let no chance into the model: each dtype may draw other random numbers."""
    rates = {module: module.p for module in model.modules() if isinstance(module, _DropoutNd)}
    for module in rates:
        module.p = 0.0
    try:
        yield
    finally:
        for module, rate in rates.items():
            module.p = rate


def are_close(found: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    """Whether the two have the same length and agree one by one."""
    return len(found) == len(expected) and all(
        math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, expected, strict=True)
    )


def run_race(race: Race, repeats: int) -> None:
    """Check all contenders, then give each in the race `repeats` turns, round robin."""
    check_training(race)
    entries = {name: entry for name, entry in race.entries.items() if not entry.verdict}
    steps = race.workload.steps_a_turn
    turns = take_turns(
        {name: partial(time_turn, entry.contender, steps) for name, entry in entries.items()},
        repeats,
        LIMIT_S,
    )
    for name, entry in entries.items():
        entry.turn_seconds = turns[name]


def time_turn(contender: Contender, steps: int) -> float:
    """Return the median time of `steps` steps, switching on and first steps left out.

    There are fewer where they are slow, but one at least that was not skipped.
    """
    with contender.active():
        run_turn(contender, WARM_UP_STEPS)
        seconds = run_turn(contender, steps)
    if not seconds:
        raise RuntimeError(f"{contender.name}: expected steps to time, found all skipped")
    return statistics.median(seconds)


def run_turn(contender: Contender, steps: int) -> list[float]:
    """Return the times of the steps that were made."""
    seconds: list[float] = []
    begun = time.perf_counter()
    for attempt in range(max(steps, ATTEMPTS)):
        started = time.perf_counter()
        if seconds and (attempt >= steps or started - begun > TURN_S):
            break
        contender.step().item()  # waits for the device
        elapsed = time.perf_counter() - started
        if not contender.was_skipped():  # a skipped step is cheaper than it should be
            seconds.append(elapsed)
    return seconds


def first_sentence(error: Exception) -> str:
    """Return the start of a message, as much as fits a line."""
    return str(error).partition("\n")[0].partition(". ")[0]


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")
