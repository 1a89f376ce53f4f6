"""How costs grow with the model: what should be linear, and what should not grow at all."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.calls import CALLS, SIDE
from benchmarks.contenders import initialized
from benchmarks.gradients import Weights, check_level, leaving_ratio, step_ratio
from benchmarks.rows import Report, Row, at_most, markdown_table, show
from benchmarks.turns import Settings, median_ratio, seconds_a_call, take_turns

TITLE = "Growth with the number of parameters"
ROUNDS = 5
CALL_ROUNDS = 10
ELEMENTS = 100_000  # of a weight, so that the number of weights grows too
COUNTS = (1, 10, 100, 1_000)  # of weights: 1e5 to 1e8 parameters
QUICK_COUNTS = (1, 2)
# From one size to the next, ten times the parameters, and at most so much more than ten times the
# cost, beside bare calls, which caches of the processor make slower with size too.
LINEAR = at_most(1.15)
INDEPENDENT = at_most(1.05)


def measure(settings: Settings) -> Report:
    """Time blocks, steps and calls at several sizes."""
    check_level("O2", 3, 100, settings.device)
    counts = QUICK_COUNTS if settings.is_quick else COUNTS
    elements = settings.size(ELEMENTS, 100)
    leaving, steps = [], []
    for count in counts:
        model = Weights(count, elements, settings.device)
        leaving.append(leaving_ratio("O2", model, settings.rounds(ROUNDS)))
        steps.append(step_ratio("O2", model, settings.rounds(ROUNDS)))
        del model
        gc.collect()
    sizes = f"{counts[0] * elements:.0e} to {counts[-1] * elements:.0e} parameters"
    rows = [
        growth_row(f"leaving scale_loss at O2, {sizes}", leaving),
        growth_row(f"step beyond the optimizer at O2, {sizes}", steps),
        *call_rows(settings),
    ]
    table = markdown_table(
        ("ratio to bare calls, parameters:", *(f"{count * elements:.0e}" for count in counts)),
        [[name, *map(show, ratios)] for name, ratios in (("leave", leaving), ("step", steps))],
    )
    return Report(rows, [table])


def growth_row(what: str, ratios: list[float]) -> Row:
    """Return the row of the largest growth from one size to the next."""
    growth = max(larger / smaller for smaller, larger in pairwise(ratios))
    return Row(f"{what}: largest growth beyond that of bare calls", growth, LINEAR)


def call_rows(settings: Settings) -> Iterator[Row]:
    """Rows of a call in a large model beside one in a small model."""
    width, count = settings.size(3_000, 16), settings.size(10_000, 10)
    cases = {
        "size of the model": (nn.Linear(SIDE, SIDE), nn.Linear(width, width)),
        "number of cached weights": (many_weights(1), many_weights(count)),
    }
    for name, (small, large) in cases.items():
        ratio = call_ratio(small, large, settings)
        extent = f"{parameters(small):,} and {parameters(large):,} parameters"
        yield Row(f"cost of a call by {name}, {extent}", ratio, INDEPENDENT)


def many_weights(count: int) -> nn.Module:
    """Return a model of that many weights of 8 x 8."""
    return nn.ParameterList(torch.eye(SIDE) for _ in range(count))


def parameters(model: nn.Module) -> int:
    """Return how many a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def call_ratio(small: nn.Module, large: nn.Module, settings: Settings) -> float:
    """Return the cost of a call with casts of all weights in the cache, large to small."""
    calls = settings.size(CALLS, 20)
    contenders = {
        "small": partial(call_turn, small, calls),
        "large": partial(call_turn, large, calls),
    }
    turns = take_turns(contenders, settings.rounds(CALL_ROUNDS))
    return median_ratio(turns["large"], turns["small"])


def call_turn(model: nn.Module, calls: int) -> float:
    """Return the seconds of one call on 8 x 8 after each weight of the model was cast."""
    weight = nn.Parameter(torch.eye(SIDE))
    single = torch.full((SIDE, SIDE), 2.0)
    with initialized(model, None, "O4"):
        names = {"linear": functional.linear, "single": single, "weight": weight}
        for own in model.parameters():
            if own.dim() == 2:
                functional.linear(own.new_zeros(1, own.shape[1]), own)
        found = functional.linear(single, weight)
        if found.dtype is not torch.bfloat16 or not bool((found == 2.0).all()):
            raise RuntimeError(f"expected twos in bfloat16, found {found!r}")
        return seconds_a_call("linear(single, weight)", names, calls)
