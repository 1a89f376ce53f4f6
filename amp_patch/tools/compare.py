"""Train the same model at several levels and say what each costs and gives."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from amp_patch.errors import AmpError
from amp_patch.tools.comparison import Comparison
from amp_patch.tools.gradient_figures import (
    exponent_histogram,
    gradient_gaps,
    range_share,
)
from amp_patch.tools.jobs import Batches, Job, Loss, Variant, check_count, refuse_open_session
from amp_patch.tools.level_result import LevelResult
from amp_patch.tools.level_runs import (
    Trained,
    measure_memory,
    probe,
    time_steps,
    train,
)
from amp_patch.tools.machine import describe_machine
from amp_patch.tools.processes import OwnProcesses, Place
from amp_patch.tools.surroundings import own_warnings_caught, random_numbers_kept

BASELINE = "O0"
BASELINE_SEEDS = 3  # at least: fewer have no spread worth the name
WARM_UP = 2
PROBE_WEIGHTS = ("start", "end")

Progress = Callable[[int, int, str], object]


def compare(
    build: Callable[[], Any],
    batches: Batches,
    opt_levels: Iterable[str | Mapping[str, Any]] = ("O0", "O1", "O2", "O3"),
    steps: int = 100,
    seeds: int = 1,
    loss: Loss | None = None,
    *,
    isolate: bool = False,
    turns: int = 5,
    steps_a_turn: int = 5,
    progress: Progress | None = None,
) -> Comparison:
    """Train at each of `opt_levels` from the same start, and compare speed, memory and losses.

    Args:
        build: a function that returns `(model, optimizer)`, or `(model, optimizer, scheduler)`,
            in FP32, built anew at each call. Called after every generator of random numbers was
            seeded, so that all levels start from the same weights: it must not seed them itself,
            or the seeds of O0 make no difference. A scheduler steps after the optimizer,
            but for steps that are skipped.
        batches: an iterable of batches, or a function that returns one, called after seeding. Gone
            through again where it has fewer than `steps`.
        opt_levels: names of levels, or dicts of arguments for `initialize`
            (`{"opt_level": "O2", "keep_fp32": "head"}`). O0 is added if it is not among them.
        steps: of each training. A training ends early where its loss or a weight is not finite.
        seeds: how often each level is trained. O0 is trained from 3 seeds at least, to know how far
            apart losses lie that differ by chance alone.
        loss: a function `loss(model, batch)` that returns the loss. None takes what the model
            returns for `(inputs, targets)`: see `amp_patch.tools.jobs.default_loss`.
        isolate: run each level in a process of its own; what is passed must then be importable.
        turns: how often the levels take turns to be timed; a ratio is the median over the turns.
        steps_a_turn: steps that are timed in a turn, after two that are not.
        progress: called as `progress(done, total, what)` before each piece of work.

    The levels run one after another, each undone afterwards. Raises AmpError for arguments that do
    not fit, before anything is trained. An exception at O0 is passed on; another level that fails
    is reported in the result. Warnings, other than those of amp, are issued at the end, each once;
    random numbers go on as if nothing had run. Must be called where amp is not in use.

        >>> def build():
        ...     model = torch.nn.Linear(4, 1)
        ...     return model, torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batches = [(torch.ones(8, 4), torch.ones(8, 1))]
        >>> found = compare(build, batches, ["O0", "O5"], steps=4, turns=1, steps_a_turn=1)
        >>> [level.label for level in found.levels], found["O5"].skipped_steps
        (['O0', 'O5'], 0)
    """
    counts = {"steps": steps, "seeds": seeds, "turns": turns, "steps_a_turn": steps_a_turn}
    for name, value in counts.items():
        check_count(name, value)
    refuse_open_session("compare")
    variants = _variants(opt_levels)
    place = OwnProcesses() if isolate else Place()
    with closing(place), own_warnings_caught(), random_numbers_kept():
        job = Job(build, batches, loss).with_lasting_batches(steps)
        plan = _Plan(job, variants, steps, seeds, turns, steps_a_turn)
        return _Experiment(plan, place, progress or _ignore).run()


def _ignore(done: int, total: int, what: str) -> None:
    """Tell nobody."""


def _variants(opt_levels: Iterable[str | Mapping[str, Any]]) -> tuple[Variant, ...]:
    if isinstance(opt_levels, (str, Mapping)):
        opt_levels = [opt_levels]
    if not isinstance(opt_levels, Iterable):
        raise AmpError(f"opt_levels: expected names of levels, as ['O1'], found {opt_levels!r}")
    found = [Variant.of(given) for given in opt_levels]
    others = {one.label: one for one in found if one.label != BASELINE}
    if len(others) < sum(one.label != BASELINE for one in found):
        raise AmpError(f"opt_levels: expected each one once, found {[one.label for one in found]}")
    return (Variant.of(BASELINE), *others.values())


@dataclass(frozen=True)
class _Plan:
    job: Job
    variants: tuple[Variant, ...]
    steps: int
    seeds: int
    turns: int
    steps_a_turn: int

    def seeds_of(self, variant: Variant) -> int:
        return max(self.seeds, BASELINE_SEEDS) if variant.label == BASELINE else self.seeds

    @property
    def pieces(self) -> int:
        trainings = sum(map(self.seeds_of, self.variants))
        return trainings + len(self.variants) * (1 + len(PROBE_WEIGHTS) + self.turns)


class _Experiment:
    """Runs a plan, piece by piece. A level that fails takes no part in what comes after."""

    def __init__(self, plan: _Plan, place: Place, progress: Progress) -> None:
        self._plan = plan
        self._place = place
        self._progress = progress
        self._done = 0
        self._failures: dict[str, str] = {}
        self._trained: dict[str, list[Trained]] = {one.label: [] for one in plan.variants}
        self._memory: dict[str, int] = {}
        self._gradients: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        self._seconds: dict[str, list[tuple[float, ...]]] = {one.label: [] for one in plan.variants}

    def run(self) -> Comparison:
        for variant in self._plan.variants:
            self._train(variant)
        for variant in self._plan.variants:
            self._probe(variant)
        for turn in range(self._plan.turns):
            self._take_turns(turn)
        levels = tuple(self._result(variant) for variant in self._plan.variants)
        gradients = self._gradients[BASELINE, PROBE_WEIGHTS[-1]]
        return Comparison(
            levels,
            self._plan.steps,
            self._plan.seeds,
            tuple(one.run.final_loss for one in self._trained[BASELINE]),
            exponent_histogram(gradients.values()),
            describe_machine(),
            PROBE_WEIGHTS,
        )

    def _call(self, variant: Variant, what: str, function: Callable[..., Any], *more: Any) -> Any:
        """What the function returns for the variant; None, and a note, where it fails."""
        self._progress(self._done, self._plan.pieces, f"{variant.label}: {what}")
        self._done += 1
        if variant.label in self._failures:
            return None
        try:
            return self._place.call(variant.label, function, self._plan.job, variant, *more)
        except Exception as error:  # a model raises what it likes
            if variant.label == BASELINE:
                raise
            first_line = str(error).partition("\n")[0]
            self._failures[variant.label] = f"{type(error).__name__}: {first_line}"
            return None

    def _train(self, variant: Variant) -> None:
        for seed in range(self._plan.seeds_of(variant)):
            trained = self._call(variant, f"training, seed {seed}", train, seed, self._plan.steps)
            if trained is not None:
                self._trained[variant.label].append(trained)

    def _probe(self, variant: Variant) -> None:
        label = variant.label
        trained = self._trained[label]
        scalers = trained[0].scaler_state if trained else {}
        self._memory[label] = self._call(variant, "memory", measure_memory, 0, scalers)
        ends = {"start": None, "end": self._last_weights()}
        for name in PROBE_WEIGHTS:
            what = f"gradients at the {name}"
            found = self._call(variant, what, probe, 0, ends[name], scalers)
            if found is not None:
                self._gradients[label, name] = found.gradients

    def _last_weights(self) -> dict[str, Any] | None:
        """Those of O0; None, for the first ones again, where they are not finite."""
        last = self._trained[BASELINE][0]
        return None if last.run.divergence is not None else last.weights

    def _take_turns(self, turn: int) -> None:
        variants = self._plan.variants
        first = turn % len(variants)
        for variant in variants[first:] + variants[:first]:
            trained = self._trained[variant.label]
            scalers = trained[0].scaler_state if trained else {}
            count = self._plan.steps_a_turn
            seconds = self._call(variant, "timing", time_steps, 0, scalers, WARM_UP, count)
            self._seconds[variant.label].append(seconds or ())

    def _result(self, variant: Variant) -> LevelResult:
        label = variant.label
        trained = self._trained[label]
        if label in self._failures:
            return LevelResult(label, failure=self._failures[label])
        all_seconds = [one for turn in self._seconds[label] for one in turn]
        reference = {name: self._gradients[BASELINE, name] for name in PROBE_WEIGHTS}
        last = reference[PROBE_WEIGHTS[-1]].values()
        return LevelResult(
            label,
            tuple(one.run for one in trained[: self._plan.seeds]),
            "",
            statistics.median(all_seconds) if all_seconds else None,
            self._ratio(label),
            self._memory[label],
            {
                name: gradient_gaps(self._gradients[label, name], reference[name])
                for name in PROBE_WEIGHTS
            },
            range_share(last, 1.0),
            range_share(last, trained[0].run.scales[-1]),
            tuple(dict.fromkeys(message for one in trained for message in one.warnings)),
        )

    def _ratio(self, label: str) -> float | None:
        """The median over the turns of the time of a step by that of O0 in the same turn."""
        pairs = zip(self._seconds[label], self._seconds[BASELINE], strict=True)
        ratios = [statistics.median(a) / statistics.median(b) for a, b in pairs if a and b]
        return statistics.median(ratios) if ratios else None
