"""Steps with closures, line searches, and optimizers that step twice."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from injections import overflowing
from networks import LEVELS, assert_identical, snapshot, state_of, train_step
from plain_torch import assert_trains_as_in_fp32
from torch import nn

import amp_patch as amp

SCALED_LEVELS = ("O1", "O2")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


# Every optimizer of torch that takes dense gradients of vectors and matrices alike.
CLOSURE_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02, eps=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, eps=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, eps=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, history_size=3),
    "LBFGS-wolfe": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
}


def closures(library: Any, factory: Callable[[Any], Any], **options: Any) -> Any:
    model = net()
    optimizer = factory(model.parameters())
    library.initialize(model, optimizer, **options)
    losses = []
    for inputs, targets in [batch() for _ in range(3)]:

        def closure(inputs: Any = inputs, targets: Any = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            with library.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return [model], losses


@pytest.mark.parametrize("name", CLOSURE_OPTIMIZERS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_closure_trains_as_in_fp32_with_every_optimizer(opt_level: str, name: str) -> None:
    if opt_level == "O3" and name in ("ASGD", "LBFGS", "LBFGS-wolfe", "Adadelta", "RAdam"):
        pytest.skip("their state leaves the range of half weights without masters")
    # They divide by the size of the gradient, or search along a line: small differences grow.
    assert_trains_as_in_fp32(
        lambda library, **options: closures(library, CLOSURE_OPTIMIZERS[name], **options),
        opt_level,
        factor=1.0 if name == "SGD" else 16.0,
    )


@pytest.mark.parametrize("bad_call", range(4))
@pytest.mark.parametrize("search", [None, "strong_wolfe"], ids=["fixed", "wolfe"])
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_at_any_evaluation_of_a_line_search_undoes_the_whole_step(
    opt_level: str, search: str | None, bad_call: int
) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn=search)
    amp.initialize(model, optimizer, opt_level=opt_level)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
    inputs, targets = batch()
    calls: list[int] = []

    def closure(bad: int | None = None) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled:
            (overflowing(scaled) if len(calls) == bad else scaled).backward()
        calls.append(len(calls))
        return loss

    optimizer.step(closure)
    first = closure().item()
    optimizer.zero_grad()
    before, calls[:] = snapshot(model, optimizer), []
    globals_before = lbfgs_state(optimizer)
    loss = optimizer.step(lambda: closure(bad_call))
    assert len(calls) == bad_call + 1
    assert amp.step_was_skipped(optimizer)
    assert isinstance(loss, torch.Tensor)
    assert amp.loss_scale() == 64.0
    assert_identical(snapshot(model, optimizer), before)
    assert_identical(lbfgs_state(optimizer), globals_before)
    calls[:] = []
    optimizer.step(closure)
    assert not amp.step_was_skipped(optimizer)
    assert closure().item() < first


def lbfgs_state(optimizer: Any) -> list[dict[str, Any]]:
    return copy.deepcopy(state_of(optimizer))


@pytest.mark.parametrize("how", ["positional", "keyword"])
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_a_closure_skips_the_step_and_gives_the_loss(
    opt_level: str, how: str
) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    amp.initialize(model, optimizer, opt_level=opt_level)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
    train_step(model, optimizer, batch())
    inputs, targets = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled:
            overflowing(scaled).backward()
        return loss

    before = snapshot(model, optimizer)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    loss = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
    assert loss.isfinite()
    assert amp.step_was_skipped(optimizer)
    assert_identical(snapshot(model, optimizer), before)
    assert_identical(dict(model.named_buffers()), buffers)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_closure_of_none_is_a_step_without_one(opt_level: str) -> None:
    model, found = net(), []
    start = copy.deepcopy(model.state_dict())
    for kwargs in ({}, {"closure": None}):
        model = net()
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=opt_level)
        torch.manual_seed(2)
        loss = F.mse_loss(model(batch()[0]), batch()[1])
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert optimizer.step(**kwargs) is None
        found.append(snapshot(model, optimizer))
        amp.uninitialize()
    assert_identical(found[0], found[1])


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_closure_of_none_is_accepted_by_a_step_that_is_skipped(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    with amp.scale_loss(model(batch()[0]).sum(), optimizer) as scaled:
        overflowing(scaled).backward()
    assert optimizer.step(closure=None) is None
    assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_exception_in_a_closure_comes_through_and_training_goes_on(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)

    def closure() -> torch.Tensor:
        raise MemoryError("out of memory")

    before = snapshot(model, optimizer)
    with pytest.raises(MemoryError, match="out of memory"):
        optimizer.step(closure)
    assert_identical(snapshot(model, optimizer), before)
    train_step(model, optimizer, batch(), factor=2.0**-8)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_step_stays_a_bound_method_with_the_signature_of_the_optimizer(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = inspect.signature(optimizer.step)
    amp.initialize(model, optimizer, opt_level=opt_level)
    assert optimizer.step.__self__ is optimizer
    assert callable(optimizer.step.__func__)
    assert inspect.signature(optimizer.step) == expected


# -- optimizers that step twice --------------------------------------------------------------------


class SharpnessAware(torch.optim.Optimizer):
    """Climbs to the worst point near by, takes the gradient there, and steps with it from below."""

    def __init__(self, parameters: Any, base: Callable[[Any], Any], rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        present = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.float().norm() for p in present]).norm()
        for parameter in present:
            climb = parameter.grad * (0.05 / (norm + 1e-12))
            parameter.add_(climb)
            self.state[parameter]["climb"] = climb
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        self.descend()
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        """Back to where `first_step` began."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if "climb" in self.state[parameter]:
                    parameter.sub_(self.state[parameter].pop("climb"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


def sharpness_aware(parameters: Any) -> SharpnessAware:
    return SharpnessAware(parameters, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5))


def sharpness_aware_by_hand(library: Any, **options: Any) -> Any:
    model = net()
    optimizer = sharpness_aware(model.parameters())
    library.initialize(model, optimizer, **options)
    losses = []
    for inputs, targets in [batch() for _ in range(5)]:
        loss = F.mse_loss(model(inputs), targets)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.first_step(zero_grad=True)
        with library.scale_loss(F.mse_loss(model(inputs), targets), optimizer) as scaled:
            scaled.backward()
        optimizer.second_step(zero_grad=True)
        losses.append(loss.item())
    return [model], losses


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_optimizer_that_steps_twice_by_hand_trains_as_in_fp32(opt_level: str) -> None:
    assert_trains_as_in_fp32(sharpness_aware_by_hand, opt_level, factor=2.0)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_optimizer_that_calls_its_closure_twice_trains_as_in_fp32(opt_level: str) -> None:
    assert_trains_as_in_fp32(
        lambda library, **options: closures(library, sharpness_aware, **options),
        opt_level,
        factor=2.0,
    )


@pytest.mark.parametrize("bad", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_either_half_of_a_double_step_by_hand_leaves_no_trace(
    opt_level: str, bad: int
) -> None:
    model = net()
    optimizer = sharpness_aware(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})

    def half(inputs: torch.Tensor, targets: torch.Tensor, *, overflows: bool) -> bool:
        loss = F.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled:
            (overflowing(scaled) if overflows else scaled).backward()
        return amp.step_will_be_skipped(optimizer)

    def iteration(bad: int | None) -> bool:
        inputs, targets = batch()
        if half(inputs, targets, overflows=bad == 0):
            optimizer.zero_grad()
            return False
        optimizer.first_step(zero_grad=True)
        if half(inputs, targets, overflows=bad == 1):
            optimizer.descend()
            optimizer.zero_grad()
            return False
        optimizer.second_step(zero_grad=True)
        return True

    assert iteration(None)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    assert not iteration(bad)
    found = dict(model.state_dict())
    # Up and down again is exact up to the last bit of an FP32 addition.
    torch.testing.assert_close(found, before, rtol=2.0**-22, atol=2.0**-26)
    if bad == 0:
        assert_identical(found, before)
    assert amp.loss_scale() == 64.0
    assert iteration(None)


@pytest.mark.parametrize("bad", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_either_call_of_a_double_closure_leaves_weights_bit_identical(
    opt_level: str, bad: int
) -> None:
    model = net()
    optimizer = sharpness_aware(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
    inputs, targets = batch()
    calls: list[None] = []

    def closure() -> torch.Tensor:
        loss = F.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled:
            (overflowing(scaled) if len(calls) == bad else scaled).backward()
        calls.append(None)
        return loss

    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer.step(closure)
    assert amp.step_was_skipped(optimizer)
    assert_identical(dict(model.state_dict()), before)
    optimizer.step(closure)
    assert not amp.step_was_skipped(optimizer)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_casts_are_fresh_after_the_first_half_of_a_double_step(opt_level: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = sharpness_aware(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model(torch.ones(1, 1))
        model.weight.fill_(2.0)
    assert model(torch.ones(1, 1)).item() == 2.0


class Counting(torch.optim.Optimizer):
    """Counts in its group before it calls the closure, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0, "sum": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["sum"] += 1
            group["new"] = True
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["count"])
        return loss


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_a_closure_undoes_what_the_step_has_counted_in_its_groups(
    opt_level: str,
) -> None:
    model = net()
    optimizer = Counting(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level)
    (group,) = optimizer.param_groups
    counted = group["sum"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        group["lr"] = 0.05  # a scheduler's work
        loss = F.mse_loss(model(batch()[0]), batch()[1])
        with amp.scale_loss(loss, optimizer) as scaled:
            overflowing(scaled).backward()
        return loss

    optimizer.step(closure)
    assert amp.step_was_skipped(optimizer)
    assert {name: group[name] for name in group if name != "params"} == {
        "lr": 0.05,
        "count": 0,
        "sum": counted,
    }
    assert counted.item() == 0.0


class Wrapping(torch.optim.Optimizer):
    """Takes the steps of another optimizer, whose state is its own, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        if closure is not None:
            closure()


@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_state_of_an_optimizer_inside_another_follows_its_parameters(opt_level: str) -> None:
    model = net()
    optimizer = Wrapping(model.parameters())
    F.mse_loss(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    momenta = [optimizer.base.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    amp.initialize(model, optimizer, opt_level=opt_level)
    assert list(optimizer.base.state) == list(amp.master_params(optimizer))
    amp.uninitialize()
    after = [optimizer.base.state[p]["momentum_buffer"] for p in model.parameters()]
    rtol = 2.0**-11 if opt_level == "O3" else 0.0
    torch.testing.assert_close(after, momenta, rtol=rtol, atol=2.0**-24 if rtol else 0.0)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_undoes_the_state_of_an_optimizer_inside_another(opt_level: str) -> None:
    model = net()
    optimizer = Wrapping(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0)
    train_step(model, optimizer, batch())
    before = copy.deepcopy(list(optimizer.base.state.values()))
    inputs, targets = batch()

    def closure() -> None:
        with amp.scale_loss(F.mse_loss(model(inputs), targets), optimizer) as scaled:
            overflowing(scaled).backward()

    with pytest.warns(amp.AmpWarning, match="static"):
        optimizer.step(closure)
    assert amp.step_was_skipped(optimizer)
    assert_identical(list(optimizer.base.state.values()), before)
