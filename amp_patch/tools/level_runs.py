"""Run one variant of a training: its losses, gradients, memory and the time of its steps.

Each function builds the model anew, initializes, runs and uninitializes, so that any of them can
run by itself in a process of its own.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from amp_patch.api import uninitialize
from amp_patch.errors import AmpWarning
from amp_patch.state import (
    load_state_dict,
    loss_scale,
    model_state_dict,
    state_dict,
    step_was_skipped,
    step_will_be_skipped,
)
from amp_patch.tools.jobs import Job, Training, Variant, seed_everything
from amp_patch.tools.live_memory import LiveMemory
from amp_patch.tools.surroundings import own_warnings_caught
from amp_patch.training import master_params

PROBE_ATTEMPTS = 40  # each that overflows halves the scale: from the largest down to below 1
MEMORY_STEPS = 2  # the first makes the state of the optimizer

Weights = dict[str, Any]


@dataclass(frozen=True)
class Divergence:
    """The step, from 0, at which a training went bad, and the first weight that shows it.

    `parameter` is None where the loss alone is not finite.
    """

    step: int
    parameter: str | None

    def __str__(self) -> str:
        where = f" in `{self.parameter}`" if self.parameter else ", in the loss"
        return f"at step {self.step}{where}"


@dataclass(frozen=True)
class SeedRun:
    """One training of one variant: the loss and the loss scale of each step."""

    seed: int
    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[int, ...]  # the steps that were skipped for an overflow
    divergence: Divergence | None = None

    @property
    def final_loss(self) -> float:
        """The mean of the last tenth of the losses; nan if the training diverged."""
        if self.divergence is not None or not self.losses:
            return math.nan
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


@dataclass(frozen=True)
class Trained:
    """What a training gives: its curves, the weights at its end and the warnings on the way."""

    run: SeedRun
    weights: Weights
    scaler_state: dict[str, Any]
    warnings: tuple[str, ...]


@contextmanager
def _running(job: Job, variant: Variant, seed: int) -> Iterator[Training]:
    try:
        yield job.started(variant, seed)
    finally:
        uninitialize()


def train(job: Job, variant: Variant, seed: int, steps: int) -> Trained:
    """Train for `steps` steps, or until a loss or a weight is not finite."""
    losses: list[float] = []
    scales: list[float] = []
    skipped: list[int] = []
    divergence = None
    with own_warnings_caught() as caught, _running(job, variant, seed) as training:
        for step, batch in enumerate(job.stream(steps)):
            scales.append(loss_scale())
            losses.append(training.step(batch))
            if step_was_skipped(training.optimizer):
                skipped.append(step)
            divergence = _divergence(training, step, losses[-1])
            if divergence is not None:
                break
        weights = copy.deepcopy(model_state_dict(training.model))
        scalers = state_dict()
    messages = dict.fromkeys(
        str(one.message) for one in caught if issubclass(one.category, AmpWarning)
    )
    run = SeedRun(seed, tuple(losses), tuple(scales), tuple(skipped), divergence)
    return Trained(run, weights, scalers, tuple(messages))


def _divergence(training: Training, step: int, loss: float) -> Divergence | None:
    named = list(training.model.named_parameters())
    finite = torch.stack([p.detach().isfinite().all() for _, p in named])
    if bool(finite.all()):
        return None if math.isfinite(loss) else Divergence(step, None)
    return Divergence(step, named[int((~finite).nonzero()[0])][0])


@dataclass(frozen=True)
class Probe:
    """One backward pass: the loss, and the gradients, unscaled, by the path of the weight."""

    loss: float
    gradients: dict[str, torch.Tensor]


def probe(
    job: Job,
    variant: Variant,
    seed: int,
    weights: Weights | None = None,
    scaler_state: Mapping[str, Any] | None = None,
    *,
    skipped: int = 0,
) -> Probe:
    """Loss and gradients, in FP32, of the first batch, or of a later one, at `weights`.

    An overflow lowers the scale and is tried again, as in training. `weights` are by default those
    that the model is built with; `skipped` says how many batches to leave out.
    """
    training = job.built(seed)
    if weights is not None:
        training.model.load_state_dict(weights)
    paths = {id(p): path for path, p in training.model.named_parameters()}
    held = [p for group in training.optimizer.param_groups for p in group["params"]]
    names = [paths.get(id(p), f"parameter {i}") for i, p in enumerate(held)]
    try:
        with own_warnings_caught():
            job.initialized(training, variant)
            if scaler_state:
                load_state_dict(scaler_state)
            *_, batch = job.stream(skipped + 1)
            loss = _backward_without_overflow(training, batch, seed)
        masters = zip(names, master_params(training.optimizer), strict=True)
        return Probe(
            loss,
            {
                name: master.grad.detach().float().cpu().clone()
                for name, master in masters
                if master.grad is not None
            },
        )
    finally:
        uninitialize()


def _backward_without_overflow(training: Training, batch: Any, seed: int) -> float:
    loss = math.nan
    for _ in range(PROBE_ATTEMPTS):
        seed_everything(seed)
        loss = float(training.forward_and_backward(batch).item())
        if not step_will_be_skipped(training.optimizer):
            break
        training.optimizer.zero_grad()
    return loss


def measure_memory(
    job: Job, variant: Variant, seed: int, scaler_state: Mapping[str, Any] | None = None
) -> int:
    """The most bytes that the first steps have alive at once, the model included.

    On a device with an allocator of torch's, what that says; else the bytes of live tensors. What
    building and casting the model needed for a moment does not count. `scaler_state` is that of a
    trained run: a step that is skipped for an overflow makes no state of the optimizer.
    """
    allocator = _allocator()
    before = 0 if allocator is None else int(allocator.memory_allocated())
    with own_warnings_caught(), LiveMemory() as memory, _running(job, variant, seed) as training:
        memory.peak = memory.now
        if allocator is not None:
            allocator.reset_peak_memory_stats()
        if scaler_state:
            load_state_dict(scaler_state)
        for batch in job.stream(MEMORY_STEPS):
            training.step(batch)
        peak = 0 if allocator is None else int(allocator.max_memory_allocated()) - before
        return peak if peak > 0 else int(memory.peak)


def _allocator() -> Any | None:
    """The module of torch for the accelerator of this machine, if that tells of its memory."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return module if hasattr(module, "reset_peak_memory_stats") else None


def time_steps(
    job: Job,
    variant: Variant,
    seed: int,
    scaler_state: Mapping[str, Any],
    warm_up: int,
    count: int,
) -> tuple[float, ...]:
    """The seconds of each of `count` steps, after `warm_up` others. Skipped steps do not count.

    `scaler_state` is that of a trained run, so that the loss scale is where it settles.
    """
    seconds = []
    with own_warnings_caught(), _running(job, variant, seed) as training:
        load_state_dict(scaler_state)
        for i, batch in enumerate(job.stream(warm_up + count)):
            started = time.perf_counter()
            training.step(batch)
            taken = time.perf_counter() - started
            if i >= warm_up and not step_was_skipped(training.optimizer):
                seconds.append(taken)
    return tuple(seconds)
