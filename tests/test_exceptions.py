"""After an exception inside anything of the package, all is as it was before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import (
    LEVELS,
    OPTIMIZERS,
    assert_identical,
    assert_same_objects,
    attributes_of,
    backward,
    mlp,
    normalised_mlp,
    plain_step,
    snapshot,
    train_step,
)
from process_state import ProcessState
from torch import nn
from torch.nn.parameter import is_lazy

import amp_patch as amp
from amp_patch.casts.rules import OP_RULES, CastRule, OpRule


class BodyError(Exception):
    """Raised by the tests inside a block."""


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def grads(model: nn.Module, optimizer: Any) -> list[torch.Tensor | None]:
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in (*model.parameters(), *updated)]


def assert_same_gradients(
    found: list[torch.Tensor | None],
    expected: list[torch.Tensor | None],
    values: list[torch.Tensor | None],
) -> None:
    assert all(a is b for a, b in zip(found, expected, strict=True))
    for gradient, value in zip(found, values, strict=True):
        if gradient is not None:
            assert_identical(gradient, value)


# -- scale_loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("is_accumulating", [False, True], ids=["first-block", "second-block"])
@pytest.mark.parametrize("raises_after_backward", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [BodyError, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def test_an_exception_in_scale_loss_leaves_gradients_and_scale_as_they_were(
    opt_level: str,
    is_accumulating: bool,
    raises_after_backward: bool,
    error: type[BaseException],
) -> None:
    model = normalised_mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options = {"loss_scale": 128.0} if opt_level in ("O0", "O3", "O4", "O5") else {}
    amp.initialize(model, optimizer, opt_level=opt_level, **options)
    if is_accumulating:
        inputs, targets = batch()
        backward(F.mse_loss(model(inputs), targets), optimizer)
    before, weights = grads(model, optimizer), snapshot(model, optimizer)
    values = copy.deepcopy(before)
    scales = amp.state_dict()
    inputs, targets = batch()
    loss = F.mse_loss(model(inputs), targets)
    with pytest.raises(error), amp.scale_loss(loss, optimizer) as scaled_loss:
        if raises_after_backward:
            scaled_loss.backward()
        raise error
    assert_same_gradients(grads(model, optimizer), before, values)
    assert_identical(snapshot(model, optimizer), weights)
    assert amp.state_dict() == scales
    assert not amp.step_was_skipped(optimizer)
    train_step(model, optimizer, batch())


def test_an_exception_at_a_scale_of_one_leaves_all_gradients_where_there_are_masters() -> None:
    """Also those of BatchNorm, which has none."""
    model = normalised_mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level="O5")
    inputs, targets = batch()
    backward(F.mse_loss(model(inputs), targets), optimizer)
    before = grads(model, optimizer)
    values = copy.deepcopy(before)
    loss = F.mse_loss(model(inputs), targets)
    with pytest.raises(BodyError), amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        raise BodyError
    assert_same_gradients(grads(model, optimizer), before, values)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_an_exception_in_a_delayed_window_keeps_the_scaled_gradients(opt_level: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0)
    inputs, targets = batch()
    backward(F.mse_loss(model(inputs), targets), optimizer, delay_unscale=True)
    before = grads(model, optimizer)
    values = copy.deepcopy(before)
    with (
        pytest.raises(BodyError),
        amp.scale_loss(F.mse_loss(model(inputs), targets), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        raise BodyError
    assert_same_gradients(grads(model, optimizer), before, values)
    with pytest.raises(amp.AmpError, match="still multiplied by the loss scale"):
        optimizer.step()


def test_an_exception_in_scale_loss_empties_the_cast_cache() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level="O1")
    loss = model(batch()[0]).sum()
    with pytest.raises(BodyError), amp.scale_loss(loss, optimizer):
        raise BodyError
    with torch.no_grad():
        model[0].weight.numpy()[:] = 0.0  # a write that nothing counts
        model[0].bias.numpy()[:] = 0.0
    assert_identical(model[0](batch()[0]).detach(), torch.zeros(4, 8, dtype=torch.float16))


def test_an_exception_with_two_optimizers_leaves_both_as_they_were() -> None:
    models = [mlp(), mlp()]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level="O2")
    inputs, targets = batch()
    loss = sum(F.mse_loss(model(inputs), targets) for model in models)
    with pytest.raises(BodyError), amp.scale_loss(loss, optimizers) as scaled_loss:
        scaled_loss.backward()
        raise BodyError
    for model, optimizer in zip(models, optimizers, strict=True):
        assert all(gradient is None for gradient in grads(model, optimizer))
        train_step(model, optimizer, batch())


def test_an_optimizer_that_is_refused_leaves_the_other_of_the_block_ready() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level="O2")
    stranger = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with (
        pytest.raises(amp.AmpError, match="SGD that did not"),
        amp.scale_loss(model(batch()[0]).sum(), [optimizer, stranger]),
    ):
        pass
    train_step(model, optimizer, batch())


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_an_exception_in_step_leaves_casts_on_and_the_optimizer_usable(opt_level: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, patch_torch_functions=True)

    def closure() -> torch.Tensor:
        raise BodyError

    weights = snapshot(model, optimizer)
    with pytest.raises(BodyError):
        optimizer.step(closure)
    assert_identical(snapshot(model, optimizer), weights)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
    train_step(model, optimizer, batch())


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_exception_in_forward_leaves_casts_as_they_were(opt_level: str) -> None:
    class Fragile(nn.Linear):
        is_broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_broken:
                raise BodyError
            return super().forward(x)

    model = Fragile(6, 3)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level)
    dtype = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    with pytest.raises(BodyError):
        model(batch()[0])
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype
    model.is_broken = False
    train_step(model, optimizer, batch())


# -- disable_casts ---------------------------------------------------------------------------------


def product_dtype() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_an_exception_in_disable_casts_brings_the_casts_back() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1")
    with pytest.raises(BodyError), amp.disable_casts():
        assert product_dtype() is torch.float32
        raise BodyError
    assert product_dtype() is torch.float16


def test_an_exception_in_a_nested_disable_casts_leaves_the_outer_one_in_force() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1")
    with amp.disable_casts():
        with pytest.raises(BodyError), amp.disable_casts():
            raise BodyError
        assert product_dtype() is torch.float32
    assert product_dtype() is torch.float16


# -- initialize ------------------------------------------------------------------------------------


class Stubborn(nn.Parameter):
    """A parameter whose data cannot be assigned."""

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise BodyError("this parameter stays what it is")


class StubbornLast(nn.Sequential):
    """Refuses to be cast when its first layer has been cast already."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self[2].weight = Stubborn(self[2].weight.detach().clone())


class FrozenMethods(torch.optim.SGD):
    """An optimizer whose zero_grad cannot be replaced, whereas step can."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "zero_grad":
            raise BodyError("this optimizer stays what it is")
        super().__setattr__(name, value)


def sgd_of(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def no_optimizer(model: nn.Module) -> Any:
    return [sgd_of(model), "SGD"]


def frozen_second(model: nn.Module) -> Any:
    parameters = list(model.parameters())
    return [torch.optim.SGD(parameters[:2], lr=0.1), FrozenMethods(parameters[2:], lr=0.1)]


FAILURES = {
    "no-optimizer": (normalised_mlp, no_optimizer, {}, amp.AmpError),
    "same-optimizer-twice": (normalised_mlp, lambda m: [sgd_of(m)] * 2, {}, amp.AmpError),
    "bad-level": (normalised_mlp, sgd_of, {"opt_level": "O7"}, amp.AmpError),
    "bad-scale": (normalised_mlp, sgd_of, {"loss_scale": -1}, amp.AmpError),
    "bad-count": (normalised_mlp, sgd_of, {"num_losses": 0}, amp.AmpError),
    "lazy-parameter": (lambda: nn.LazyLinear(3), sgd_of, {}, amp.AmpError),
    "stubborn-parameter": (StubbornLast, sgd_of, {"opt_level": "O2"}, BodyError),
    "frozen-optimizer": (normalised_mlp, frozen_second, {"opt_level": "O2"}, BodyError),
}


def optimizers_among(given: Any) -> list[Any]:
    given = given if isinstance(given, list) else [given]
    return [one for one in given if isinstance(one, torch.optim.Optimizer)]


# What is impossible for casts around operations fails at O1, at the end of initialize.
FAILING_PATCH = OpRule(int, "bit_length", CastRule.HALF)


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not is_lazy(parameter):
            parameter.grad = torch.ones_like(parameter)


def state_before(model: nn.Module, optimizers: list[Any]) -> Callable[[], None]:
    """Take a picture. Returns a function that compares it with what is then."""
    process = ProcessState.capture()
    attributes = attributes_of(model)
    parameters = list(model.parameters())
    lazy = [is_lazy(p) for p in parameters]
    values = [
        None if skip else p.detach().clone() for p, skip in zip(parameters, lazy, strict=True)
    ]
    gradients = copy.deepcopy([p.grad for p in parameters])
    groups = [
        (group, group["params"], list(group["params"]))
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    instances = [dict(vars(optimizer)) for optimizer in optimizers]

    def compare() -> None:
        assert process.differences(ProcessState.capture()) == []
        assert_same_objects(attributes_of(model), attributes)
        for now, then, value, gradient in zip(
            model.parameters(), parameters, values, gradients, strict=True
        ):
            assert now is then
            if value is not None:
                assert_identical(now.detach(), value)
            assert (now.grad is None) == (gradient is None)
            if gradient is not None:
                assert_identical(now.grad, gradient)
        found = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, (same_group, same_list, members) in zip(found, groups, strict=True):
            assert group is same_group
            assert group["params"] is same_list
            assert [id(p) for p in same_list] == [id(p) for p in members]
        for optimizer, instance in zip(optimizers, instances, strict=True):
            assert vars(optimizer).keys() == instance.keys()

    return compare


@pytest.mark.parametrize(("build", "make", "options", "error"), FAILURES.values(), ids=FAILURES)
def test_a_failing_initialize_leaves_nothing_behind(
    build: Callable[[], nn.Module],
    make: Callable[[nn.Module], Any],
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    model = build()
    optimizers = make(model)
    known = optimizers_among(optimizers)
    give_gradients(model)
    compare = state_before(model, known)
    with pytest.raises(error):
        amp.initialize(model, optimizers, **options)
    compare()
    with pytest.raises(amp.AmpError, match="earlier call"):
        amp.state_dict()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_patch_that_fails_leaves_nothing_behind(
    opt_level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = normalised_mlp()
    optimizer = sgd_of(model)
    plain_step(model, optimizer, batch())
    give_gradients(model)
    before = snapshot(model, optimizer)
    compare = state_before(model, [optimizer])
    monkeypatch.setattr("amp_patch.casts.presets.OP_RULES", (*OP_RULES, FAILING_PATCH))
    with pytest.raises(TypeError):
        amp.initialize(model, optimizer, opt_level=opt_level, patch_torch_functions=True)
    compare()
    assert_identical(snapshot(model, optimizer), before)
    monkeypatch.undo()
    amp.initialize(model, optimizer, opt_level=opt_level, patch_torch_functions=True)
    train_step(model, optimizer, batch())


@pytest.mark.parametrize(("build", "make", "options", "error"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("earlier_level", ["O1", "O2"])
def test_a_failing_initialize_leaves_an_earlier_one_in_force(
    earlier_level: str,
    build: Callable[[], nn.Module],
    make: Callable[[nn.Module], Any],
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    earlier = normalised_mlp()
    earlier_optimizer = sgd_of(earlier)
    amp.initialize(earlier, earlier_optimizer, opt_level=earlier_level)
    train_step(earlier, earlier_optimizer, batch())
    scales, weights = amp.state_dict(), snapshot(earlier, earlier_optimizer)
    model = build()
    optimizers = make(model)
    known = optimizers_among(optimizers)
    give_gradients(model)
    compare = state_before(model, known)
    with pytest.raises(error):
        amp.initialize(model, optimizers, **options)
    compare()
    assert amp.state_dict() == scales
    assert_identical(snapshot(earlier, earlier_optimizer), weights)
    train_step(earlier, earlier_optimizer, batch())


def test_a_failing_change_of_level_leaves_the_objects_usable() -> None:
    model = normalised_mlp()
    optimizer = sgd_of(model)
    amp.initialize(model, optimizer, opt_level="O2")
    train_step(model, optimizer, batch())
    before = snapshot(model, optimizer)
    with pytest.raises(amp.AmpError):
        amp.initialize(model, optimizer, opt_level="O9")
    assert_identical(snapshot(model, optimizer), before)
    train_step(model, optimizer, batch())
