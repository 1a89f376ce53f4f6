"""The three reasons for mixed precision, each with and without the mechanism that answers it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import backward
from torch import nn

import amp_patch as amp

TINY_GRADIENT = 2.0**-27  # an eighth of the smallest float16 number, 2^-24


def linear_of_one(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def gradient_through_half(opt_level: str, **overrides: Any) -> float:
    model = linear_of_one(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, **overrides)
    # The output is a half number, and so is its gradient, which is TINY_GRADIENT times the scale.
    loss = (model(torch.ones(1, 1)).float() * TINY_GRADIENT).sum()
    backward(loss, optimizer)
    (weight,) = amp.master_params(optimizer)
    return weight.grad.item()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_gradient_of_2_to_the_minus_27_survives_with_loss_scaling(opt_level: str) -> None:
    assert gradient_through_half(opt_level) == TINY_GRADIENT


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_it_is_lost_without_loss_scaling(opt_level: str) -> None:
    assert gradient_through_half(opt_level, loss_scale=1.0) == 0


@pytest.mark.parametrize("opt_level", ["O4", "O5"])
def test_it_survives_in_bfloat16_without_loss_scaling(opt_level: str) -> None:
    assert gradient_through_half(opt_level) == TINY_GRADIENT


def weights_after_small_updates(
    opt_level: str, update: float, steps: int = 4, **overrides: Any
) -> tuple[float, float]:
    """What the model computes with, and what the optimizer updates."""
    model = linear_of_one(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=update)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=opt_level, loss_scale=128.0, **overrides
    )
    for _ in range(steps):
        optimizer.zero_grad()
        backward(-model(torch.ones(1, 1)).sum(), optimizer)  # the gradient is -1
        optimizer.step()
    (updated,) = amp.master_params(optimizer)
    return model.weight.item(), updated.item()


# A quarter of the distance from 1.0 to the next number above it, in each half dtype.
SMALL_UPDATES = {"O2": 2.0**-12, "O5": 2.0**-9}


@pytest.mark.parametrize("opt_level", SMALL_UPDATES)
def test_four_small_updates_add_up_with_masters(opt_level: str) -> None:
    update = SMALL_UPDATES[opt_level]
    total = 1.0 + 4 * update
    assert weights_after_small_updates(opt_level, update) == (total, total)


@pytest.mark.parametrize("opt_level", SMALL_UPDATES)
def test_they_are_lost_without_masters(opt_level: str) -> None:
    update = SMALL_UPDATES[opt_level]
    assert weights_after_small_updates(opt_level, update, master_weights=False) == (1.0, 1.0)


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_they_add_up_where_the_weights_are_their_own_masters(opt_level: str) -> None:
    total = 1.0 + 4 * 2.0**-12
    assert weights_after_small_updates(opt_level, 2.0**-12) == (total, total)


def test_one_update_of_2_to_the_minus_12_is_in_the_master_before_the_weight_shows_it() -> None:
    assert weights_after_small_updates("O2", 2.0**-12, steps=1) == (1.0, 1.0 + 2.0**-12)


def initialize_o1() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1")


def test_a_sum_of_70_000_ones_survives_in_fp32() -> None:
    initialize_o1()
    ones = torch.ones(70_000, dtype=torch.float16)
    total = ones.sum()
    assert (total.item(), total.dtype) == (70_000, torch.float32)


def test_it_is_infinite_in_float16() -> None:
    initialize_o1()
    ones = torch.ones(70_000, dtype=torch.float16)
    with amp.disable_casts():
        assert ones.sum().isinf()
