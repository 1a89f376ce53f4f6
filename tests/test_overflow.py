"""What an overflow does to weights, optimizer state and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from networks import (
    OPTIMIZERS,
    OptimizerFactory,
    assert_identical,
    backward,
    mlp,
    normalised_mlp,
    snapshot,
    state_of,
    train_step,
    with_gradient_times,
)
from torch import nn

import amp_patch as amp

# The levels that scale by themselves, and the others when they are asked to.
SCALED = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O0-dynamic": {"opt_level": "O0", "loss_scale": "dynamic"},
    "O3-dynamic": {"opt_level": "O3", "loss_scale": "dynamic"},
    "O4-dynamic": {"opt_level": "O4", "loss_scale": "dynamic"},
    "O5-dynamic": {"opt_level": "O5", "loss_scale": "dynamic"},
}
STATIC = {
    f"{opt_level}-static": {"opt_level": opt_level, "loss_scale": 128.0}
    for opt_level in amp.OPT_LEVELS
}
COMBINATIONS = [
    pytest.param(options, OPTIMIZERS[optimizer], id=f"{level}-{optimizer}")
    for level, options in {**SCALED, **STATIC}.items()
    for optimizer in OPTIMIZERS
]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def initialized(
    options: dict[str, Any], factory: OptimizerFactory = OPTIMIZERS["sgd"]
) -> tuple[nn.Module, Any]:
    model = normalised_mlp()
    optimizer = factory(model.parameters())
    amp.initialize(model, optimizer, **options)
    return model, optimizer


def set_scale(scale: float, unskipped: int) -> None:
    amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": unskipped}})


@pytest.mark.parametrize(("options", "factory"), COMBINATIONS)
@pytest.mark.parametrize(
    ("overflows_at", "factor"), [(0, math.inf), (1, math.nan), (3, -math.inf)], ids=str
)
def test_an_overflow_at_any_step_leaves_weights_and_optimizer_state_bit_identical(
    options: dict[str, Any], factory: OptimizerFactory, overflows_at: int, factor: float
) -> None:
    model, optimizer = initialized(options, factory)
    if options.get("loss_scale") != 128.0:
        set_scale(256.0, 0)
    for _ in range(overflows_at):
        train_step(model, optimizer, batch())
    before, scale = snapshot(model, optimizer), amp.loss_scale()
    # A static scale cannot back off, and says so.
    is_static = options.get("loss_scale") == 128.0
    with pytest.warns(amp.AmpWarning, match="loss scale 128") if is_static else nullcontext():
        train_step(model, optimizer, batch(), factor)
    assert amp.step_was_skipped(optimizer)
    assert_identical(snapshot(model, optimizer), before)
    assert amp.loss_scale() == (scale if is_static else scale / 2)
    train_step(model, optimizer, batch())
    assert not amp.step_was_skipped(optimizer)
    after = snapshot(model, optimizer)
    assert all(p.isfinite().all() for p in after["updated"])
    assert not any(
        torch.equal(a, b) for a, b in zip(after["updated"], before["updated"], strict=True)
    )


@pytest.mark.parametrize("options", SCALED.values(), ids=SCALED.keys())
def test_training_with_a_skipped_step_is_training_without_that_step(
    options: dict[str, Any],
) -> None:
    batches = [batch() for _ in range(4)]
    weights = []
    for overflows_at in (None, 2):
        torch.manual_seed(1)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        amp.initialize(model, optimizer, **options)
        set_scale(256.0, 0)
        for i, one in enumerate(batches):
            if i == overflows_at:
                train_step(model, optimizer, batch(), math.inf)
            train_step(model, optimizer, one)
        weights.append(snapshot(model, optimizer))
        amp.uninitialize()
    # Half as large a scale, a power of two, changes no bit of gradients that are no subnormals.
    assert_identical(weights[1], weights[0])


def test_gradients_of_a_skipped_step_are_gone_after_it() -> None:
    model, optimizer = initialized({"opt_level": "O2"})
    train_step(model, optimizer, batch(), math.inf)
    assert all(p.grad is None for p in amp.master_params(optimizer))
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_not_finite_is_named_as_the_cause_and_skipped() -> None:
    model, optimizer = initialized({"opt_level": "O1"})
    set_scale(256.0, 0)
    before = snapshot(model, optimizer)
    with pytest.warns(amp.AmpWarning, match="the loss itself is inf or NaN"):
        backward(model(batch()[0]).float().sum() * math.nan, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_identical(snapshot(model, optimizer), before)


def test_a_static_scale_of_1_tests_nothing() -> None:
    model, optimizer = initialized({"opt_level": "O0"})
    train_step(model, optimizer, batch(), math.nan)
    assert not amp.step_was_skipped(optimizer)
    assert any(p.isnan().any() for p in model.parameters())


class Weighted(nn.Module):
    """A weight whose gradient is whatever `coefficients` says."""

    def __init__(self, coefficients: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones_like(coefficients))
        self.coefficients = coefficients

    def forward(self) -> torch.Tensor:
        return with_gradient_times(self.weight, self.coefficients).sum()


def one_nan_in_a_million() -> torch.Tensor:
    gradient = torch.ones(1_000_000)
    gradient[123_456] = math.nan
    return gradient


@pytest.mark.parametrize(
    ("make_gradient", "is_overflow"),
    [
        pytest.param(lambda: torch.full((10,), 3e38), False, id="finite-with-infinite-sum"),
        pytest.param(lambda: torch.tensor([3e38, -3e38]), False, id="largest-of-both-signs"),
        pytest.param(lambda: torch.zeros(3), False, id="zeros"),
        pytest.param(lambda: torch.tensor([math.inf, -math.inf]), True, id="inf-and-minus-inf"),
        pytest.param(lambda: torch.tensor([0.0, -math.inf]), True, id="minus-inf"),
        pytest.param(one_nan_in_a_million, True, id="one-nan-in-a-million"),
    ],
)
def test_the_finite_test_is_elementwise(
    make_gradient: Callable[[], torch.Tensor], is_overflow: bool
) -> None:
    model = Weighted(make_gradient())
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-120)
    amp.initialize(
        model,
        optimizer,
        opt_level="O0",
        loss_scale="dynamic",
        min_loss_scale=0.5,
        max_loss_scale=1.0,
    )
    before = model.weight.detach().clone()
    backward(model(), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) == is_overflow
    assert_identical(
        model.weight.detach(), before if is_overflow else before - 2.0**-120 * model.coefficients
    )


@pytest.mark.parametrize("factor", [1.0, math.inf], ids=["finite", "inf"])
def test_sparse_gradients_are_unscaled_and_tested(factor: float) -> None:
    model = nn.Embedding(6, 2, sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1")
    backward(with_gradient_times(model(torch.tensor([1, 4, 4])).sum(), factor), optimizer)
    optimizer.step()
    uses = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 0.0])[:, None].expand(6, 2)
    assert_identical(model.weight.detach(), 0 * uses if factor == math.inf else -uses)
    assert amp.step_was_skipped(optimizer) == (factor == math.inf)


def test_the_scale_starts_at_2_to_the_16_and_doubles_after_2000_clean_steps() -> None:
    model, optimizer = initialized({"opt_level": "O1"})
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0}}
    set_scale(256.0, 1998)
    train_step(model, optimizer, batch())
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 256.0, "unskipped": 1999}
    train_step(model, optimizer, batch())
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 512.0, "unskipped": 0}


def test_an_overflow_starts_the_count_of_clean_steps_again() -> None:
    model, optimizer = initialized({"opt_level": "O1"})
    set_scale(256.0, 1999)
    train_step(model, optimizer, batch(), math.inf)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 128.0, "unskipped": 0}


@pytest.mark.parametrize("ceiling", [2.0**16, 2.0**24, 100_000.0], ids=str)
def test_the_ceiling_is_reached_exactly_and_never_passed(ceiling: float) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", max_loss_scale=ceiling)
    scales = []
    for _ in range(12):
        set_scale(amp.loss_scale(), 1999)
        backward(model(torch.ones(1, 1)).sum() * 2.0**-30, optimizer)
        scales.append(amp.loss_scale())
    assert max(scales) == scales[-1] == ceiling
    assert scales == sorted(scales)


@pytest.mark.filterwarnings("ignore:gradients are inf or NaN at loss scale")
@pytest.mark.parametrize("floor", [None, 2.0**-3, 3.0, 1e-30], ids=str)
def test_1200_overflows_in_a_row_end_at_the_floor_and_never_at_0(floor: float | None) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level="O1", min_loss_scale=floor)
    before = snapshot(model, optimizer)
    for _ in range(1200):
        optimizer.zero_grad()
        backward(with_gradient_times(model(torch.ones(1, 1)).sum(), math.inf), optimizer)
        optimizer.step()
        assert amp.loss_scale() > 0
    assert amp.loss_scale() == (1.0 if floor is None else floor)
    assert_identical(snapshot(model, optimizer), before)


@pytest.mark.filterwarnings("ignore:gradients are inf or NaN at loss scale")
def test_training_goes_on_after_many_overflows() -> None:
    model, optimizer = initialized({"opt_level": "O1"})
    for _ in range(20):
        train_step(model, optimizer, batch(), math.inf)
    assert amp.loss_scale() == 1.0
    one = batch()
    losses = [train_step(model, optimizer, one) for _ in range(10)]
    assert losses[-1] < losses[0]


def test_an_overflow_at_the_floor_is_warned_of_with_the_remedy() -> None:
    model, optimizer = initialized({"opt_level": "O1", "max_loss_scale": 2.0})
    train_step(model, optimizer, batch(), math.inf)
    assert amp.loss_scale() == 1.0
    with pytest.warns(
        amp.AmpWarning, match="at loss scale 1 .*0.weight.*go no lower.*O4"
    ) as caught:
        train_step(model, optimizer, batch(), math.inf)
    assert caught[0].filename.endswith("networks.py")  # the line with the block


def test_an_overflow_between_clean_blocks_of_one_window_skips_the_step() -> None:
    model, optimizer = initialized({"opt_level": "O2"})
    set_scale(256.0, 0)
    train_step(model, optimizer, batch())
    before = snapshot(model, optimizer)
    for factor in (1.0, math.inf, 1.0):
        inputs, targets = batch()
        backward(
            with_gradient_times(nn.functional.mse_loss(model(inputs), targets), factor), optimizer
        )
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_identical(snapshot(model, optimizer), before)
    assert amp.loss_scale() == 128.0


def test_zero_grad_forgets_an_overflow() -> None:
    model, optimizer = initialized({"opt_level": "O2"})
    set_scale(256.0, 0)
    inputs, targets = batch()
    backward(
        with_gradient_times(nn.functional.mse_loss(model(inputs), targets), math.inf), optimizer
    )
    train_step(model, optimizer, batch())  # begins with zero_grad
    assert not amp.step_was_skipped(optimizer)
    assert all(math.isfinite(t.sum()) for state in state_of(optimizer) for t in state.values())
