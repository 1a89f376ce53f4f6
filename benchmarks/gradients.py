"""What amp_patch does to gradients and weights after backward, beside the bare grouped calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import amp_patch as amp
from benchmarks.contenders import initialized
from benchmarks.rows import Report, Row, at_most
from benchmarks.turns import Settings, median_ratio, synchronize, take_turns

TITLE = "Leaving scale_loss, and step beyond the optimizer, ratio to bare grouped calls"
ROUNDS = 12
TURN = 3  # of which the quickest counts: a turn is short, and anything may come between
SHAPES = ((50, 1_000_000, 1.15), (2_000, 4_096, 1.5))  # gradients, elements of each, target
STEP_TARGET = 1.15
GRADIENT = 3.0 * 2.0**-10  # of each weight; times 2^16 it fits float16
WEIGHT = 1.0 + 2.0**-20  # needs FP32: rounding it must give 1.0 in the model
HALF_OF = {"O1": torch.float32, "O2": torch.float16, "O5": torch.bfloat16}  # the gradients' dtype


class Idle(torch.optim.Optimizer):
    """An optimizer that moves nothing, so that what is beside it can be seen."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class Weights(nn.Module):
    """`count` weights of `size` elements each, with gradients that are made up."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.full((size,), WEIGHT, device=device) for _ in range(count)
        )
        self.device = device
        self.loss = torch.zeros((), device=device, requires_grad=True)
        self.made_up: list[torch.Tensor] = []

    def make_gradients(self, dtype: torch.dtype) -> None:
        """Have gradients of `dtype` at hand for the blocks to come."""
        self.made_up = [torch.empty_like(weight, dtype=dtype) for weight in self.weights]

    def seconds_to_leave(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the time from the end of the body of a `scale_loss` block to its own end."""
        optimizer.zero_grad()
        with amp.scale_loss(self.loss, optimizer) as scaled_loss:
            scale = amp.loss_scale()
            torch._foreach_zero_(self.made_up)
            torch._foreach_add_(self.made_up, GRADIENT * scale)
            for weight, gradient in zip(self.weights, self.made_up, strict=True):
                weight.grad = gradient
            del scaled_loss
            synchronize(self.device)
            started = time.perf_counter()
        synchronize(self.device)
        return time.perf_counter() - started


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Return the time of one call."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def check_level(level: str, count: int, size: int, device: torch.device) -> None:
    """Raise unless the block leaves the very gradients, and the step the masters' rounded values.

    A loss scale is a power of two, and the values fit half precision: FP32's results are exact.
    """
    model = Weights(count, size, device)
    optimizer = Idle(model.parameters())
    with initialized(model, optimizer, level), torch.no_grad():
        model.make_gradients(HALF_OF[level])
        model.seconds_to_leave(optimizer)
        for master in amp.master_params(optimizer):
            expect(level, "gradient", master.grad, GRADIENT)
            master.add_(1.0)
        optimizer.step()
        for weight in model.weights:
            expect(level, "weight", weight, torch.tensor(WEIGHT + 1.0).to(weight.dtype).item())


def expect(level: str, what: str, found: torch.Tensor | None, value: float) -> None:
    """Raise unless all elements have the value."""
    if found is None or not bool((found == value).all()):
        raise RuntimeError(f"{level}: expected each {what} to be {value!r}, found {found!r}")


def bare_check(level: str, model: Weights) -> Callable[[], float]:
    """Return a turn of the grouped calls that leaving needs at least.

    At O2 that is one from half to float, and at both levels one that unscales and checks.
    """
    wide = [torch.full_like(one, GRADIENT, dtype=torch.float32) for one in model.weights]
    found = torch.zeros((), device=model.device)
    inverse = torch.ones((), device=model.device)
    half = [one.half() for one in wide] if level == "O2" else []

    def both() -> None:
        if half:
            torch._foreach_copy_(wide, half)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found, inverse)

    return lambda: min(seconds_of(both, model.device) for _ in range(TURN))


def bare_copy(level: str, model: Weights) -> Callable[[], float]:
    """Return a turn of the one grouped call that rounds all weights."""
    wide = [torch.ones_like(one, dtype=torch.float32) for one in model.weights]
    half = [one.to(HALF_OF[level]) for one in wide]
    copy = partial(torch._foreach_copy_, half, wide)
    return lambda: min(seconds_of(copy, model.device) for _ in range(TURN))


def leaving_turn(level: str, model: Weights) -> Callable[[], float]:
    """Return a turn of leaving blocks at a level."""
    optimizer = Idle(model.parameters())

    def turn() -> float:
        with initialized(model, optimizer, level):
            model.make_gradients(HALF_OF[level])
            seconds = [model.seconds_to_leave(optimizer) for _ in range(TURN + 1)]
        return min(seconds[1:])

    return turn


def step_turn(level: str | None, model: Weights) -> Callable[[], float]:
    """Return a turn of steps at a level, or without amp_patch, that have gradients."""
    optimizer = Idle(model.parameters())

    def seconds() -> float:
        if level is not None:
            model.seconds_to_leave(optimizer)
        return seconds_of(optimizer.step, model.device)

    def turn() -> float:
        if level is None:
            return min(seconds() for _ in range(TURN + 1))
        with initialized(model, optimizer, level):
            model.make_gradients(HALF_OF[level])
            return min([seconds() for _ in range(TURN + 1)][1:])

    return turn


def leaving_ratio(level: str, model: Weights, rounds: int) -> float:
    """Return the time of leaving a block to that of the bare calls."""
    contenders = {"amp": leaving_turn(level, model), "bare": bare_check(level, model)}
    turns = take_turns(contenders, rounds)
    return median_ratio(turns["amp"], turns["bare"])


def step_ratio(level: str, model: Weights, rounds: int) -> float:
    """Return the time of a step beyond the optimizer's own to that of the bare call."""
    turns = take_turns(
        {
            "amp": step_turn(level, model),
            "own": step_turn(None, model),
            "bare": bare_copy(level, model),
        },
        rounds,
    )
    beyond = [mine - own for mine, own in zip(turns["amp"], turns["own"], strict=True)]
    return median_ratio(beyond, turns["bare"])


def shape_rows(settings: Settings, count: int, size: int, target: float) -> Iterator[Row]:
    """Rows of one number and size of gradients."""
    rounds = settings.rounds(ROUNDS)
    model = Weights(count, size, settings.device)
    shape = f"{count:,} x {size:,}"
    for level in ("O1", "O2"):
        ratio = leaving_ratio(level, model, rounds)
        yield Row(f"{shape}: leaving scale_loss, {level}", ratio, at_most(target))
    for level in ("O2", "O5"):
        ratio = step_ratio(level, model, rounds)
        yield Row(f"{shape}: step beyond the optimizer, {level}", ratio, at_most(STEP_TARGET))


def measure(settings: Settings) -> Report:
    """Check the levels, then time them."""
    for level in HALF_OF:
        check_level(level, 3, 100, settings.device)
    rows: list[Row] = []
    for count, size, target in SHAPES:
        rows += shape_rows(settings, settings.size(count, 8), settings.size(size, 64), target)
    return Report(rows)
