"""A stand-in for amp_patch with plain FP32 torch behind it: what a loop must agree with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import amp_patch

# A loop of a user. It takes amp_patch or its stand-in, and keywords for `initialize`; it gives the
# models that it trained and the losses on the way.
Loop = Callable[..., tuple[list[nn.Module], list[float]]]

# How far training in half may end from training in FP32, as a part of the way that the weights
# went: 32 roundings of the half dtype. A loop that loses a gradient, counts one twice or leaves one
# scaled is off by a third and more.
TOLERANCE = {
    "O0": 0.0,
    "O1": 32 * 2.0**-11,
    "O2": 32 * 2.0**-11,
    "O3": 32 * 2.0**-11,
    "O4": 32 * 2.0**-8,
    "O5": 32 * 2.0**-8,
}


class PlainTorch:
    """The names that a loop uses. Remembers the weights with which it began."""

    def __init__(self) -> None:
        self.start: list[torch.Tensor] = []

    def initialize(self, models: Any, optimizers: Any = None, **_: Any) -> Any:
        self.start.extend(weights_of(models if isinstance(models, list) else [models]))
        return models if optimizers is None else (models, optimizers)

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, *_: Any, **__: Any) -> Iterator[torch.Tensor]:
        yield loss

    def master_params(self, optimizer: Any) -> Iterator[torch.Tensor]:
        for group in optimizer.param_groups:
            yield from group["params"]

    def step_was_skipped(self, optimizer: Any) -> bool:
        return False

    def step_will_be_skipped(self, optimizer: Any) -> bool:
        return False

    def grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)


def weights_of(models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Copies of the FP32 weights, as a checkpoint has them."""
    return [
        value.detach().clone()
        for model in models
        for value in model.state_dict().values()
        if value.is_floating_point()
    ]


def assert_trains_as_in_fp32(loop: Loop, opt_level: str, factor: float = 1.0, **opts: Any) -> None:
    """Run `loop` with plain torch and with amp_patch at `opt_level`, and compare where it ends.

    `factor` widens the tolerance, for optimizers whose step divides by the size of the gradient.
    """
    plain = PlainTorch()
    torch.manual_seed(1)
    plain_models, plain_losses = loop(plain)
    expected = weights_of(plain_models)
    torch.manual_seed(1)
    if opt_level in ("O1", "O2"):
        opts = {"loss_scale": 128.0, **opts}  # no overflow: every step counts
    models, losses = loop(amp_patch, opt_level=opt_level, verbosity=0, **opts)
    found = weights_of(models)
    assert [value.shape for value in found] == [value.shape for value in expected]
    error = distance(found, expected) / distance(expected, plain.start)
    tolerance = TOLERANCE[opt_level] * factor
    assert error <= tolerance, f"{error:.4f} of the way off, expected at most {tolerance:.4f}"
    if opt_level == "O0":
        assert losses == plain_losses
    else:
        largest = max(abs(loss) for loss in plain_losses)
        for one, other in zip(losses, plain_losses, strict=True):
            assert abs(one - other) <= tolerance * largest


def distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The Euclidean distance between two lists of tensors."""
    parts = [(a.double() - b.double()).flatten() for a, b in zip(some, others, strict=True)]
    return float(torch.cat(parts).norm())
