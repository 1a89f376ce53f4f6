"""Gradients and steps against what FP64, plain torch and the formulas of the optimizers give."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import (
    HALF_LEVELS,
    MASTER_LEVELS,
    NETWORKS,
    ROUNDING_UNIT,
    assert_identical,
    backward,
    gradients,
    normalised_mlp,
    train_step,
)
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import amp_patch as amp

SCALE = 1024.0  # large enough for these gradients not to vanish in float16, small enough to fit


def fp64_gradients(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    inputs, targets = batch
    oracle = copy.deepcopy(model).double()
    F.mse_loss(oracle(inputs.double()), targets.double()).backward()
    return [p.grad for p in oracle.parameters()]


def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Of the whole gradient as one vector, in the Euclidean norm."""
    pairs = zip(found, expected, strict=True)
    difference = torch.cat([(a.double() - b).flatten() for a, b in pairs])
    return (difference.norm() / torch.cat([b.flatten() for b in expected]).norm()).item()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("opt_level", "half_dtype"),
    [*HALF_LEVELS.items(), *MASTER_LEVELS.items()],
    ids=[*HALF_LEVELS, *MASTER_LEVELS],
)
def test_gradients_agree_with_fp64_within_the_rounding_of_half(
    opt_level: str, half_dtype: torch.dtype, network: str
) -> None:
    model, batch = NETWORKS[network].build(), NETWORKS[network].batch()
    expected = fp64_gradients(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=SCALE)
    backward(F.mse_loss(model(batch[0]), batch[1]), optimizer)
    found = gradients(optimizer)
    assert all(gradient.dtype is torch.float32 for gradient in found)
    error = relative_error(found, expected)
    # Each operation on the path rounds two operands and a result, once forward and once backward.
    # A rounding moves the result by at most one rounding unit, relatively, and independent ones
    # add up as the square root of their number.
    roundings = 6 * NETWORKS[network].depth
    assert error <= math.sqrt(roundings) * ROUNDING_UNIT[half_dtype]
    # FP32 would be 8,000 times nearer: the arithmetic did happen in half.
    assert error > 2**-3 * ROUNDING_UNIT[half_dtype]


@pytest.mark.parametrize("network", NETWORKS)
def test_o0_gradients_are_those_of_plain_torch(network: str) -> None:
    model, batch = NETWORKS[network].build(), NETWORKS[network].batch()
    plain = copy.deepcopy(model)
    F.mse_loss(plain(batch[0]), batch[1]).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
    backward(F.mse_loss(model(batch[0]), batch[1]), optimizer)
    assert_identical(gradients(optimizer), [p.grad for p in plain.parameters()])


class HalfTwin:
    """The same model cast by hand: half but for BatchNorm, loss scaled, gradients unscaled."""

    def __init__(self, model: nn.Module, half_dtype: torch.dtype, scale: float) -> None:
        self.model = copy.deepcopy(model)
        self.half_dtype = half_dtype
        self.scale = scale
        for module in self.model.modules():
            if not isinstance(module, _BatchNorm):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(half_dtype)

    def gradients(
        self, weights: list[torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        self.model.zero_grad()
        output = self.model(batch[0].to(self.half_dtype)).float()
        (F.mse_loss(output, batch[1]) * self.scale).backward()
        return [p.grad.float() / self.scale for p in self.model.parameters()]


class SgdByHand:
    """v <- 0.9 v + g; w <- w - 0.1 v (Sutskever et al. 2013, as torch writes it), in FP64."""

    def __init__(self) -> None:
        self.velocity: torch.Tensor | float = 0.0

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def update(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self.velocity = 0.9 * self.velocity + gradient
        return weight - 0.1 * self.velocity


class AdamByHand:
    """Algorithm 1 of Kingma and Ba, "Adam" (ICLR 2015), in FP64."""

    def __init__(self) -> None:
        self.first: torch.Tensor | float = 0.0
        self.second: torch.Tensor | float = 0.0
        self.steps = 0

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.99), eps=1e-6)

    def update(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.99 * self.second + 0.01 * gradient**2
        first = self.first / (1 - 0.9**self.steps)
        second = self.second / (1 - 0.99**self.steps)
        return weight - 0.01 * first / (second.sqrt() + 1e-6)


@pytest.mark.parametrize("by_hand", [SgdByHand, AdamByHand], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    ("opt_level", "half_dtype"), MASTER_LEVELS.items(), ids=MASTER_LEVELS.keys()
)
def test_a_step_is_the_fp32_step_on_unscaled_gradients(
    opt_level: str, half_dtype: torch.dtype, by_hand: type[SgdByHand | AdamByHand]
) -> None:
    model = normalised_mlp()
    optimizer = by_hand.optimizer(model.parameters())
    twin = HalfTwin(model, half_dtype, SCALE)
    hands = [by_hand() for _ in model.parameters()]
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=SCALE)
    for _ in range(4):
        batch = torch.randn(4, 6), torch.randn(4, 3)
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        unscaled = twin.gradients(before, batch)
        optimizer.zero_grad()
        backward(F.mse_loss(model(batch[0]), batch[1]), optimizer)
        assert_identical(gradients(optimizer), unscaled)
        optimizer.step()
        expected = [
            hand.update(weight.double(), gradient.double())
            for hand, weight, gradient in zip(hands, before, unscaled, strict=True)
        ]
        # A handful of FP32 roundings of numbers below 1.
        for master, weight in zip(amp.master_params(optimizer), expected, strict=True):
            torch.testing.assert_close(master.double(), weight, rtol=0, atol=8 * 2.0**-24)
        for parameter, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
            assert_identical(parameter.detach(), master.detach().to(parameter.dtype))


@pytest.mark.parametrize("opt_level", HALF_LEVELS)
def test_training_follows_fp32_training(opt_level: str) -> None:
    model = normalised_mlp()
    batch = torch.randn(8, 6), torch.randn(8, 3)
    losses = {}
    for level in ("O0", opt_level):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained, optimizer = amp.initialize(trained, optimizer, opt_level=level)
        losses[level] = [train_step(trained, optimizer, batch) for _ in range(20)]
    # 20 steps, each with an error of at most a few rounding units.
    tolerance = 20 * ROUNDING_UNIT[HALF_LEVELS[opt_level]]
    assert losses[opt_level] == pytest.approx(losses["O0"], rel=tolerance)
    assert losses[opt_level][-1] < 0.7 * losses[opt_level][0]
