"""One optimizer under amp: masters in its groups, a step that can be skipped, and the way back."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.call_setup import Setup
from amp_patch.policy import resolve_policy
from amp_patch.session import Session

FP16, FP32 = torch.float16, torch.float32
LEVELS = pytest.mark.parametrize("opt_level", amp.OPT_LEVELS)
MASTERED = pytest.mark.parametrize("opt_level", ["O2", "O5"])
SCALED = pytest.mark.parametrize("opt_level", ["O1", "O2"])

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, eps=1e-3),
}


@pytest.fixture
def session() -> Iterator[Session]:
    """A session of this test's own."""
    found = Session()
    yield found
    found.close()


def bound(session: Session, optimizer: Any, model: nn.Module) -> Any:
    session.add([model], [optimizer], Setup(resolve_policy("O2"), is_verbose=False))
    return session.binding_of(optimizer, "test")


def make(name: str = "sgd") -> tuple[nn.Linear, Any]:
    model = nn.Linear(2, 2)
    return model, OPTIMIZERS[name](model.parameters())


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def started(opt_level: str, name: str = "sgd", **overrides: Any) -> tuple[nn.Linear, Any]:
    model, optimizer = make(name)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **overrides)
    return model, optimizer


def backward(model: nn.Module, optimizer: Any, *, overflows: bool = False) -> None:
    """One block of `scale_loss`; the backward pass overflows if asked to."""
    loss = model(torch.ones(1, 2)).square().sum() * 1e-3
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        if overflows:
            next(model.parameters()).grad.view(-1)[-1] = float("inf")


def train(model: nn.Module, optimizer: Any, *, overflows: bool = False) -> None:
    backward(model, optimizer, overflows=overflows)
    optimizer.step()


def tensors_in(optimizer: Any) -> list[torch.Tensor]:
    found = [p.detach().clone() for p in parameters_of(optimizer)]
    for state in optimizer.state.values():
        found += [value.clone() for value in state.values() if isinstance(value, torch.Tensor)]
    return found


@MASTERED
def test_groups_stay_the_same_objects_and_hold_float32_masters(opt_level: str) -> None:
    model, optimizer = make()
    groups, inner = list(optimizer.param_groups), optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in model.parameters()]
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=True))
    assert optimizer.param_groups[0]["params"] is inner
    for master, value, parameter in zip(inner, before, model.parameters(), strict=True):
        assert master is not parameter
        assert master.dtype is FP32
        assert torch.equal(master, value)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O3", "O4"])
def test_groups_hold_the_models_own_parameters_where_there_are_no_masters(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    assert all(a is b for a, b in zip(parameters_of(optimizer), model.parameters(), strict=True))


@LEVELS
def test_only_three_methods_are_put_on_the_optimizer(opt_level: str) -> None:
    model, optimizer = make()
    before = set(vars(optimizer))
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert set(vars(optimizer)) - before == {"step", "zero_grad", "add_param_group"}
    amp.uninitialize()
    assert set(vars(optimizer)) == before


@LEVELS
def test_methods_that_the_optimizer_inherited_come_back_by_deletion(opt_level: str) -> None:
    _, optimizer = started(opt_level)
    amp.uninitialize()
    assert optimizer.step.__func__ is torch.optim.SGD.step
    assert optimizer.zero_grad.__func__ is torch.optim.SGD.zero_grad
    assert optimizer.add_param_group.__func__ is torch.optim.SGD.add_param_group


def test_method_of_the_users_own_comes_back_as_the_object_it_was() -> None:
    model, optimizer = make()
    own = optimizer.step = lambda: "stepped"
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert optimizer.step() == "stepped"
    amp.uninitialize()
    assert vars(optimizer)["step"] is own


@LEVELS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_the_optimizer_belongs_to_what_it_updates_and_back(
    opt_level: str, name: str
) -> None:
    model, optimizer = make(name)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert {id(p) for p in optimizer.state} <= {id(p) for p in parameters_of(optimizer)}
    train(model, optimizer)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                assert value.dtype is parameter.dtype
    amp.uninitialize()
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    after = optimizer.state_dict()["state"]
    assert after.keys() == before.keys()
    for key, state in before.items():
        for field, value in state.items():
            if isinstance(value, torch.Tensor):
                assert after[key][field].dtype is value.dtype
                assert after[key][field].shape == value.shape


@MASTERED
def test_momentum_from_before_comes_back_bit_for_bit(opt_level: str) -> None:
    model, optimizer = make()
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    before = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    amp.uninitialize()
    for state, value in zip(optimizer.state.values(), before, strict=True):
        assert torch.equal(state["momentum_buffer"], value)


@MASTERED
def test_step_updates_masters_rounds_them_into_the_model_and_clears_gradients(
    opt_level: str,
) -> None:
    model, optimizer = started(opt_level)
    before = tensors_in(optimizer)
    train(model, optimizer)
    for master, old, parameter in zip(
        parameters_of(optimizer), before, model.parameters(), strict=False
    ):
        assert not torch.equal(master, old)
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert master.grad is None
        assert parameter.grad is None


@SCALED
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_leaves_weights_and_state_untouched(opt_level: str, name: str) -> None:
    model, optimizer = started(opt_level, name)
    train(model, optimizer)
    assert not amp.step_was_skipped(optimizer)
    before, weights = tensors_in(optimizer), copy.deepcopy(model.state_dict())
    train(model, optimizer, overflows=True)
    assert amp.step_was_skipped(optimizer)
    for now, then in zip(tensors_in(optimizer), before, strict=True):
        assert torch.equal(now, then)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])
    assert all(p.grad is None for p in (*model.parameters(), *parameters_of(optimizer)))
    train(model, optimizer)
    assert not amp.step_was_skipped(optimizer)


@SCALED
def test_step_returns_what_the_optimizer_returns_and_none_if_skipped(opt_level: str) -> None:
    model, optimizer = make()
    optimizer.step = lambda: "stepped"
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert optimizer.step() == "stepped"
    backward(model, optimizer, overflows=True)
    assert optimizer.step() is None


@SCALED
def test_step_with_scaled_gradients_is_refused(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    with amp.scale_loss(
        model(torch.ones(1, 2)).sum() * 1e-3, optimizer, delay_unscale=True
    ) as scaled:
        scaled.backward()
    with pytest.raises(amp.AmpError, match=r"step: found gradients.*without delay_unscale=True"):
        optimizer.step()


@SCALED
def test_step_inside_the_block_is_refused(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    with (
        pytest.raises(amp.AmpError, match="expected the last scale_loss block before a step"),
        amp.scale_loss(model(torch.ones(1, 2)).sum() * 1e-3, optimizer) as scaled,
    ):
        scaled.backward()
        optimizer.step()


@MASTERED
def test_step_after_a_backward_outside_any_block_is_refused(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(amp.AmpError, match=r"step: found gradients on half weights.*zero_grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


@MASTERED
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_model_and_masters(opt_level: str, set_to_none: bool) -> None:
    model, optimizer = started(opt_level)
    with amp.scale_loss(model(torch.ones(1, 2)).sum() * 1e-3, optimizer) as scaled:
        scaled.backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all(p.grad is None for p in model.parameters())
    for master in parameters_of(optimizer):
        assert master.grad is None if set_to_none else not master.grad.any()


@SCALED
def test_zero_grad_after_an_overflow_lets_the_next_step_happen(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    backward(model, optimizer, overflows=True)
    optimizer.zero_grad()
    train(model, optimizer)
    assert not amp.step_was_skipped(optimizer)


@MASTERED
def test_group_added_later_gets_masters_too_and_gives_them_back(opt_level: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
    assert all(p.dtype is FP32 for p in parameters_of(optimizer))
    train(model, optimizer)
    assert torch.equal(
        model[1].weight, optimizer.param_groups[1]["params"][0].to(model[1].weight.dtype)
    )
    amp.uninitialize()
    pairs = zip(parameters_of(optimizer), model.parameters(), strict=True)
    assert all(held is own for held, own in pairs)


@LEVELS
def test_closure_is_called_with_casts_and_steps_once_an_evaluation(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    dtypes = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        out = model(torch.ones(1, 2))
        dtypes.append(torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype)
        loss = out.square().sum() * 1e-3
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    before = [p.detach().clone() for p in parameters_of(optimizer)]
    assert isinstance(optimizer.step(closure), torch.Tensor)
    assert isinstance(optimizer.step(closure=closure), torch.Tensor)
    casts = {"O1": FP16, "O4": torch.bfloat16}
    assert dtypes == [casts.get(opt_level, FP32)] * 2
    assert not all(torch.equal(a, b) for a, b in zip(before, parameters_of(optimizer), strict=True))


@SCALED
def test_step_that_raises_leaves_casts_on_and_model_in_step_with_masters(opt_level: str) -> None:
    model, optimizer = make()

    def fail(closure: object = None) -> None:
        raise ValueError("out of order")

    optimizer.step = fail
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="out of order"):
        optimizer.step()
    expected = FP16 if opt_level == "O1" else FP32
    assert torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype is expected
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@SCALED
def test_gradients_that_exist_come_along_and_go_back(opt_level: str) -> None:
    model, optimizer = make()
    model.weight.grad = torch.full((2, 2), 5.0)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert torch.equal(parameters_of(optimizer)[0].grad, torch.full((2, 2), 5.0))
    amp.uninitialize()
    assert torch.equal(model.weight.grad, torch.full((2, 2), 5.0))
    assert model.weight.grad.dtype is FP32


@SCALED
def test_loaded_optimizer_state_is_kept_in_float32_and_used(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    optimizer.load_state_dict(saved)
    for state in optimizer.state.values():
        assert state["momentum_buffer"].dtype is FP32
    train(model, optimizer)
    assert {id(p) for p in optimizer.state} == {id(p) for p in parameters_of(optimizer)}


@SCALED
def test_scheduler_made_before_or_after_steps_without_a_warning(opt_level: str) -> None:
    model, optimizer = make()
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, overflows=True)
    before.step()
    after.step()
    train(model, optimizer)


@LEVELS
def test_reference_to_the_patched_step_works_after_uninitialize(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    step = optimizer.step
    amp.uninitialize()
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    step()
    assert not torch.equal(model.weight, before)


@LEVELS
def test_nothing_keeps_model_or_optimizer_alive(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    train(model, optimizer)
    held = (model, optimizer, model.weight, parameters_of(optimizer)[0])
    gone = [weakref.ref(one) for one in held]
    del held
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


def test_binding_is_gone_with_its_optimizer(session: Session) -> None:
    model, optimizer = make()
    binding = weakref.ref(bound(session, optimizer, model))
    assert binding() is not None
    del optimizer
    gc.collect()
    assert binding() is None


def test_release_twice_does_nothing_more(session: Session) -> None:
    model, optimizer = make()
    binding = bound(session, optimizer, model)
    binding.release()
    held = parameters_of(optimizer)
    binding.release()
    assert all(a is b for a, b in zip(parameters_of(optimizer), held, strict=True))
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))


def test_parameter_that_the_user_takes_out_of_a_group_is_no_longer_handled() -> None:
    model, optimizer = started("O2")
    del optimizer.param_groups[0]["params"][1]
    before = model.bias.detach().clone()
    train(model, optimizer)
    assert torch.equal(model.bias, before)


def test_optimizer_that_is_no_torch_optimizer_works() -> None:
    class Plain:
        def __init__(self, parameters: list[torch.Tensor]) -> None:
            self.param_groups = [{"params": parameters}]

        @torch.no_grad()
        def step(self) -> str:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)
            return "stepped"

        def zero_grad(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = None

    model = nn.Linear(2, 2)
    optimizer = Plain(list(model.parameters()))
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum() * 1e-3, optimizer) as scaled:
        scaled.backward()
    assert optimizer.step() == "stepped"
    amp.uninitialize()
    assert all(
        a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
    )
