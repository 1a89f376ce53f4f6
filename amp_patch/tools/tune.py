"""Find what of a model has to stay in FP32, by measuring."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from amp_patch.api import initialize, uninitialize
from amp_patch.arguments import check_count
from amp_patch.errors import AmpError
from amp_patch.policy import OPT_LEVELS, parse_opt_level
from amp_patch.tools.bisection import smallest_subset
from amp_patch.tools.jobs import Batches, Job, Loss, Variant, refuse_open_session
from amp_patch.tools.level_runs import Probe, probe
from amp_patch.tools.record_casts import record_casts
from amp_patch.tools.tuning import Measurement, Tuning

OPERATIONS = "float_operations"  # the keyword of `initialize` for operations kept in FP32
MODULES = "keep_fp32"


def tune(
    build: Callable[[], Any],
    batches: Batches,
    loss: Loss | None = None,
    tolerance: float = 0.05,
    *,
    opt_level: str = "O2",
    count: int = 1,
    seed: int = 0,
) -> Tuning:
    """Find the smallest list of modules or operations to keep in FP32 at `opt_level`.

    The loss and the gradients of the first batches, on the weights that `build` gives, are compared
    with those of O0: relative to the loss, and to the length of the whole gradient. Where they are
    further off than `tolerance`, modules are kept in FP32 (O2, O3, O5), or operations (O1, O4):
    first the outermost, then, inside those that matter, the ones below, always halving the list. Of
    what is returned nothing can be left out; another list may be as short.

    Args:
        build, batches, loss: as `compare` takes them.
        tolerance: the largest relative error that is allowed.
        opt_level: the level to start from.
        count: batches to measure on; the worst one counts.
        seed: of the random numbers, as in `compare`.

    Raises AmpError for O0 and for arguments that do not fit. To be called where amp is not in use.

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
    check_count("count", count, minimum=1)
    if not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
        raise AmpError(f"tolerance: expected a number above 0, found {tolerance!r}")
    refuse_open_session("tune")
    job = Job(build, batches, loss).with_lasting_batches(count)
    search = _Search(job, opt_level, tolerance, count, seed)
    return search.over_modules() if level.casts_model else search.over_operations()


class _Search:
    def __init__(self, job: Job, opt_level: str, tolerance: float, count: int, seed: int) -> None:
        self._job = job
        self._opt_level = opt_level
        self._tolerance = tolerance
        self._count = count
        self._seed = seed
        self._measured: dict[tuple[str, ...], Measurement] = {}
        self._reference = self._probes(Variant.of("O0"))

    def over_modules(self) -> Tuning:
        """Keep as few modules as possible."""
        if self._is_enough(MODULES, []):
            return self._result(MODULES, [], is_within=True)
        model = self._job.built(self._seed).model
        top = _children(model, "")
        if not top or not self._is_enough(MODULES, top):
            whole = ["*"]  # all modules below the outermost one
            return self._result(MODULES, whole if top else [], is_within=False)
        kept = smallest_subset(top, functools.partial(self._is_enough, MODULES))
        return self._result(MODULES, self._refined(model, kept), is_within=True)

    def over_operations(self) -> Tuning:
        """Keep as few operations as possible."""
        if self._is_enough(OPERATIONS, []):
            return self._result(OPERATIONS, [], is_within=True)
        if OPERATIONS not in inspect.signature(initialize).parameters:
            raise AmpError(
                f"tune: {self._opt_level} is outside the tolerance and keeps no module in FP32; "
                "expected a level that casts the model, as 'O2' or 'O5'"
            )
        operations = self._operations_in_half()
        if not self._is_enough(OPERATIONS, operations):
            return self._result(OPERATIONS, operations, is_within=False)
        kept = smallest_subset(operations, functools.partial(self._is_enough, OPERATIONS))
        return self._result(OPERATIONS, kept, is_within=True)

    def _refined(self, model: nn.Module, kept: list[str]) -> list[str]:
        """Replace each module by those of its children that are enough, where they are."""
        done: list[str] = []
        ahead = list(kept)
        while ahead:
            path = ahead.pop(0)
            children = _children(model, path)
            others = done + ahead
            is_enough = functools.partial(self._is_enough_with, others)
            if children and is_enough(children):
                ahead = smallest_subset(children, is_enough) + ahead
            else:
                done.append(path)
        return done

    def _is_enough_with(self, others: list[str], kept: list[str]) -> bool:
        return self._is_enough(MODULES, [*others, *kept])

    def _is_enough(self, keyword: str, kept: list[str]) -> bool:
        return self._measure(keyword, kept).error <= self._tolerance

    def _measure(self, keyword: str, kept: list[str]) -> Measurement:
        key = tuple(sorted(kept))
        if key not in self._measured:
            found = self._probes(Variant("", self._arguments(keyword, kept)))
            errors = [_errors(*pair) for pair in zip(found, self._reference, strict=True)]
            loss_error = max(one for one, _ in errors)
            gradient_error = max(one for _, one in errors)
            self._measured[key] = Measurement(key, loss_error, gradient_error)
        return self._measured[key]

    def _probes(self, variant: Variant) -> list[Probe]:
        return [probe(self._job, variant, self._seed, skipped=i) for i in range(self._count)]

    def _arguments(self, keyword: str, kept: list[str]) -> dict[str, Any]:
        return {"opt_level": self._opt_level, **({keyword: kept} if kept else {})}

    def _operations_in_half(self) -> list[str]:
        """The operations that the level runs in half, in the order in which they first ran."""
        training = self._job.started(Variant.of(self._opt_level), self._seed)
        try:
            (batch,) = self._job.stream(1)
            with record_casts() as report:
                training.loss(training.model, batch)
        finally:
            uninitialize()
        in_half = [one.place.operation for one in report.records if one.place.rule == "HALF"]
        return list(dict.fromkeys(in_half))

    def _result(self, keyword: str, kept: list[str], *, is_within: bool) -> Tuning:
        return Tuning(
            self._arguments(keyword, kept),
            tuple(kept),
            self._tolerance,
            is_within,
            tuple(self._measured.values()),
        )


def _children(model: nn.Module, path: str) -> list[str]:
    """The paths of the modules directly below one; a `ModuleList`, without forward, is opened."""
    found: list[str] = []
    for name, child in model.get_submodule(path).named_children():
        full = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _children(model, full)
        else:
            found.append(full)
    return found


def _errors(found: Probe, reference: Probe) -> tuple[float, float]:
    """The relative errors of the loss and of the gradient as one vector; inf if not finite."""
    names = list(reference.gradients)
    flat = _flat(found.gradients, reference.gradients, names)
    true = _flat(reference.gradients, reference.gradients, names)
    gradient = float((flat - true).norm()) / (float(true.norm()) or 1.0)
    loss = abs(found.loss - reference.loss) / (abs(reference.loss) or 1.0)
    return (
        loss if math.isfinite(loss) else math.inf,
        gradient if math.isfinite(gradient) else math.inf,
    )


def _flat(
    gradients: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor], names: list[str]
) -> torch.Tensor:
    parts = [gradients.get(name, torch.zeros_like(like[name])).double().flatten() for name in names]
    return torch.cat(parts)
