"""Loops as people write them, each against the same loop in plain FP32 torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from injections import overflowing
from networks import (
    LEVELS,
    OPTIMIZERS,
    assert_identical,
    backward,
    gradients,
    snapshot,
    train_step,
)
from plain_torch import Loop, assert_trains_as_in_fp32, weights_of
from torch import nn

import amp_patch as amp

SCALED_LEVELS = ("O1", "O2")
BATCHES = 6
WIDE = amp.DynamicLossScale(initial=128.0)  # far from the range of float16 on both sides


def net(inputs: int = 6, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], 0.1, momentum=0.5)


def batch(inputs: int = 6, outputs: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, inputs), torch.randn(4, outputs)


def accumulating(library: Any, *, delays: bool = False, clips: bool = False, **options: Any) -> Any:
    model = net()
    optimizer = sgd(model)
    library.initialize(model, optimizer, **options)
    losses = []
    for i in range(2 * BATCHES):
        inputs, targets = batch()
        is_last = i % 3 == 2
        loss = F.mse_loss(model(inputs), targets) / 3
        with library.scale_loss(loss, optimizer, delay_unscale=delays and not is_last) as scaled:
            scaled.backward()
        losses.append(loss.item())
        if is_last:
            if clips:
                torch.nn.utils.clip_grad_norm_(library.master_params(optimizer), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return [model], losses


def delaying(library: Any, **options: Any) -> Any:
    return accumulating(library, delays=True, **options)


def delaying_then_clipping(library: Any, **options: Any) -> Any:
    return accumulating(library, delays=True, clips=True, **options)


def clipping_the_norm(library: Any, **options: Any) -> Any:
    return _clipping(library, lambda found: torch.nn.utils.clip_grad_norm_(found, 0.2), **options)


def clipping_values(library: Any, **options: Any) -> Any:
    return _clipping(library, lambda found: torch.nn.utils.clip_grad_value_(found, 0.05), **options)


def _clipping(library: Any, clip: Callable[[Any], object], **options: Any) -> Any:
    model = net()
    optimizer = sgd(model)
    library.initialize(model, optimizer, **options)
    losses = []
    for _ in range(BATCHES):
        inputs, targets = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        clip(library.master_params(optimizer))
        optimizer.step()
        losses.append(loss.item())
    return [model], losses


def several_losses(library: Any, **options: Any) -> Any:
    """Two losses with a scale of their own through one trunk, whose graph the first one keeps."""
    trunk, heads = net(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 1)])
    model = nn.ModuleList([trunk, heads])
    optimizer = sgd(model)
    library.initialize([trunk, *heads], optimizer, num_losses=2, **options)
    losses = []
    for _ in range(BATCHES):
        inputs, targets = batch()
        optimizer.zero_grad()
        hidden = trunk(inputs)
        first = F.mse_loss(heads[0](hidden), targets)
        second = heads[1](hidden).float().square().mean()
        with library.scale_loss(first, optimizer, loss_id=0) as scaled:
            scaled.backward(retain_graph=True)
        with library.scale_loss(second, optimizer, loss_id=1) as scaled:
            scaled.backward()
        optimizer.step()
        losses += [first.item(), second.item()]
    return [trunk, *heads], losses


def several_optimizers(library: Any, **options: Any) -> Any:
    models = [net(), net()]
    optimizers = [sgd(models[0]), torch.optim.SGD(models[1].parameters(), lr=0.2)]
    models, optimizers = library.initialize(models, optimizers, **options)
    losses = []
    for _ in range(BATCHES):
        inputs, targets = batch()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.mse_loss(models[0](inputs).float() + models[1](inputs).float(), targets)
        with library.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return models, losses


def one_optimizer_stepping_after_each_of_two_losses(library: Any, **options: Any) -> Any:
    model = net()
    optimizer = sgd(model)
    library.initialize(model, optimizer, num_losses=2, **options)
    losses = []
    for _ in range(BATCHES):
        for loss_id, weight in ((0, 1.0), (1, 0.25)):
            inputs, targets = batch()
            loss = F.mse_loss(model(inputs), targets) * weight
            with library.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return [model], losses


def adversaries_of_one_call(library: Any, **options: Any) -> Any:
    generator, critic = net(2, 6), net(6, 1)
    pair = [sgd(generator), sgd(critic)]
    library.initialize([generator, critic], pair, num_losses=3, **options)
    return _adversarial(library, generator, critic, pair, has_loss_ids=True)


def adversaries_of_two_calls(library: Any, **options: Any) -> Any:
    generator, critic = net(2, 6), net(6, 1)
    pair = [sgd(generator), sgd(critic)]
    library.initialize(generator, pair[0], **options)
    library.initialize(critic, pair[1], **options)
    return _adversarial(library, generator, critic, pair, has_loss_ids=False)


def _adversarial(
    library: Any, generator: nn.Module, critic: nn.Module, pair: list[Any], *, has_loss_ids: bool
) -> Any:
    ids = (0, 1, 2) if has_loss_ids else (0, 0, 0)
    losses = []
    for _ in range(BATCHES):
        real, noise = torch.randn(4, 6), torch.randn(4, 2)
        pair[1].zero_grad()
        fake = generator(noise)
        parts = ((real, 1.0, ids[0]), (fake.detach(), 0.0, ids[1]))
        for inputs, label, loss_id in parts:
            loss = _judged(critic, inputs, label)
            with library.scale_loss(loss, pair[1], loss_id=loss_id) as scaled:
                scaled.backward()
            losses.append(loss.item())
        pair[1].step()
        pair[0].zero_grad()
        loss = _judged(critic, fake, 1.0)
        with library.scale_loss(loss, pair[0], loss_id=ids[2]) as scaled:
            scaled.backward()
        pair[0].step()
        losses.append(loss.item())
    return [generator, critic], losses


def _judged(critic: nn.Module, inputs: torch.Tensor, label: float) -> torch.Tensor:
    found = critic(inputs)
    return F.binary_cross_entropy_with_logits(found, torch.full_like(found, label))


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 7, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.hidden(self.embed(tokens))))


def tied_weights(library: Any, **options: Any) -> Any:
    model = Tied()
    optimizer = sgd(model)
    library.initialize(model, optimizer, **options)
    assert model.decode.weight is model.embed.weight
    losses = []
    for _ in range(BATCHES):
        tokens = torch.randint(7, (4,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), (tokens + 1) % 7)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return [model], losses


def a_module_shared_by_two_models(library: Any, **options: Any) -> Any:
    trunk = nn.Linear(6, 6)
    models = [nn.Sequential(trunk, nn.Tanh(), nn.Linear(6, 3)) for _ in range(2)]
    parameters = [*models[0].parameters(), *models[1][2].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    library.initialize(models, optimizer, **options)
    losses = []
    for i in range(2 * BATCHES):
        inputs, targets = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(models[i % 2](inputs), targets)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return models, losses


def two_backward_passes_in_one_block(library: Any, **options: Any) -> Any:
    model = net()
    optimizer = sgd(model)
    library.initialize(model, optimizer, **options)
    losses = []
    for _ in range(BATCHES):
        inputs, targets = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward(retain_graph=True)
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return [model], losses


def truncated_backpropagation(library: Any, **options: Any) -> Any:
    """A hidden state goes on from batch to batch, detached."""
    cell, head = nn.RNNCell(3, 6), nn.Linear(6, 3)
    optimizer = sgd(cell, head)
    library.initialize([cell, head], optimizer, **options)
    hidden, losses = torch.zeros(4, 6), []
    for _ in range(BATCHES):
        optimizer.zero_grad()
        hidden, loss = hidden.detach(), torch.zeros(())
        for _ in range(2):
            inputs, targets = batch(3, 3)
            hidden = cell(inputs, hidden)
            loss = loss + F.mse_loss(head(hidden), targets)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return [cell, head], losses


def validating_between_steps(library: Any, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = sgd(model)
    library.initialize(model, optimizer, **options)
    held_out, losses = batch(), []
    for _ in range(BATCHES):
        model.train()
        inputs, targets = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(F.mse_loss(model(held_out[0]), held_out[1]).item())
    return [model], losses


LOOPS: dict[str, Loop] = {
    one.__name__.replace("_", "-"): one
    for one in (
        accumulating,
        delaying,
        delaying_then_clipping,
        clipping_the_norm,
        clipping_values,
        several_losses,
        several_optimizers,
        one_optimizer_stepping_after_each_of_two_losses,
        adversaries_of_one_call,
        adversaries_of_two_calls,
        tied_weights,
        a_module_shared_by_two_models,
        two_backward_passes_in_one_block,
        truncated_backpropagation,
        validating_between_steps,
    )
}


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_loop_trains_as_in_fp32(loop: Loop, opt_level: str) -> None:
    assert_trains_as_in_fp32(loop, opt_level)


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_loop_with_amp_disabled_is_plain_torch(loop: Loop, opt_level: str) -> None:
    torch.manual_seed(1)
    plain_models, plain_losses = loop(amp, enabled=False, opt_level=opt_level)
    torch.manual_seed(1)
    amp.uninitialize()
    models, losses = loop(amp, opt_level="O0", verbosity=0)
    assert losses == plain_losses
    assert_identical(weights_of(models), weights_of(plain_models))


# -- windows with an overflow ----------------------------------------------------------------------


def pair_at(opt_level: str, **options: Any) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return amp.initialize(model, optimizer, opt_level=opt_level, **options)


def window(
    model: nn.Module, optimizer: Any, batches: list[Any], bad: int | None, *, zeroes_first: bool
) -> None:
    if zeroes_first:
        optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(batches):
        loss = F.mse_loss(model(inputs), targets) / len(batches)
        backward(overflowing(loss) if i == bad else loss, optimizer)
    optimizer.step()
    if not zeroes_first:
        optimizer.zero_grad()


@pytest.mark.parametrize("zeroes_first", [True, False], ids=["zero-before", "zero-after"])
@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_one_micro_batch_drops_its_window_and_no_other(
    opt_level: str, bad: int, zeroes_first: bool
) -> None:
    windows = [[batch() for _ in range(4)] for _ in range(3)]
    model, optimizer = pair_at(opt_level, loss_scale=WIDE)
    start = weights_of([model])
    window(model, optimizer, windows[0], None, zeroes_first=zeroes_first)
    before = snapshot(model, optimizer)
    window(model, optimizer, windows[1], bad, zeroes_first=zeroes_first)
    assert amp.step_was_skipped(optimizer)
    assert_identical(snapshot(model, optimizer), before)
    window(model, optimizer, windows[2], None, zeroes_first=zeroes_first)
    found = snapshot(model, optimizer)
    amp.uninitialize()

    fresh, fresh_optimizer = pair_at(opt_level, loss_scale=WIDE)
    fresh.load_state_dict(dict(zip(fresh.state_dict(), start, strict=True)))
    for one in (windows[0], windows[2]):
        window(fresh, fresh_optimizer, one, None, zeroes_first=zeroes_first)
    assert_identical(found, snapshot(fresh, fresh_optimizer))


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_window_with_one_overflow_halves_the_scale_once(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, loss_scale=WIDE)
    window(model, optimizer, [batch() for _ in range(4)], 1, zeroes_first=True)
    assert amp.loss_scale() == 64.0


def weight_of_zero(opt_level: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One weight, of which the step takes the gradient; an overflow drops its micro-batch only."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"loss_scale": WIDE, "overflow_drops": "micro_batch", **options}
    amp.initialize(model, optimizer, opt_level=opt_level, **options)
    model.load_state_dict({"weight": torch.zeros(1, 1)})
    return model, optimizer


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_dropping_only_the_micro_batch_lets_the_others_stand_for_it(
    opt_level: str, bad: int
) -> None:
    model, optimizer = weight_of_zero(opt_level)
    parts = [1.0, 2.0, 4.0, 8.0]
    for i, part in enumerate(parts):
        loss = model(torch.ones(1, 1)).float().sum() * part
        backward(overflowing(loss) if i == bad else loss, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    kept = sum(part for i, part in enumerate(parts) if i != bad)
    expected = torch.tensor(kept) * torch.tensor(4 / 3)  # as FP32 rounds it
    assert -model.state_dict()["weight"].item() == pytest.approx(expected.item(), rel=2.0**-22)


@pytest.mark.parametrize("order", ["1 bad 2, 4", "1 bad 2,", "bad 2,", "2, bad 1"])
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O4", "O5"])
def test_blocks_of_a_loss_that_is_not_scaled_stand_for_a_dropped_one_too(
    opt_level: str, order: str
) -> None:
    model, optimizer = weight_of_zero(opt_level, num_losses=2, loss_scale=[WIDE, 1.0])
    kept = []
    for part in order.split():  # a comma marks what belongs to the loss that is not scaled
        is_bad = part == "bad"
        kept += [] if is_bad else [float(part.rstrip(","))]
        loss = model(torch.ones(1, 1)).float().sum()
        loss = overflowing(loss) if is_bad else loss * kept[-1]
        with amp.scale_loss(loss, optimizer, loss_id=int(part.endswith(","))) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    expected = torch.tensor(sum(kept)) * torch.tensor((len(kept) + 1) / len(kept))
    assert -model.state_dict()["weight"].item() == pytest.approx(expected.item(), rel=2.0**-22)


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1.0}, {"loss_scale": 64.0}], ids=str)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_gradients_that_a_block_leaves_with_another_optimizer_are_added_to(
    opt_level: str, options: dict[str, Any]
) -> None:
    made, judged = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    first, second = (torch.optim.SGD(one.parameters(), lr=0.0) for one in (made, judged))
    models = amp.initialize([made, judged], [first, second], opt_level=opt_level, **options)[0]
    for model in models:
        model.load_state_dict({"weight": torch.ones(1, 1)})
    fake = made(torch.ones(1, 1))
    backward(judged(fake).float().sum() / 4, first)  # leaves 0.25 with the other optimizer
    first.step()
    backward(judged(fake.detach()).float().sum() / 4, second)
    assert [p.grad.item() for p in amp.master_params(second)] == [0.5]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_blocks_that_are_made_before_they_are_entered_are_refused_as_others(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, num_losses=2, loss_scale=[1024.0, 1.0])
    losses = [model(batch()[0]).float().sum() for _ in range(2)]
    outer, inner = (amp.scale_loss(loss, optimizer, loss_id=i) for i, loss in enumerate(losses))
    with outer, pytest.raises(amp.AmpError, match="one block at a time"), inner:
        pytest.fail("a block inside a block was entered")


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_clip_sees_what_the_step_uses_where_a_micro_batch_was_dropped(
    opt_level: str, bad: int
) -> None:
    model, optimizer = weight_of_zero(opt_level)
    for i in range(4):
        loss = model(torch.ones(1, 1)).float().sum()
        backward(overflowing(loss) if i == bad else loss, optimizer)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    assert norm.item() == pytest.approx(4.0, rel=2.0**-22)
    optimizer.step()
    assert -model.state_dict()["weight"].item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_window_in_which_every_micro_batch_overflows_is_skipped(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, overflow_drops="micro_batch")
    train_step(model, optimizer, batch(), factor=2.0**-8)
    before = snapshot(model, optimizer)
    for _ in range(3):
        inputs, targets = batch()
        backward(overflowing(F.mse_loss(model(inputs), targets)), optimizer)
    assert amp.step_will_be_skipped(optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_identical(snapshot(model, optimizer), before)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_the_weight_of_a_dropped_micro_batch_does_not_reach_the_next_window(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, loss_scale=WIDE, overflow_drops="micro_batch")
    window(model, optimizer, [batch() for _ in range(4)], 2, zeroes_first=True)
    batches = [batch() for _ in range(4)]
    start, before = weights_of([model]), snapshot(model, optimizer)["state"]
    window(model, optimizer, batches, None, zeroes_first=True)
    found = weights_of([model])
    amp.uninitialize()
    fresh, other = pair_at(opt_level, loss_scale=WIDE)
    fresh.load_state_dict(dict(zip(fresh.state_dict(), start, strict=True)))
    for parameter, state in zip(amp.master_params(other), before, strict=True):
        other.state[parameter] = state
    window(fresh, other, batches, None, zeroes_first=True)
    assert_identical(found, weights_of([fresh]))


@pytest.mark.parametrize("drops", ["window", "micro_batch"])
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_is_forgotten_when_the_user_leaves_the_step_out(
    opt_level: str, drops: str
) -> None:
    model, optimizer = pair_at(opt_level, overflow_drops=drops)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}})
    backward(overflowing(model(batch()[0]).sum()), optimizer)
    assert amp.step_will_be_skipped(optimizer)
    optimizer.zero_grad()
    assert not amp.step_will_be_skipped(optimizer)
    train_step(model, optimizer, batch())
    assert not amp.step_was_skipped(optimizer)


# -- clipping at the wrong moment ------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_clipping_inside_a_delayed_window_is_reported(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, loss_scale=128.0)
    backward(model(batch()[0]).sum(), optimizer, delay_unscale=True)
    with pytest.warns(amp.AmpWarning, match="still multiplied by the loss scale; clip after"):
        list(amp.master_params(optimizer))


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_clipping_inside_the_block_is_reported(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, loss_scale=128.0)
    with amp.scale_loss(model(batch()[0]).sum(), optimizer) as scaled:
        scaled.backward()
        with pytest.warns(amp.AmpWarning, match="clip after the scale_loss block"):
            list(amp.master_params(optimizer))


@pytest.mark.parametrize("opt_level", LEVELS)
def test_clipping_before_the_first_backward_is_safe(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    dtype = torch.float16 if opt_level == "O3" else torch.float32
    assert {p.dtype for p in amp.master_params(optimizer)} == {dtype}
    before = snapshot(model, optimizer)
    optimizer.step()
    optimizer.state_dict()
    assert_identical(snapshot(model, optimizer), before)


# -- which optimizers skip together ----------------------------------------------------------------


def adversaries(opt_level: str, **options: Any) -> tuple[list[nn.Module], list[Any]]:
    models = [net(), net()]
    optimizers = [OPTIMIZERS["adam"](model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level=opt_level, num_losses=2, **options)
    for name in amp.state_dict():
        assert name.startswith("loss_scaler")
    return models, optimizers


@pytest.mark.parametrize("hit", [0, 1])
@pytest.mark.parametrize("together", [True, False], ids=["together", "each-by-itself"])
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_optimizers_of_one_block_skip_together_or_each_by_its_own_gradients(
    opt_level: str, together: bool, hit: int
) -> None:
    models, optimizers = adversaries(opt_level, skip_together=together, loss_scale=WIDE)
    before = [snapshot(*pair) for pair in zip(models, optimizers, strict=True)]
    inputs, targets = batch()
    losses = [F.mse_loss(model(inputs), targets) for model in models]
    losses[hit] = overflowing(losses[hit])
    backward(losses[0] + losses[1], optimizers)
    for optimizer in optimizers:
        optimizer.step()
    skipped = [amp.step_was_skipped(optimizer) for optimizer in optimizers]
    assert skipped == [together or i == hit for i in range(2)]
    for i, pair in enumerate(zip(models, optimizers, strict=True)):
        if skipped[i]:
            assert_identical(snapshot(*pair), before[i])
        else:
            assert not torch.equal(snapshot(*pair)["updated"][0], before[i]["updated"][0])


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_optimizer_of_another_block_is_not_touched_by_an_overflow(opt_level: str) -> None:
    models, optimizers = adversaries(opt_level, loss_scale=WIDE)
    inputs, targets = batch()
    backward(F.mse_loss(models[0](inputs), targets), optimizers[0], loss_id=0)
    backward(overflowing(F.mse_loss(models[1](inputs), targets)), optimizers[1], loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True]


class Shared(nn.Module):
    """Two heads on one layer, with an optimizer for each head that also updates the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor, is_trunk_fixed: bool) -> list[torch.Tensor]:
        hidden = self.trunk(x)
        hidden = hidden.detach() if is_trunk_fixed else hidden
        return [head(hidden).float().sum() for head in self.heads]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD([*self.trunk.parameters(), *head.parameters()], lr=0.1)
            for head in self.heads
        ]


@pytest.mark.parametrize("is_in_trunk", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("are_both_listed", [True, False], ids=["both", "first"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "each-by-itself"])
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_a_shared_layer_skips_every_optimizer_that_holds_it(
    opt_level: str, together: bool, are_both_listed: bool, is_in_trunk: bool
) -> None:
    model = Shared()
    first, second = model.optimizers()
    options = {"skip_together": together, "loss_scale": WIDE}
    amp.initialize(model, [first, second], opt_level=opt_level, **options)
    losses = model(batch()[0], is_trunk_fixed=not is_in_trunk)
    backward(overflowing(losses[0]) + losses[1], [first, second] if are_both_listed else first)
    second.step()  # the one that does not own the gradients goes first
    first.step()
    assert amp.step_was_skipped(first)
    is_told = is_in_trunk or (together and are_both_listed)
    assert amp.step_was_skipped(second) == is_told
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# -- details ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_delayed_window_with_two_optimizers_equals_an_undelayed_one(opt_level: str) -> None:
    batches = [batch() for _ in range(4)]
    found = []
    for delays in (False, True):
        torch.manual_seed(3)
        models, optimizers = adversaries(opt_level, loss_scale=128.0)
        for i, (inputs, targets) in enumerate(batches):
            loss = F.mse_loss(models[0](inputs).float() + models[1](inputs).float(), targets)
            backward(loss, optimizers, delay_unscale=delays and i < 3)
        found.append([gradients(optimizer) for optimizer in optimizers])
        amp.uninitialize()
    # O2 sums a delayed window in half, so that it agrees within a few roundings of half.
    torch.testing.assert_close(found[1], found[0], rtol=2.0**-8, atol=2.0**-10)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_scale_that_changes_inside_a_delayed_window_does_not_spoil_it(opt_level: str) -> None:
    """Another optimizer with the same loss overflows meanwhile, and the scale halves."""
    models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level=opt_level, loss_scale=WIDE)
    ones = torch.ones(1, 1)
    backward(models[0](ones).float().sum(), optimizers[0], delay_unscale=True)
    backward(overflowing(models[1](ones).float().sum()), optimizers[1])
    optimizers[1].step()
    backward(models[0](ones).float().sum() * 2, optimizers[0], delay_unscale=True)
    backward(models[0](ones).float().sum() * 4, optimizers[0])
    assert gradients(optimizers[0])[0].item() == 7.0


@pytest.mark.parametrize("raises", [False, True], ids=["", "exception"])
@pytest.mark.parametrize("scales", [[64.0, 1024.0], [1024.0, 1.0]], ids=repr)
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_block_of_another_optimizer_adds_to_a_delayed_window_what_fp32_would(
    opt_level: str, scales: list[float], raises: bool
) -> None:
    """The generator's loss reaches a critic whose gradients have the scale of its own loss."""
    generator, critic = (nn.Linear(1, 1, bias=False) for _ in range(2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (generator, critic)]
    models = [generator, critic]
    amp.initialize(models, optimizers, opt_level=opt_level, num_losses=2, loss_scale=scales)
    ones = torch.ones(1, 1)
    expected = 0.0
    for i in range(3):
        backward(critic(ones).float().sum(), optimizers[1], loss_id=0, delay_unscale=i < 2)
        expected += 1.0
        loss = critic(generator(ones)).float().sum()
        if raises:
            with pytest.raises(KeyError), amp.scale_loss(loss, optimizers[0], loss_id=1) as scaled:
                scaled.backward()
                raise KeyError
        else:
            backward(loss, optimizers[0], loss_id=1)
            expected += generator.weight.item()
    # Sums in half, which O2 makes inside of a delayed window, round five times.
    assert gradients(optimizers[1])[0].item() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_parameter_shared_with_a_delayed_window_is_refused_in_a_block_of_its_own(
    opt_level: str,
) -> None:
    model = Shared()
    first, second = model.optimizers()
    amp.initialize(model, [first, second], opt_level=opt_level, loss_scale=WIDE)
    losses = model(batch()[0], is_trunk_fixed=False)
    with amp.scale_loss(losses[0], first, delay_unscale=True) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    with pytest.raises(amp.AmpError, match="expected both optimizers in every block"):
        backward(losses[1], second)
    backward(losses[1], [first, second])
    first.step()


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_loading_a_scale_inside_a_delayed_window_does_not_spoil_it(opt_level: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=WIDE)
    ones = torch.ones(1, 1)
    backward(model(ones).float().sum(), optimizer, delay_unscale=True)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 16.0, "unskipped": 0}})
    backward(model(ones).float().sum() * 2, optimizer)
    assert gradients(optimizer)[0].item() == 3.0


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_partners_of_two_calls_overflow_apart(opt_level: str) -> None:
    pairs = [pair_at(opt_level, loss_scale=WIDE) for _ in range(2)]
    inputs, targets = batch()
    before = snapshot(*pairs[0])
    for i, (model, optimizer) in enumerate(pairs):
        loss = F.mse_loss(model(inputs), targets)
        backward(loss if i else overflowing(loss), optimizer)
    for _, optimizer in pairs:
        optimizer.step()
    assert [amp.step_was_skipped(optimizer) for _, optimizer in pairs] == [True, False]
    assert [amp.loss_scale(0), amp.loss_scale(1)] == [128.0, 64.0]  # the newest call comes first
    assert_identical(snapshot(*pairs[0]), before)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_the_same_loss_may_go_through_two_blocks(opt_level: str) -> None:
    models, optimizers = adversaries(opt_level, loss_scale=128.0)
    inputs, targets = batch()
    loss = F.mse_loss(models[0](inputs).float() + models[1](inputs).float(), targets)
    with amp.scale_loss(loss, optimizers[0], loss_id=0) as scaled:
        scaled.backward(retain_graph=True, inputs=list(models[0].parameters()))
    with amp.scale_loss(loss, optimizers[1], loss_id=1) as scaled:
        scaled.backward(inputs=list(models[1].parameters()))
    apart = [gradients(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.mse_loss(models[0](inputs).float() + models[1](inputs).float(), targets)
    backward(loss, optimizers)
    assert_identical([gradients(optimizer) for optimizer in optimizers], apart)


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float64": lambda out: out.double().sum(),
    "half, which scaled is above the range of half": lambda out: (
        out.half().sum() * 0 + 2000.0 + out.half().sum()
    ),
    "vector": lambda out: out.float().sum(1),
    "view": lambda out: out.float().sum().view(1),
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_losses_of_any_dtype_and_shape_are_scaled_without_overflow(
    opt_level: str, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=8192.0)
    loss = loss_of(model(torch.ones(1, 2)))
    with amp.scale_loss(loss, optimizer) as scaled:
        wide = torch.float64 if loss.dtype is torch.float64 else torch.float32
        assert scaled.dtype is wide
        assert scaled.shape == loss.shape
        assert torch.equal(scaled, loss.to(wide) * 8192.0)
        scaled.backward(gradient=torch.ones_like(scaled))
    assert gradients(optimizer)[0].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.5, "loss: expected a floating-point tensor, found float 1.5"),
        (None, "loss: expected a floating-point tensor, found NoneType"),
        (torch.ones(()), "loss: expected a tensor that requires grad"),
        (torch.ones((), dtype=torch.int64), "loss: expected a floating-point tensor"),
    ],
    ids=["float", "none", "detached", "integer"],
)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_what_is_no_loss_is_refused_with_a_reason(opt_level: str, loss: Any, message: str) -> None:
    _, optimizer = pair_at(opt_level)
    with pytest.raises(amp.AmpError, match=message), amp.scale_loss(loss, optimizer):
        pytest.fail("the block was entered")


@pytest.mark.parametrize("kind", ["tensor hook", "post-accumulate hook"])
def test_hooks_of_the_user_find_the_scale_by_which_their_gradient_is_multiplied(kind: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
    seen = []
    if kind == "tensor hook":
        model.weight.register_hook(lambda g: seen.append(g.item() / amp.loss_scale()))
    else:
        model.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.item() / amp.loss_scale())
        )
    backward(model(torch.ones(1, 1)).sum() * 3.0, optimizer)
    assert seen == [3.0]


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_optimizer_that_steps_inside_of_backward_is_refused(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, loss_scale=128.0)
    before = snapshot(model, optimizer)
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(amp.AmpError, match="still multiplied by the loss scale"):
        backward(model(batch()[0]).sum(), optimizer)
    hook.remove()
    assert_identical(snapshot(model, optimizer), before)
    train_step(model, optimizer, batch())


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_interrupted_block_can_be_followed_by_a_clean_window(opt_level: str) -> None:
    batches = [batch() for _ in range(3)]
    found = []
    for interrupts in (False, True):
        torch.manual_seed(3)
        model, optimizer = pair_at(opt_level, loss_scale=128.0)
        backward(F.mse_loss(model(batches[0][0]), batches[0][1]), optimizer)
        if interrupts:
            with (
                pytest.raises(MemoryError),
                amp.scale_loss(model(batches[1][0]).sum(), optimizer) as scaled,
            ):
                scaled.backward()
                raise MemoryError
        backward(F.mse_loss(model(batches[2][0]), batches[2][1]), optimizer)
        optimizer.step()
        found.append(snapshot(model, optimizer))
        amp.uninitialize()
    assert_identical(found[1], found[0])


def test_an_optimizer_that_is_listed_twice_is_named() -> None:
    model, optimizer = pair_at("O1")
    loss = model(batch()[0]).sum()
    with pytest.raises(amp.AmpError, match=r"optimizers: .* one of them twice: the .* at 0 and 1"):
        amp.scale_loss(loss, [optimizer, optimizer])
