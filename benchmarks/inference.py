"""The time of a forward of one text, where the cast of every weight is most of the work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import amp_patch as amp
from benchmarks.contenders import SEED, initialized
from benchmarks.models import Gpt, texts
from benchmarks.rows import Report, Row, at_least, at_most
from benchmarks.turns import Settings, median_ratio, synchronize, take_turns

TITLE = "Inference with batch 1, ratio to autocast"
ROUNDS = 10
FORWARDS_A_TURN = 5
WARM_UP_FORWARDS = 2
HALF = torch.bfloat16
# The largest difference of logits, to the largest logit: roundings of 2^-8 in six layers.
TOLERANCE = 0.05

Surroundings = Callable[[nn.Module], AbstractContextManager[Any]]


def measure(settings: Settings) -> Report:
    """Check and time the forward of a GPT of 6 layers."""
    torch.manual_seed(SEED)
    width, length = settings.size(512, 64), settings.size(32, 8)
    with settings.device:
        model = Gpt(layers=settings.size(6, 2), width=width, heads=8, context=128).eval()
        tokens = texts(1, length).inputs
    with torch.no_grad():
        expected = model(tokens)
        for name in WAYS:
            check(name, model, tokens, expected)
        turns = take_turns(
            {name: partial(time_turn, name, model, tokens) for name in WAYS},
            settings.rounds(ROUNDS),
        )
    size = f"{width} wide, 1 x {length} tokens, bfloat16"
    return Report(make_rows(turns, size))


def make_rows(turns: dict[str, list[float]], size: str) -> list[Row]:
    """Return the rows of the turns. "Times faster" is autocast's time to the other's."""
    autocast = turns["autocast"]
    faster = {name: 1 / median_ratio(turn, autocast) for name, turn in turns.items()}
    milliseconds = 1e3 * statistics.median(autocast)
    return [
        Row(f"{size}: O5, times faster", faster["O5"], at_least(3.0)),
        Row(f"{size}: O4 in keep_casts, times faster", faster["keep_casts"], at_least(2.4)),
        Row(f"{size}: O4, ratio", median_ratio(turns["O4"], autocast), at_most(1.0)),
        Row(f"{size}: FP32, times faster", faster["FP32"]),
        Row(f"{size}: one autocast block around all, times faster", faster["open autocast"]),
        Row(f"{size}: autocast", milliseconds, unit="ms"),
    ]


@contextmanager
def keeping(model: nn.Module) -> Iterator[None]:
    """O4 inside `keep_casts`."""
    with initialized(model, None, "O4"), amp.keep_casts():
        yield


def open_autocast(model: nn.Module) -> AbstractContextManager[Any]:
    """One region of autocast around all forwards, which casts each weight once."""
    device = next(model.parameters()).device
    return torch.autocast(device.type, dtype=HALF)


WAYS: dict[str, Surroundings] = {
    "FP32": nullcontext,
    "autocast": nullcontext,
    "open autocast": open_autocast,
    "O4": lambda model: initialized(model, None, "O4"),
    "keep_casts": keeping,
    "O5": lambda model: initialized(model, None, "O5"),
}


def forward(name: str, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits. Autocast as it is written: one region for each forward."""
    if name != "autocast":
        return model(tokens)
    with torch.autocast(tokens.device.type, dtype=HALF):
        return model(tokens)


def check(name: str, model: nn.Module, tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless the logits, of a second forward too, are FP32's within half precision."""
    with WAYS[name](model):
        for _ in range(2):
            found = forward(name, model, tokens).float()
            error = ((found - expected).abs().max() / expected.abs().max()).item()
            if not error < TOLERANCE:
                raise RuntimeError(
                    f"{name}: expected logits within {TOLERANCE:.0%} of FP32's, found {error:.0%}"
                )


def time_turn(name: str, model: nn.Module, tokens: torch.Tensor) -> float:
    """Return the median time of a forward, switching on and first ones left out."""
    seconds = []
    with WAYS[name](model):
        for _ in range(WARM_UP_FORWARDS):
            forward(name, model, tokens)
        for _ in range(FORWARDS_A_TURN):
            synchronize(tokens.device)
            started = time.perf_counter()
            forward(name, model, tokens)
            synchronize(tokens.device)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
