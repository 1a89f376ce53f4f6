"""The loops people write: accumulation, several optimizers and losses, closures, schedulers."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import (
    LEVELS,
    MASTER_LEVELS,
    OPTIMIZERS,
    ROUNDING_UNIT,
    OptimizerFactory,
    assert_identical,
    backward,
    gradients,
    mlp,
    snapshot,
    state_of,
    train_step,
    with_gradient_times,
)
from torch import nn

import amp_patch as amp

SCALED_LEVELS = ("O1", "O2")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def scale_for(opt_level: str) -> dict[str, Any]:
    """No overflow in the first steps."""
    return {"loss_scale": 128.0} if opt_level in SCALED_LEVELS else {}


def pair_at(
    opt_level: str, factory: OptimizerFactory = OPTIMIZERS["sgd"], **options: Any
) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = factory(model.parameters())
    return amp.initialize(model, optimizer, opt_level=opt_level, **options)


def set_scale(scale: float) -> None:
    amp.load_state_dict({name: {"loss_scale": scale, "unskipped": 0} for name in amp.state_dict()})


def fp64_gradients(
    models: Iterable[nn.Module], loss_of: Callable[..., torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Gradients at the FP32 values of `models`, in FP64, where no cast takes part."""
    twins = []
    for model in models:
        twin = mlp_like(model)
        twin.load_state_dict(model.state_dict())
        twins.append(twin.double())
    parameters = [list(twin.parameters()) for twin in twins]
    with amp.disable_casts():
        flat = torch.autograd.grad(loss_of(*twins), [p for one in parameters for p in one])
    found = iter(flat)
    return [[next(found) for _ in one] for one in parameters]


def mlp_like(model: nn.Module) -> nn.Module:
    """Other weights in the same shape: what a copy would bring along of ours is not in it."""
    sizes = [(layer.in_features, layer.out_features) for layer in list(model.children())[::2]]
    linears = [nn.Linear(*size) for size in sizes]
    return nn.Sequential(*[part for linear in linears for part in (linear, nn.Tanh())][:-1])


def assert_near(
    found: list[torch.Tensor], expected: list[torch.Tensor], half_dtype: torch.dtype, depth: int
) -> None:
    """Six roundings an operation on a path of `depth` (see test_gradient_oracles)."""
    difference = [(a.double() - b).flatten() for a, b in zip(found, expected, strict=True)]
    error = torch.cat(difference).norm() / torch.cat([b.flatten() for b in expected]).norm()
    assert error <= math.sqrt(6 * depth) * ROUNDING_UNIT[half_dtype]


# -- accumulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
def test_gradients_of_several_blocks_add_up(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, **scale_for(opt_level))
    batches = [batch() for _ in range(4)]
    alone = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        backward(F.mse_loss(model(inputs), targets), optimizer)
        alone.append(gradients(optimizer))
    optimizer.zero_grad()
    for inputs, targets in batches:
        backward(F.mse_loss(model(inputs), targets), optimizer)
    totals = [sum(parts[1:], parts[0]) for parts in zip(*alone, strict=True)]
    assert_identical(gradients(optimizer), totals)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_blocks_accumulate_in_fp32_also_where_the_scale_changes_between_them(
    opt_level: str,
) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level)
    for scale, gradient in ((64.0, 1.0), (1024.0, 2.0**-12), (8.0, 2.0**-12)):
        set_scale(scale)
        backward(model(torch.ones(1, 1)).float().sum() * gradient, optimizer)
    assert gradients(optimizer)[0].item() == 1.0 + 2.0**-11  # 1 + 2^-12 is 1 in float16


@pytest.mark.parametrize("opt_level", LEVELS)
def test_accumulated_training_agrees_with_fp64(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, **scale_for(opt_level))
    batches = [batch() for _ in range(3)]
    ((expected),) = fp64_gradients(
        [model],
        lambda twin: sum(F.mse_loss(twin(x.double()), y.double()) for x, y in batches),
    )
    for inputs, targets in batches:
        backward(F.mse_loss(model(inputs), targets), optimizer)
    half_dtype = torch.float32 if opt_level == "O0" else amp.OPT_LEVELS[opt_level].half_dtype
    assert_near(gradients(optimizer), expected, half_dtype, depth=3)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_gradients_that_were_there_before_initialize_are_added_to(opt_level: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 1)).sum().backward()
    amp.initialize(model, optimizer, opt_level=opt_level)
    backward(model(torch.ones(1, 1)).sum() * 0.25, optimizer)
    assert gradients(optimizer)[0].item() == 1.25


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_delayed_window_ends_with_the_sum_of_its_blocks(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, loss_scale=128.0)
    batches = [batch() for _ in range(3)]
    ((expected),) = fp64_gradients(
        [model],
        lambda twin: sum(F.mse_loss(twin(x.double()), y.double()) for x, y in batches),
    )
    for i, (inputs, targets) in enumerate(batches):
        loss = F.mse_loss(model(inputs), targets)
        backward(loss, optimizer, delay_unscale=i < 2)
    assert_near(gradients(optimizer), expected, torch.float16, depth=3)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_delayed_window_adds_to_what_was_accumulated_before_it(opt_level: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, **scale_for(opt_level))
    for factor, is_delayed in ((1.0, False), (2.0, True), (4.0, True), (8.0, False)):
        loss = model(torch.ones(1, 1)).sum() * factor
        backward(loss, optimizer, delay_unscale=is_delayed)
    assert gradients(optimizer)[0].item() == 15.0


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
@pytest.mark.parametrize("overflows_at", [0, 1, 2])
def test_an_overflow_in_any_block_of_a_delayed_window_skips_the_step(
    opt_level: str, overflows_at: int
) -> None:
    model, optimizer = pair_at(opt_level)
    set_scale(128.0)
    train_step(model, optimizer, batch())
    before = snapshot(model, optimizer)
    for i in range(3):
        inputs, targets = batch()
        factor = math.inf if i == overflows_at else 1.0
        backward(
            with_gradient_times(F.mse_loss(model(inputs), targets), factor),
            optimizer,
            delay_unscale=i < 2,
        )
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert amp.loss_scale() == 64.0
    assert_identical(snapshot(model, optimizer), before)
    train_step(model, optimizer, batch())
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_step_inside_a_delayed_window_is_refused(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, loss_scale=128.0)
    before = snapshot(model, optimizer)
    backward(model(batch()[0]).sum(), optimizer, delay_unscale=True)
    with pytest.raises(amp.AmpError, match="still multiplied by the loss scale"):
        optimizer.step()
    assert_identical(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    train_step(model, optimizer, batch())


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
@pytest.mark.parametrize("ends_with_check", [False, True], ids=["step", "block"])
@pytest.mark.parametrize("factor", [1.0, math.inf], ids=["clean", "overflow"])
def test_a_delayed_overflow_check_is_made_by_a_later_block_or_by_the_step(
    opt_level: str, ends_with_check: bool, factor: float
) -> None:
    model, optimizer = pair_at(opt_level)
    set_scale(128.0)
    before = snapshot(model, optimizer)
    loss = F.mse_loss(model(batch()[0]), batch()[1])
    backward(with_gradient_times(loss, factor), optimizer, delay_overflow_check=True)
    assert amp.loss_scale() == 128.0
    if ends_with_check:
        backward(F.mse_loss(model(batch()[0]), batch()[1]), optimizer)
    optimizer.step()
    is_overflow = factor == math.inf
    assert amp.step_was_skipped(optimizer) == is_overflow
    assert amp.loss_scale() == (64.0 if is_overflow else 128.0)
    if is_overflow:
        assert_identical(snapshot(model, optimizer), before)


def test_a_delayed_overflow_is_put_to_the_account_of_its_own_loss() -> None:
    model, optimizer = pair_at("O1", num_losses=2)
    set_scale(128.0)
    inputs, targets = batch()
    loss = F.mse_loss(model(inputs), targets)
    backward(with_gradient_times(loss, math.inf), optimizer, loss_id=0, delay_overflow_check=True)
    backward(F.mse_loss(model(inputs), targets), optimizer, loss_id=1)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert (amp.loss_scale(0), amp.loss_scale(1)) == (64.0, 128.0)


def test_a_delayed_overflow_skips_the_steps_of_all_optimizers_of_its_block() -> None:
    models = [mlp(), mlp()]
    optimizers = [OPTIMIZERS["adam"](model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level="O1")
    set_scale(128.0)
    inputs, targets = batch()
    loss = F.mse_loss(models[0](inputs), targets) + with_gradient_times(
        models[1](inputs).sum(), math.inf
    )
    before = [snapshot(*pair) for pair in zip(models, optimizers, strict=True)]
    backward(loss, optimizers, delay_overflow_check=True)
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [True, True]
    assert_identical([snapshot(*pair) for pair in zip(models, optimizers, strict=True)], before)
    assert amp.loss_scale() == 64.0


def test_a_block_with_two_optimizers_and_a_delayed_check_counts_as_one_clean_step() -> None:
    models = [mlp(), mlp()]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level="O1")
    set_scale(128.0)
    inputs, targets = batch()
    loss = F.mse_loss(models[0](inputs) + models[1](inputs), targets)
    backward(loss, optimizers, delay_overflow_check=True)
    for optimizer in optimizers:
        optimizer.step()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 1}}


# -- several optimizers, models and losses ---------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
def test_two_optimizers_and_a_list_of_models_share_a_block(opt_level: str) -> None:
    models = [mlp(), mlp()]
    factories = OPTIMIZERS["sgd"], OPTIMIZERS["adam"]
    optimizers = [make(m.parameters()) for make, m in zip(factories, models, strict=True)]
    found = amp.initialize(models, optimizers, opt_level=opt_level, **scale_for(opt_level))
    assert found[0] == models
    assert found[1] == optimizers
    inputs, targets = batch()
    expected = fp64_gradients(
        models,
        lambda a, b: F.mse_loss(a(inputs.double()) + b(inputs.double()), targets.double()),
    )
    loss = F.mse_loss(models[0](inputs).float() + models[1](inputs).float(), targets)
    backward(loss, optimizers)
    half_dtype = torch.float32 if opt_level == "O0" else amp.OPT_LEVELS[opt_level].half_dtype
    for optimizer, oracle in zip(optimizers, expected, strict=True):
        assert_near(gradients(optimizer), oracle, half_dtype, depth=3)
    before = [snapshot(*pair) for pair in zip(models, optimizers, strict=True)]
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        optimizer.step()
        assert not torch.equal(snapshot(model, optimizer)["updated"][0], before[i]["updated"][0])


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_a_shared_block_skips_the_steps_of_all_its_optimizers(
    opt_level: str,
) -> None:
    models = [mlp(), mlp()]
    optimizers = [OPTIMIZERS["adam"](model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level=opt_level)
    set_scale(128.0)
    inputs, targets = batch()
    # Only the second model overflows; a step of the first alone would tear them apart.
    loss = F.mse_loss(models[0](inputs), targets) + with_gradient_times(
        models[1](inputs).sum(), math.inf
    )
    before = [snapshot(*pair) for pair in zip(models, optimizers, strict=True)]
    backward(loss, optimizers)
    for optimizer in optimizers:
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
    assert_identical([snapshot(*pair) for pair in zip(models, optimizers, strict=True)], before)
    assert amp.loss_scale() == 64.0


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_two_optimizers_on_parts_of_one_model(opt_level: str) -> None:
    model = mlp()
    parts = [list(model.parameters())[:2], list(model.parameters())[2:]]
    optimizers = [OPTIMIZERS["sgd"](part) for part in parts]
    amp.initialize(model, optimizers, opt_level=opt_level, loss_scale=128.0)
    one = batch()
    losses = []
    for _ in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.mse_loss(model(one[0]), one[1])
        backward(loss, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(state_of(optimizers[0]) + state_of(optimizers[1]))


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_each_loss_has_a_scale_of_its_own(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, num_losses=2)
    assert list(amp.state_dict()) == ["loss_scaler0", "loss_scaler1"]
    set_scale(128.0)
    inputs, targets = batch()
    backward(F.mse_loss(model(inputs), targets), optimizer, loss_id=0)
    backward(
        with_gradient_times(F.mse_loss(model(inputs), targets), math.inf), optimizer, loss_id=1
    )
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert (amp.loss_scale(0), amp.loss_scale(1)) == (128.0, 64.0)
    with pytest.raises(amp.AmpError, match="expected 0 to 1, found 2; pass num_losses"):
        backward(model(inputs).sum(), optimizer, loss_id=2)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_losses_with_different_scales_add_up_unscaled(opt_level: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, num_losses=2)
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 8.0, "unskipped": 0},
            "loss_scaler1": {"loss_scale": 1024.0, "unskipped": 0},
        }
    )
    for loss_id in (0, 1):
        backward(model(torch.ones(1, 1)).sum(), optimizer, loss_id=loss_id)
    assert gradients(optimizer)[0].item() == 2.0


class Gan:
    """A generator and a discriminator, each with an initialize call and an optimizer of its own."""

    def __init__(self, opt_level: str) -> None:
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.generator_optimizer = OPTIMIZERS["sgd"](self.generator.parameters())
        self.critic_optimizer = OPTIMIZERS["sgd"](self.critic.parameters())
        options = scale_for(opt_level)
        amp.initialize(self.critic, self.critic_optimizer, opt_level=opt_level, **options)
        amp.initialize(self.generator, self.generator_optimizer, opt_level=opt_level, **options)

    @staticmethod
    def loss(judged: torch.Tensor, label: float) -> torch.Tensor:
        judged = judged.float() if judged.dtype is not torch.float64 else judged
        return F.binary_cross_entropy_with_logits(judged, torch.full_like(judged, label))


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_gan_with_two_initialize_calls_has_the_gradients_of_fp64(opt_level: str) -> None:
    gan = Gan(opt_level)
    half_dtype = torch.float32 if opt_level == "O0" else amp.OPT_LEVELS[opt_level].half_dtype
    for _ in range(3):
        real, noise = torch.randn(4, 6), torch.randn(4, 4)

        def critic_loss(
            generator: nn.Module,
            critic: nn.Module,
            real: torch.Tensor = real,
            noise: torch.Tensor = noise,
        ) -> torch.Tensor:
            wide = real.double(), noise.double()
            real_loss = gan.loss(critic(wide[0]), 1.0)
            fake_loss = gan.loss(critic(generator(wide[1]).detach()), 0.0)
            return real_loss + fake_loss + 0 * generator(wide[1]).sum()

        def generator_loss(
            generator: nn.Module, critic: nn.Module, noise: torch.Tensor = noise
        ) -> torch.Tensor:
            return gan.loss(critic(generator(noise.double())), 1.0)

        gan.critic_optimizer.zero_grad()
        _, expected = fp64_gradients([gan.generator, gan.critic], critic_loss)
        fake = gan.generator(noise)
        backward(gan.loss(gan.critic(real), 1.0), gan.critic_optimizer)
        backward(gan.loss(gan.critic(fake.detach()), 0.0), gan.critic_optimizer)
        assert_near(gradients(gan.critic_optimizer), expected, half_dtype, depth=4)
        gan.critic_optimizer.step()

        gan.generator_optimizer.zero_grad()
        expected, _ = fp64_gradients([gan.generator, gan.critic], generator_loss)
        backward(gan.loss(gan.critic(gan.generator(noise)), 1.0), gan.generator_optimizer)
        assert_near(gradients(gan.generator_optimizer), expected, half_dtype, depth=4)
        gan.generator_optimizer.step()
        assert not amp.step_was_skipped(gan.generator_optimizer)
        assert not amp.step_was_skipped(gan.critic_optimizer)


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
def test_clipping_through_master_params_bounds_the_step(opt_level: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, **scale_for(opt_level))
    inputs, targets = batch()
    ((expected),) = fp64_gradients(
        [model], lambda twin: F.mse_loss(twin(inputs.double()), targets.double())
    )
    norm = torch.cat([g.flatten() for g in expected]).norm().item()
    backward(F.mse_loss(model(inputs), targets), optimizer)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    found = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), norm / 4)
    half_dtype = torch.float32 if opt_level == "O0" else amp.OPT_LEVELS[opt_level].half_dtype
    relative = math.sqrt(18) * ROUNDING_UNIT[half_dtype]  # see test_gradient_oracles
    assert found.item() == pytest.approx(norm, rel=relative)
    optimizer.step()
    moved = [
        (a.detach() - b).flatten().double()
        for a, b in zip(amp.master_params(optimizer), before, strict=True)
    ]
    assert torch.cat(moved).norm().item() == pytest.approx(
        norm / 4,
        rel=2 * relative + 2e-6,  # torch divides by the norm plus 1e-6
    )


# -- closures --------------------------------------------------------------------------------------


def closure_of(
    model: nn.Module, optimizer: Any, one: tuple[torch.Tensor, torch.Tensor], factor: float = 1.0
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(one[0]), one[1])
        backward(with_gradient_times(loss, factor), optimizer)
        return loss

    return closure


@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_step_with_a_closure_is_the_step_without_one(
    opt_level: str, factory: OptimizerFactory
) -> None:
    batches = [batch() for _ in range(3)]
    results = []
    for has_closure in (False, True):
        torch.manual_seed(5)
        model, optimizer = pair_at(opt_level, factory, **scale_for(opt_level))
        losses = [
            optimizer.step(closure_of(model, optimizer, one)).item()
            if has_closure
            else train_step(model, optimizer, one)
            for one in batches
        ]
        results.append((losses, snapshot(model, optimizer)))
        amp.uninitialize()
    assert_identical(results[1], results[0])


@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_a_closure_leaves_weights_and_state_bit_identical(
    opt_level: str, factory: OptimizerFactory
) -> None:
    model, optimizer = pair_at(opt_level, factory)
    set_scale(128.0)
    optimizer.step(closure_of(model, optimizer, batch()))
    before = snapshot(model, optimizer)
    optimizer.step(closure_of(model, optimizer, batch(), math.inf))
    assert amp.step_was_skipped(optimizer)
    assert amp.loss_scale() == 64.0
    assert_identical(snapshot(model, optimizer), before)
    optimizer.step(closure=closure_of(model, optimizer, batch()))
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_casts_hold_inside_a_closure(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level, patch_torch_functions=True, loss_scale=128.0)
    found = []

    def closure() -> torch.Tensor:
        found.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
        return closure_of(model, optimizer, batch())()

    optimizer.step(closure)
    assert found == [torch.float16]


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"], ids=str)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_lbfgs_minimises_with_a_closure_that_is_called_many_times(
    opt_level: str, line_search: str | None
) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=5, line_search_fn=line_search
    )
    amp.initialize(model, optimizer, opt_level=opt_level, **scale_for(opt_level))
    one = batch()
    losses = [optimizer.step(closure_of(model, optimizer, one)).item() for _ in range(4)]
    assert losses[-1] < 0.5 * losses[0]
    if opt_level in MASTER_LEVELS:
        (state, *_) = state_of(optimizer)
        assert {t.dtype for t in state["old_dirs"]} == {torch.float32}


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_closure_of_lbfgs_sees_the_weights_of_each_evaluation(opt_level: str) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0)
    one, seen = batch(), []

    def closure() -> torch.Tensor:
        seen.append(model(one[0]).detach().clone())
        return closure_of(model, optimizer, one)()

    optimizer.step(closure)
    assert len(seen) == 4
    assert not any(torch.equal(a, b) for a, b in pairwise(seen))


def test_lbfgs_at_o0_is_bit_identical_to_plain_torch() -> None:
    plain = mlp()
    model = copy.deepcopy(plain)
    one = batch()
    plain_optimizer = torch.optim.LBFGS(plain.parameters(), max_iter=5)

    def plain_closure() -> torch.Tensor:
        plain_optimizer.zero_grad()
        loss = F.mse_loss(plain(one[0]), one[1])
        loss.backward()
        return loss

    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    amp.initialize(model, optimizer, opt_level="O0")
    for _ in range(2):
        expected = plain_optimizer.step(plain_closure)
        assert_identical(optimizer.step(closure_of(model, optimizer, one)), expected)


# -- schedulers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("is_made_first", [True, False], ids=["before", "after"])
def test_a_scheduler_made_before_or_after_initialize_is_content_with_a_skipped_first_step(
    opt_level: str, is_made_first: bool
) -> None:
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    make = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    if is_made_first:
        scheduler = make()
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale="dynamic")
    if not is_made_first:
        scheduler = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model, optimizer, batch(), math.inf)
        assert amp.step_was_skipped(optimizer)
        scheduler.step()
        set_scale(128.0)
        before = snapshot(model, optimizer)
        train_step(model, optimizer, batch())
        scheduler.step()
    assert not torch.equal(snapshot(model, optimizer)["updated"][0], before["updated"][0])
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_schedule_can_be_held_while_steps_are_skipped(opt_level: str) -> None:
    model, optimizer = pair_at(opt_level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    set_scale(128.0)
    for factor in (math.inf, 1.0, math.inf, 1.0):
        train_step(model, optimizer, batch(), factor)
        if not amp.step_was_skipped(optimizer):
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("is_made_first", [True, False], ids=["before", "after"])
def test_overflows_skip_the_step_also_with_a_scheduler(opt_level: str, is_made_first: bool) -> None:
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if is_made_first:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale="dynamic")
    if not is_made_first:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    set_scale(128.0)
    train_step(model, optimizer, batch())
    before = snapshot(model, optimizer)
    train_step(model, optimizer, batch(), math.inf)
    assert_identical(snapshot(model, optimizer), before)
