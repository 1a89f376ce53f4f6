"""Learning rate schedulers: made before or after, stepped in any rhythm, held while skipping."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from injections import overflowing
from networks import LEVELS, assert_identical, snapshot, train_step
from plain_torch import assert_trains_as_in_fp32
from torch import nn
from torch.optim import lr_scheduler

import amp_patch as amp

SCALED_LEVELS = ("O1", "O2")
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "Restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
    "Cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.05, 0.2, step_size_up=2),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
}
WHEN = pytest.mark.parametrize("is_first", [True, False], ids=["made-before", "made-after"])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def scheduled(
    library: Any, make: Callable[[Any], Any], *, is_first: bool, every: int, **options: Any
) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = make(optimizer) if is_first else None
    library.initialize(model, optimizer, **options)
    scheduler = scheduler or make(optimizer)
    losses, rates = [], []
    for i in range(6):
        inputs, targets = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if i % every == every - 1:
            scheduler.step()
        losses.append(loss.item())
    assert len(set(rates)) > 1  # a schedule that reaches dead dicts changes nothing
    return [model], losses


@pytest.mark.parametrize("every", [1, 2], ids=["per-step", "per-epoch"])
@WHEN
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_schedule_trains_as_in_fp32(
    opt_level: str, name: str, is_first: bool, every: int
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*epoch parameter.*", UserWarning)  # SequentialLR's own
        assert_trains_as_in_fp32(
            lambda library, **options: scheduled(
                library, SCHEDULERS[name], is_first=is_first, every=every, **options
            ),
            opt_level,
        )


@WHEN
@pytest.mark.parametrize("skips", [1, 3])
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_schedule_over_skipped_first_steps_draws_no_warning(
    opt_level: str, skips: int, is_first: bool
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1) if is_first else None
    amp.initialize(model, optimizer, opt_level=opt_level)
    scheduler = scheduler or lr_scheduler.StepLR(optimizer, 1)
    for i in range(skips + 1):
        inputs, targets = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets) * 2.0**-8
        with amp.scale_loss(loss, optimizer) as scaled:
            (overflowing(scaled) if i < skips else scaled).backward()
        optimizer.step()  # with warnings as errors: torch says nothing of the order of calls
        assert amp.step_was_skipped(optimizer) == (i < skips)
        scheduler.step()


@WHEN
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_schedule_held_while_skipping_counts_only_real_steps(
    opt_level: str, is_first: bool
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    make = SCHEDULERS["LambdaLR"]
    scheduler = make(optimizer) if is_first else None
    amp.initialize(model, optimizer, opt_level=opt_level)
    scheduler = scheduler or make(optimizer)
    taken = 0
    for i in range(6):
        inputs, targets = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets) * 2.0**-8
        with amp.scale_loss(loss, optimizer) as scaled:
            (overflowing(scaled) if i in (0, 1, 3) else scaled).backward()
        optimizer.step()
        if not amp.step_was_skipped(optimizer):
            scheduler.step()
            taken += 1
        assert optimizer.param_groups[0]["lr"] == 1 / (1 + taken)
    assert taken == 3


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_scheduler_can_be_made_while_a_skip_is_pending(opt_level: str, name: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=opt_level)
    before = snapshot(model, optimizer)
    with amp.scale_loss(model(batch()[0]).sum(), optimizer) as scaled:
        overflowing(scaled).backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*epoch parameter.*", UserWarning)
        scheduler = SCHEDULERS[name](optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert_identical(snapshot(model, optimizer), before)
        scheduler.step()
    train_step(model, optimizer, batch(), factor=2.0**-8)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_plateau_is_seen(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    amp.initialize(model, optimizer, opt_level=opt_level)
    for _ in range(3):
        train_step(model, optimizer, batch(), factor=2.0**-8)
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.25


@pytest.mark.parametrize("opt_level", LEVELS)
def test_who_kept_a_parameter_group_goes_on_to_edit_the_living_one(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    amp.initialize(model, optimizer, opt_level=opt_level)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    group["lr"] = 0.0
    before = snapshot(model, optimizer)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    assert_identical(snapshot(model, optimizer)["model"], before["model"])


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_scheduler_survives_a_checkpoint_with_its_optimizer(opt_level: str) -> None:
    options = {"loss_scale": 128.0} if opt_level in SCALED_LEVELS else {}
    data = [batch() for _ in range(6)]

    def started() -> tuple[Any, Any, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        amp.initialize(model, optimizer, opt_level=opt_level, **options)
        return model, optimizer, lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def train(model: Any, optimizer: Any, scheduler: Any, data: list[Any]) -> None:
        for one in data:
            train_step(model, optimizer, one)
            scheduler.step()

    parts = started()
    train(*parts, data[:3])
    saved = copy.deepcopy([part.state_dict() for part in parts])
    train(*parts, data[3:])
    expected = snapshot(parts[0], parts[1])
    amp.uninitialize()
    parts = started()
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    train(*parts, data[3:])
    assert_identical(snapshot(parts[0], parts[1]), expected)


@WHEN
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_scheduler_goes_on_after_uninitialize(opt_level: str, is_first: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if is_first else None
    amp.initialize(model, optimizer, opt_level=opt_level)
    scheduler = scheduler or lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    scheduler.step()
    amp.uninitialize()
    model(batch()[0]).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.25
