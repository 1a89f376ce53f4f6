"""Take turns: everything that is compared runs in one process, round robin."""

from __future__ import annotations

import math
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

QUICK_ROUNDS = 1
FEWEST_ROUNDS = 3
PARTS = 5  # of a turn of small calls
QUICK = "A quick run: sizes and repeats are tiny, and the figures say nothing about speed."

Turn = TypeVar("Turn")


@dataclass(frozen=True)
class Settings:
    """How thoroughly to measure, and where."""

    is_quick: bool = False
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))

    def rounds(self, full: int) -> int:
        """Return the number of turns that each contender gets."""
        return QUICK_ROUNDS if self.is_quick else full

    def size(self, full: int, quick: int) -> int:
        """Return the one or the other size."""
        return quick if self.is_quick else full


def take_turns(
    contenders: Mapping[str, Callable[[], Turn]], rounds: int, limit_s: float = math.inf
) -> dict[str, list[Turn]]:
    """Call each contender `rounds` times, in turns, and return what its turns returned.

    After `limit_s` seconds no round is begun beyond the third.

    Each round starts with another one, so that nobody always runs behind the same neighbour's
    caches, and what slows the machine down for a while hits all of them.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    names = list(contenders)
    started = time.perf_counter()
    for turn in range(rounds):
        if turn >= FEWEST_ROUNDS and time.perf_counter() - started > limit_s:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            turns[name].append(contenders[name]())
    return turns


def median_ratio(mine: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over the rounds of one contender's turn to another's."""
    return statistics.median(a / b for a, b in zip(mine, base, strict=True))


def median_difference(mine: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over the rounds of what one contender's turn takes beyond another's."""
    return statistics.median(a - b for a, b in zip(mine, base, strict=True))


def seconds_a_call(statement: str, names: dict[str, Any], calls: int) -> float:
    """Return the time of one execution of `statement` in the quickest part of `calls` of them.

    A part takes milliseconds, and whatever comes between makes it longer, never shorter.
    """
    timer = timeit.Timer(statement, globals=names)
    calls_a_part = max(1, calls // PARTS)
    timer.timeit(calls_a_part)
    return min(timer.repeat(PARTS, calls_a_part)) / calls_a_part


def synchronize(device: torch.device) -> None:
    """Wait for what was queued on an accelerator."""
    torch.get_device_module(device).synchronize()
