"""Find what of a model has to stay in FP32, by measuring."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from amp_patch.api import uninitialize
from amp_patch.casts.presets import resolve_rules
from amp_patch.errors import AmpError
from amp_patch.policy import OPT_LEVELS, parse_opt_level
from amp_patch.tools.bisection import smallest_subset
from amp_patch.tools.gradient_figures import flat_gradient
from amp_patch.tools.jobs import Batches, Job, Loss, Variant, check_count, refuse_open_session
from amp_patch.tools.level_runs import Probe, probe
from amp_patch.tools.record_casts import record_casts
from amp_patch.tools.surroundings import own_warnings_caught, random_numbers_kept
from amp_patch.tools.tuning import WHOLE_MODEL, Measurement, Tuning

_IN_HALF = frozenset({"HALF"})
_IN_FLOAT = frozenset({"FLOAT", "FLOAT_THROUGHOUT", "NORM", "BANNED"})

Arguments = Callable[[list[str]], dict[str, Any]]


def tune(
    build: Callable[[], Any],
    batches: Batches,
    loss: Loss | None = None,
    tolerance: float = 0.05,
    *,
    opt_level: str = "O2",
    most_in_half: bool = False,
    count: int = 1,
    seed: int = 0,
) -> Tuning:
    """Find the smallest list of modules or operations to keep in FP32 at `opt_level`.

    The loss and the gradients of the first batches, on the weights that `build` gives, are compared
    with those of O0: relative to the loss, and to the length of the whole gradient. Where they are
    further off than `tolerance`, modules are kept in FP32 (O2, O3, O5), or operations (O1, O4):
    first the outermost, then, inside those that matter, the ones below, always halving the list. Of
    what is returned nothing can be left out; another list may be as short. `["*"]` is the model as
    a whole, where what its own forward computes needs FP32.

    Args:
        build, batches, loss: as `compare` takes them.
        tolerance: the largest relative error that is allowed.
        opt_level: the level to start from.
        most_in_half: at O1 and O4, let the operations that the rules compute in FP32 run in half,
            all but those that have to stay. Where the rules as they are do not suffice, operations
            that they compute in half are looked for instead.
        count: batches to measure on; the worst one counts.
        seed: of the random numbers, as in `compare`.

    Raises AmpError for O0 and for arguments that do not fit; an exception in the run at O0 is
    passed on, any other run that fails is outside the tolerance. Warnings and random numbers are
    treated as by `compare`. To be called where amp is not in use.

        >>> import torch
        >>> def build():
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        ...     return model, torch.optim.SGD(model.parameters(), lr=0.1)
        >>> found = tune(build, [(torch.ones(2, 4), torch.ones(2, 1))], opt_level="O5")
        >>> dict(found.arguments), found.is_within
        ({'opt_level': 'O5'}, True)
    """
    level = OPT_LEVELS[parse_opt_level(opt_level)]
    if not (level.casts_model or level.patch_torch_functions):
        raise AmpError("tune: expected a level with half precision, found O0; nothing is to tune")
    if most_in_half and level.casts_model:
        raise AmpError(f"most_in_half: expected 'O1' or 'O4', found {opt_level!r}")
    check_count("count", count)
    if not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
        raise AmpError(f"tolerance: expected a number above 0, found {tolerance!r}")
    refuse_open_session("tune")
    with own_warnings_caught(), random_numbers_kept():
        job = Job(build, batches, loss).with_lasting_batches(count)
        search = _Search(job, opt_level, tolerance, count, seed)
        if level.casts_model:
            return search.over_modules()
        return search.over_operations(most_in_half=most_in_half)


class _Search:
    def __init__(self, job: Job, opt_level: str, tolerance: float, count: int, seed: int) -> None:
        self._job = job
        self._opt_level = opt_level
        self._tolerance = tolerance
        self._count = count
        self._seed = seed
        self._measured: dict[tuple[str, ...], Measurement] = {}
        self._moved: list[str] = []
        self._reference = self._probes(Variant.of("O0"))

    def over_modules(self) -> Tuning:
        """Keep as few modules as possible."""
        arguments = functools.partial(_keep_modules, self._opt_level)
        if self._is_enough(arguments, []):
            return self._result(arguments, [], is_within=True)
        model = self._job.built(self._seed).model
        if not self._is_enough(arguments, [WHOLE_MODEL]):
            return self._result(arguments, [WHOLE_MODEL], is_within=False)
        return self._result(
            arguments, self._refined(model, arguments, [WHOLE_MODEL]), is_within=True
        )

    def over_operations(self, *, most_in_half: bool) -> Tuning:
        """Keep as few operations as possible."""
        found = self._operations(_IN_FLOAT if most_in_half else _IN_HALF)
        self._moved = found if most_in_half else []
        arguments = functools.partial(_keep_operations, self._opt_level, self._moved)
        if self._is_enough(arguments, []):
            return self._result(arguments, [], is_within=True)
        if not self._is_enough(arguments, found):
            if most_in_half:  # as the rules have it is not enough: what they compute in half counts
                self._measured.clear()
                return self.over_operations(most_in_half=False)
            return self._result(arguments, found, is_within=False)
        kept = smallest_subset(found, functools.partial(self._is_enough, arguments))
        return self._result(arguments, kept, is_within=True)

    def _refined(self, model: nn.Module, arguments: Arguments, kept: list[str]) -> list[str]:
        """Replace each module by those of its children that are enough, where they are."""
        done: list[str] = []
        ahead = list(kept)
        while ahead:
            path = ahead.pop(0)
            children = _children(model, path)
            is_enough = functools.partial(self._is_enough_with, arguments, done + ahead)
            if children and is_enough(children):
                ahead = smallest_subset(children, is_enough) + ahead
            else:
                done.append(path)
        return done

    def _is_enough_with(self, arguments: Arguments, others: list[str], kept: list[str]) -> bool:
        return self._is_enough(arguments, [*others, *kept])

    def _is_enough(self, arguments: Arguments, kept: list[str]) -> bool:
        key = tuple(sorted(kept))
        if key not in self._measured:
            self._measured[key] = Measurement(key, *self._errors(arguments(kept)))
        return self._measured[key].error <= self._tolerance

    def _errors(self, arguments: Mapping[str, Any]) -> tuple[float, float]:
        """Those of the loss and of the gradient, on the worst batch."""
        try:
            found = self._probes(Variant("", arguments))
        except Exception:  # noqa: BLE001 (no kernel for half, or what the model itself raises)
            return math.inf, math.inf
        errors = [_errors(*pair) for pair in zip(found, self._reference, strict=True)]
        return max(one for one, _ in errors), max(one for _, one in errors)

    def _probes(self, variant: Variant) -> list[Probe]:
        return [probe(self._job, variant, self._seed, skipped=i) for i in range(self._count)]

    def _operations(self, rules: frozenset[str]) -> list[str]:
        """The operations that run under one of these rules, in the order of their cost."""
        training = self._job.started(Variant.of(self._opt_level), self._seed)
        try:
            # Where this level fails, those that ran until then.
            with record_casts() as report, contextlib.suppress(Exception):
                for batch in self._job.stream(self._count):
                    training.loss(training.model, batch)
        finally:
            uninitialize()
        places = [one.place for one in report.records if one.place.rule in rules]
        return list(dict.fromkeys(place.function for place in places))

    def _result(self, arguments: Arguments, kept: list[str], *, is_within: bool) -> Tuning:
        return Tuning(
            arguments(kept),
            tuple(kept),
            self._tolerance,
            is_within,
            tuple(self._measured.values()),
            tuple(one for one in self._moved if one not in kept),
        )


def _keep_modules(opt_level: str, kept: list[str]) -> dict[str, Any]:
    return {"opt_level": opt_level, **({"keep_fp32": kept} if kept else {})}


def _keep_operations(opt_level: str, moved: list[str], kept: list[str]) -> dict[str, Any]:
    """Of `moved`, which would be half, `kept` stay as they are; others are forced to FP32."""
    half = [one for one in moved if one not in kept]
    forced = [] if moved else kept
    if not half and not forced:
        return {"opt_level": opt_level}
    return {"opt_level": opt_level, "cast_rules": resolve_rules(half=half, float=forced)}


def _children(model: nn.Module, path: str) -> list[str]:
    """The paths of the modules directly below one; a `ModuleList`, without forward, is opened."""
    found: list[str] = []
    module = model if path == WHOLE_MODEL else model.get_submodule(path)
    for name, child in module.named_children():
        full = name if path == WHOLE_MODEL else f"{path}.{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _children(model, full)
        else:
            found.append(full)
    return found


def _errors(found: Probe, reference: Probe) -> tuple[float, float]:
    """The relative errors of the loss and of the gradient as one vector; inf if not finite."""
    like = reference.gradients
    flat, true = flat_gradient(found.gradients, like, like), flat_gradient(like, like, like)
    gradient = float((flat - true).norm()) / (float(true.norm()) or 1.0)
    loss = abs(found.loss - reference.loss) / (abs(reference.loss) or 1.0)
    return (
        loss if math.isfinite(loss) else math.inf,
        gradient if math.isfinite(gradient) else math.inf,
    )
