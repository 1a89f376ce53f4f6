"""A skipped step leaves no trace: weights, state, counts, statistics, gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from injections import overflowing
from networks import assert_identical, backward, state_of
from torch import nn

import amp_patch as amp

SCALED: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O0-dynamic": {"opt_level": "O0", "loss_scale": "dynamic"},
    "O3-dynamic": {"opt_level": "O3", "loss_scale": "dynamic"},
    "O4-dynamic": {"opt_level": "O4", "loss_scale": "dynamic"},
    "O5-dynamic": {"opt_level": "O5", "loss_scale": "dynamic"},
}
OPTIONS = pytest.mark.parametrize("options", SCALED.values(), ids=SCALED)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "Adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, fused=True),
    "AdamW-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}


class Normed(nn.Module):
    """One of each layer with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.instance_norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.cumulative = nn.BatchNorm1d(4, momentum=None)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.batch_norm(self.first(x))
        x = self.instance_norm(x.unsqueeze(-1).expand(-1, -1, 3)).mean(-1)
        return self.head(self.cumulative(x))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def everything(model: nn.Module, optimizer: Any) -> Any:
    """All that training has made: weights, masters, buffers, state, counts, checkpoints."""
    return copy.deepcopy(
        {
            "tensors": [t.detach() for t in (*model.parameters(), *model.buffers())],
            "masters": [t.detach() for t in amp.master_params(optimizer)],
            "state": state_of(optimizer),
            "checkpoint": dict(model.state_dict()),
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ],
        }
    )


def iterate(
    model: nn.Module, optimizer: Any, *, fault: float | None = None, one: Any = None
) -> None:
    inputs, targets = one or batch()
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets) * 2.0**-8
    backward(loss if fault is None else overflowing(loss, fault), optimizer)
    optimizer.step()


@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
@OPTIONS
def test_every_optimizer_is_bit_identical_after_a_skipped_step(
    options: dict[str, Any], factory: Callable[[Any], Any], fault: float
) -> None:
    model = Normed()
    optimizer = factory(model.parameters())
    amp.initialize(model, optimizer, **options)
    for _ in range(2):
        iterate(model, optimizer)
        assert not amp.step_was_skipped(optimizer)
    before, scale = everything(model, optimizer), amp.loss_scale()
    for _ in range(2):
        iterate(model, optimizer, fault=fault)
        assert amp.step_was_skipped(optimizer)
        assert_identical(everything(model, optimizer), before)
    assert amp.loss_scale() == scale / 4
    iterate(model, optimizer)
    assert not amp.step_was_skipped(optimizer)


@OPTIONS
def test_a_skipped_first_step_makes_no_optimizer_state(options: dict[str, Any]) -> None:
    model = Normed()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    amp.initialize(model, optimizer, **options)
    before = everything(model, optimizer)
    iterate(model, optimizer, fault=math.inf)
    assert_identical(everything(model, optimizer), before)
    assert not optimizer.state_dict()["state"]


@OPTIONS
def test_statistics_of_norms_are_those_of_the_steps_that_were_taken(
    options: dict[str, Any],
) -> None:
    batches, found = [batch() for _ in range(4)], []
    for has_faults in (True, False):
        torch.manual_seed(1)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        amp.initialize(model, optimizer, **options)
        for i, one in enumerate(batches):
            if has_faults and i in (0, 2):
                iterate(model, optimizer, fault=math.inf)
            iterate(model, optimizer, one=one)
        found.append(copy.deepcopy(list(model.buffers())))
        amp.uninitialize()
    assert_identical(found[0], found[1])


@OPTIONS
def test_a_forward_that_is_not_finite_leaves_statistics_as_they_were(
    options: dict[str, Any],
) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, **options)
    iterate(model, optimizer)
    before = everything(model, optimizer)
    inputs, targets = batch()
    inputs[1, 2] = math.inf
    optimizer.zero_grad()
    with pytest.warns(amp.AmpWarning, match="the loss itself is inf or NaN"):
        backward(F.mse_loss(model(inputs), targets), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_identical(everything(model, optimizer), before)
    assert all(t.isfinite().all() for t in model.buffers())


@OPTIONS
def test_statistics_of_a_window_go_back_to_before_its_first_forward(
    options: dict[str, Any],
) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, **options)
    iterate(model, optimizer)
    before = everything(model, optimizer)
    optimizer.zero_grad()
    for i in range(3):
        inputs, targets = batch()
        loss = F.mse_loss(model(inputs), targets) * 2.0**-8
        backward(overflowing(loss) if i == 1 else loss, optimizer)
    optimizer.step()
    assert_identical(everything(model, optimizer), before)


@OPTIONS
def test_a_validation_between_overflow_and_step_sees_weights_and_changes_nothing(
    options: dict[str, Any],
) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, **options)
    iterate(model, optimizer)
    before = everything(model, optimizer)
    inputs, targets = batch()
    optimizer.zero_grad()
    backward(overflowing(F.mse_loss(model(inputs), targets)), optimizer)
    with torch.no_grad():
        model.eval()
        assert model(inputs).isfinite().all()
        model.train()
    optimizer.step()
    assert_identical(everything(model, optimizer), before)


@OPTIONS
def test_gradients_accumulated_before_an_overflow_are_gone_with_it(
    options: dict[str, Any],
) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, **options)
    for fault in (1.0, math.inf, 1.0):
        backward(overflowing(model(torch.ones(1, 1)).float().sum() * 2.0**-4, fault), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert all(p.grad is None for p in amp.master_params(optimizer))
    backward(model(torch.ones(1, 1)).float().sum() * 0.5, optimizer)
    (master,) = amp.master_params(optimizer)
    assert master.grad.item() == 0.5


@OPTIONS
def test_random_numbers_are_drawn_alike_with_and_without_a_skip(options: dict[str, Any]) -> None:
    drawn = []
    for fault in (None, math.inf):
        torch.manual_seed(1)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, **options)
        iterate(model, optimizer, fault=fault)
        drawn.append(torch.rand(1).item())
        amp.uninitialize()
    assert drawn[0] == drawn[1]


@OPTIONS
def test_statistics_of_a_model_whose_optimizer_did_not_skip_are_kept(
    options: dict[str, Any],
) -> None:
    models = [Normed(), Normed()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, num_losses=2, **options)
    before = [copy.deepcopy(list(model.buffers())) for model in models]
    inputs, targets = batch()
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        loss = F.mse_loss(model(inputs), targets) * 2.0**-8
        backward(overflowing(loss) if i else loss, optimizer, loss_id=i)
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True]
    assert_identical(list(models[1].buffers()), before[1])
    assert not torch.equal(models[0].batch_norm.running_mean, before[0][0])


@OPTIONS
def test_a_skip_is_told_of_until_the_next_step(options: dict[str, Any]) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, **options)
    assert not amp.step_was_skipped(optimizer)
    assert not amp.step_will_be_skipped(optimizer)
    inputs, targets = batch()
    backward(overflowing(F.mse_loss(model(inputs), targets)), optimizer)
    assert amp.step_will_be_skipped(optimizer)
    assert not amp.step_was_skipped(optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert not amp.step_will_be_skipped(optimizer)
    iterate(model, optimizer)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_huge_finite_gradient_at_a_static_scale_is_skipped_before_it_spoils_the_weights(
    opt_level: str,
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=65536.0)
    before = everything(model, optimizer)
    with pytest.warns(amp.AmpWarning, match="gradients are inf or NaN at loss scale 65536"):
        backward(model(torch.ones(1, 2)).float().sum() * 1e4, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert amp.loss_scale() == 65536.0
    assert_identical(everything(model, optimizer), before)


def statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("bad", [0, 1, 2])
@OPTIONS
def test_a_dropped_micro_batch_leaves_no_statistics(options: dict[str, Any], bad: int) -> None:
    batches, found = [batch() for _ in range(3)], []
    for has_fault in (True, False):
        torch.manual_seed(1)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        amp.initialize(model, optimizer, overflow_drops="micro_batch", **options)
        for i, (inputs, targets) in enumerate(batches):
            loss = F.mse_loss(model(inputs), targets) * 2.0**-8 if has_fault or i != bad else None
            if loss is not None:
                backward(overflowing(loss) if i == bad else loss, optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        found.append(statistics(model))
        amp.uninitialize()
    assert_identical(found[0], found[1])


@OPTIONS
def test_forwards_of_a_window_that_come_before_its_blocks_leave_finite_statistics(
    options: dict[str, Any],
) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, overflow_drops="micro_batch", **options)
    losses = []
    for i in range(2):
        inputs, targets = batch()
        losses.append(F.mse_loss(model(inputs * (math.inf if i else 1)), targets))
    backward(losses[0] * 2.0**-8, optimizer)
    with pytest.warns(amp.AmpWarning, match="the loss itself is inf or NaN"):
        backward(losses[1], optimizer)
    optimizer.step()
    assert all(buffer.isfinite().all() for buffer in model.buffers())


@OPTIONS
def test_a_skip_leaves_the_graph_of_another_loss_usable(options: dict[str, Any]) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, **options)
    losses = [F.mse_loss(model(inputs), targets) for inputs, targets in (batch(), batch())]
    backward(overflowing(losses[0]), optimizer)
    optimizer.step()
    backward(losses[1] * 2.0**-8, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("has_own_call", [True, False])
@OPTIONS
def test_a_skip_leaves_no_statistics_that_are_not_finite_in_any_model_of_the_forward(
    options: dict[str, Any], has_own_call: bool, has_optimizer: bool, has_gradients: bool
) -> None:
    """A critic after a generator, or a network with frozen weights."""
    generator, critic = nn.Linear(6, 6), Normed()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, critic)]
    if not has_optimizer:
        critic.requires_grad_(False)
    models = [generator, critic]
    chosen = optimizers if has_optimizer else optimizers[:1]
    if has_own_call:
        amp.initialize(generator, optimizers[0], **options)
        amp.initialize(critic, optimizers[1] if has_optimizer else None, **options)
    else:
        amp.initialize(models, chosen, **options)
    before = statistics(critic)
    made = generator(torch.full((4, 6), math.inf))
    with torch.set_grad_enabled(has_gradients):
        loss = critic(made).float().mean()
    with pytest.warns(amp.AmpWarning, match="the loss itself is inf or NaN"):
        backward(loss + made.float().mean(), optimizers[0])
    optimizers[0].step()
    assert amp.step_was_skipped(optimizers[0])
    assert_identical(statistics(critic), before)


@pytest.mark.parametrize("part", ["", "batch_norm"])
@OPTIONS
def test_statistics_that_were_loaded_are_those_that_a_skip_goes_back_to(
    options: dict[str, Any], part: str
) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, **options)
    module = model.get_submodule(part)
    values = {name: value.clone() for name, value in module.state_dict().items()}
    values = {k: v.fill_(7) if "running_mean" in k else v for k, v in values.items()}
    model(batch()[0])  # a training forward without a step
    module.load_state_dict(values)
    inputs, targets = batch()
    with pytest.warns(amp.AmpWarning, match="the loss itself is inf or NaN"):
        backward(F.mse_loss(model(inputs * math.inf), targets), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert torch.equal(model.batch_norm.running_mean, torch.full((4,), 7.0))
    assert all(buffer.isfinite().all() for buffer in model.buffers())
