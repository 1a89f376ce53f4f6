"""The cost of one call of a patched function, on tensors so small that nothing else counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import amp_patch as amp
from amp_patch.casts.rules import OP_RULES
from benchmarks.contenders import SEED, initialized
from benchmarks.rows import Report, Row, at_most
from benchmarks.turns import (
    Settings,
    median_difference,
    median_ratio,
    seconds_a_call,
    synchronize,
    take_turns,
)

TITLE = "One call on 8 x 8, weights cached, bfloat16"
ROUNDS = 15
CALLS = 3000
SIDE = 8
HALF = torch.bfloat16
TOLERANCE = 0.03  # of the largest element: a few roundings of 2^-8

LISTED = {  # what is patched, and how far from autocast's cost it may be
    "linear, half input": ("functional.linear(half, weight, bias)", 1.25),
    "matmul, half input": ("torch.matmul(half, weight)", 1.25),
    "@, half input": ("half @ weight", 1.25),
    "linear, float input": ("functional.linear(single, weight, bias)", 1.45),
    "matmul, float input": ("torch.matmul(single, weight)", 1.45),
    "@, float input": ("single @ weight", 1.45),
}
UNLISTED = {
    "add": "torch.add(single, single)",
    "mul": "single * single",
    "relu": "functional.relu(single)",
}
DECORATED = {"decorated function": "decorated(single)", "the same, plain": "plain(single)"}
STATEMENTS = {**{name: row[0] for name, row in LISTED.items()}, **UNLISTED, **DECORATED}
# Where plain torch raises on mixed dtypes, there is nothing to time.
FLOAT_ONLY = [name for name in STATEMENTS if "half input" not in name]

Turns = list[dict[str, float]]


def measure(settings: Settings) -> Report:
    """Check and time calls in plain torch, in autocast, with casts, and with casts suspended."""
    names = make_names(settings.device)
    before = patched_objects()
    check_results(names)
    calls = settings.size(CALLS, 20)
    turns = take_turns(
        {way: partial(time_turn, way, names, calls) for way in WAYS}, settings.rounds(ROUNDS)
    )
    after = patched_objects()
    left = sum(after[name] is not before[name] for name in before)
    return Report([*listed_rows(turns), *unlisted_rows(turns), *idle_rows(turns, left)])


def make_names(device: torch.device) -> dict[str, Any]:
    """Return what the statements use."""
    torch.manual_seed(SEED)
    single = torch.randn(SIDE, SIDE, device=device)
    weights = nn.Linear(SIDE, SIDE, device=device)
    return {
        "torch": torch,
        "functional": functional,
        "model": weights,
        "single": single,
        "half": single.to(HALF),
        "weight": weights.weight,
        "bias": weights.bias,
        "plain": negate,
        "decorated": amp.half_function(negate),
    }


def negate(tensor: torch.Tensor) -> torch.Tensor:
    """Return the negative: a function of a user."""
    return tensor.neg()


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Casts installed, and switched off for a block."""
    with initialized(model, None, "O4"), amp.disable_casts():
        yield


WAYS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "autocast": lambda model: torch.autocast(model.weight.device.type, dtype=HALF),
    "O4": lambda model: initialized(model, None, "O4"),
    "suspended": suspended,
}


def time_turn(way: str, names: dict[str, Any], calls: int) -> dict[str, float]:
    """Return the seconds of a call of each statement."""
    seconds = {}
    with WAYS[way](names["model"]):
        for name in FLOAT_ONLY if way in {"plain", "suspended"} else STATEMENTS:
            seconds[name] = seconds_a_call(STATEMENTS[name], names, calls)
            synchronize(names["single"].device)
    return seconds


def check_results(names: dict[str, Any]) -> None:
    """Raise unless each statement gives what FP32 does, in the dtype that is asked for."""
    for name, statement in STATEMENTS.items():
        expected = evaluate(statement.replace("half", "single"), names)
        for way in ("autocast", "O4"):
            with WAYS[way](names["model"]):
                found = evaluate(statement, names)
            is_cast = name in LISTED or (way, name) == ("O4", "decorated function")
            wanted = HALF if is_cast else expected.dtype
            if found.dtype is not wanted:
                raise RuntimeError(f"{way}, {name}: expected {wanted}, found {found.dtype}")
            error = ((found.float() - expected).abs().max() / expected.abs().max()).item()
            if not error < TOLERANCE:
                raise RuntimeError(
                    f"{way}, {name}: expected a result within {TOLERANCE:.0%} of FP32's, "
                    f"found {error:.0%}"
                )


def evaluate(statement: str, names: dict[str, Any]) -> torch.Tensor:
    """Return the value of one of the statements above."""
    return eval(statement, names).detach()  # noqa: S307 (it is from the tables of this module)


def column(turns: dict[str, Turns], way: str, name: str) -> list[float]:
    """Return the turns of one statement."""
    return [turn[name] for turn in turns[way]]


def listed_rows(turns: dict[str, Turns]) -> Iterator[Row]:
    """Rows of patched operations beside autocast."""
    for name, (_, limit) in LISTED.items():
        ratio = median_ratio(column(turns, "O4", name), column(turns, "autocast", name))
        yield Row(f"{name}: O4, ratio to autocast", ratio, at_most(limit))


def unlisted_rows(turns: dict[str, Turns]) -> Iterator[Row]:
    """Rows of operations without a rule beside plain torch."""
    for name in UNLISTED:
        ratio = median_ratio(column(turns, "O4", name), column(turns, "plain", name))
        yield Row(f"{name}, which has no rule: O4, ratio to plain torch", ratio, at_most(1.02))


def idle_rows(turns: dict[str, Turns], left: int) -> Iterator[Row]:
    """Rows of what is left of the cost where nothing is cast."""
    for name in FLOAT_ONLY:
        if name in LISTED:
            mine, plain = column(turns, "suspended", name), column(turns, "plain", name)
            beyond = 1e6 * median_difference(mine, plain)
            yield Row(f"{name}: suspended, beyond plain torch", beyond, at_most(0.5), "µs")
    mine, plain = (column(turns, "plain", name) for name in DECORATED)
    beyond = 1e6 * median_difference(mine, plain)
    what = "a half_function where nothing is initialized, beyond the plain function"
    yield Row(what, beyond, at_most(0.5), "µs")
    yield Row(
        "functions that are not what they were after uninitialize", left, at_most(0), "of all"
    )


def patched_objects() -> dict[str, object]:
    """Return all functions that have a rule, as they are now."""
    return {
        row.qualified_name: getattr(row.owner, row.name)
        for row in OP_RULES
        if hasattr(row.owner, row.name)
    }
