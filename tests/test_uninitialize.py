"""After uninitialize everything is as it was, but for what was trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import (
    LEVELS,
    OPTIMIZERS,
    OptimizerFactory,
    assert_identical,
    assert_same_objects,
    attributes_of,
    backward,
    normalised_mlp,
    plain_step,
    snapshot,
    state_of,
    train_step,
)
from process_state import OWNERS, ProcessState
from torch import nn

import amp_patch as amp
from amp_patch.casts.rules import OP_RULES

CAST_LEVELS = ("O1", "O4")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def new_pair(factory: OptimizerFactory = OPTIMIZERS["adam"]) -> tuple[nn.Module, Any]:
    model = normalised_mlp()
    return model, factory(model.parameters())


def scale_for(opt_level: str) -> dict[str, Any]:
    """No overflow in the first steps."""
    return {"loss_scale": 128.0} if opt_level in ("O1", "O2") else {}


@pytest.mark.parametrize("opt_level", CAST_LEVELS)
def test_every_patched_attribute_is_the_object_it_was(opt_level: str) -> None:
    rows = [(row.owner, row.name) for row in OP_RULES if hasattr(row.owner, row.name)]
    rows.append((torch.Tensor, "data"))
    absent = object()
    before = [vars(owner).get(name, absent) for owner, name in rows]
    process = ProcessState.capture()
    amp.initialize(*new_pair(), opt_level=opt_level)
    during = [vars(owner).get(name, absent) for owner, name in rows]
    assert not any(a is b for a, b in zip(during, before, strict=True))
    amp.uninitialize()
    after = [vars(owner).get(name, absent) for owner, name in rows]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert process.differences(ProcessState.capture()) == []


def test_nothing_but_what_has_a_rule_is_patched() -> None:
    ruled = {(id(row.owner), row.name) for row in OP_RULES}
    # Generated code calls functions of torch.nn.functional by where they are written.
    ruled |= {
        (id(owner), value.__name__)
        for row in OP_RULES
        for owner in (torch._C._nn, torch.functional, F)
        if callable(value := vars(row.owner).get(row.name)) and hasattr(value, "__name__")
    }
    ruled |= {(id(torch.Tensor), "data"), (id(torch.nn.Module), "zero_grad")}  # watched
    before = {name: dict(vars(owner)) for name, owner in OWNERS.items()}
    amp.initialize(*new_pair(), opt_level="O1")
    changed = {
        (id(owner), name)
        for key, owner in OWNERS.items()
        for name, value in vars(owner).items()
        if before[key].get(name, before) is not value
    }
    assert changed <= ruled


def test_inherited_methods_come_back_by_deletion() -> None:
    assert "matmul" not in vars(torch.Tensor)
    amp.initialize(*new_pair(), opt_level="O1")
    assert "matmul" in vars(torch.Tensor)
    amp.uninitialize()
    assert "matmul" not in vars(torch.Tensor)
    assert "data" not in vars(torch.Tensor)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_model_and_optimizer_carry_what_they_carried(opt_level: str) -> None:
    model, optimizer = new_pair()
    attributes, instance = attributes_of(model), dict(vars(optimizer))
    groups = [(group, group["params"], list(group["params"])) for group in optimizer.param_groups]
    amp.initialize(model, optimizer, opt_level=opt_level, **scale_for(opt_level))
    for _ in range(2):
        train_step(model, optimizer, batch())
    amp.uninitialize()
    assert_same_objects(attributes_of(model), attributes)
    assert vars(optimizer).keys() == instance.keys()
    for group, (same_group, same_list, members) in zip(optimizer.param_groups, groups, strict=True):
        assert group is same_group
        assert group["params"] is same_list
        assert all(a is b for a, b in zip(same_list, members, strict=True))


@pytest.mark.parametrize("opt_level", LEVELS)
def test_dtypes_are_back_and_values_are_exactly_the_masters(opt_level: str) -> None:
    model, optimizer = new_pair()
    dtypes = {name: t.dtype for name, t in model.state_dict().items()}
    amp.initialize(model, optimizer, opt_level=opt_level, **scale_for(opt_level))
    for _ in range(3):
        train_step(model, optimizer, batch())
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    masters = [p.detach().float() for p in amp.master_params(optimizer)]
    amp.uninitialize()
    assert {name: t.dtype for name, t in model.state_dict().items()} == dtypes
    assert_identical(dict(model.state_dict()), saved)
    assert_identical([p.detach() for p in model.parameters()], masters)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O4", "O5"])
def test_untrained_weights_come_back_bit_identical(opt_level: str) -> None:
    model, optimizer = new_pair()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    amp.initialize(model, optimizer, opt_level=opt_level)
    amp.uninitialize()
    assert_identical(dict(model.state_dict()), before)


@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O4", "O5"])
def test_training_goes_on_as_plain_fp32_training_from_that_state(
    opt_level: str, factory: OptimizerFactory
) -> None:
    model, optimizer = new_pair(factory)
    amp.initialize(model, optimizer, opt_level=opt_level, **scale_for(opt_level))
    for _ in range(3):
        train_step(model, optimizer, batch())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    amp.uninitialize()
    states = state_of(optimizer)
    assert all(states)
    assert {t.dtype for state in states for t in state.values()} == {torch.float32}
    plain, plain_optimizer = new_pair(factory)
    plain.load_state_dict(saved[0])
    plain_optimizer.load_state_dict(saved[1])
    for _ in range(3):
        one = batch()
        found, expected = plain_step(model, optimizer, one), plain_step(plain, plain_optimizer, one)
        assert found == expected
    assert_identical(snapshot(model, optimizer), snapshot(plain, plain_optimizer))


def test_state_is_fp32_again_after_o3() -> None:
    model, optimizer = new_pair()
    amp.initialize(model, optimizer, opt_level="O3")
    train_step(model, optimizer, batch())
    amp.uninitialize()
    assert {t.dtype for state in state_of(optimizer) for t in state.values()} == {torch.float32}
    plain_step(model, optimizer, batch())


@pytest.mark.parametrize("opt_level", LEVELS)
def test_gradients_that_wait_for_a_step_come_back_with_the_parameters(opt_level: str) -> None:
    model, optimizer = new_pair()
    amp.initialize(model, optimizer, opt_level=opt_level, **scale_for(opt_level))
    inputs, targets = batch()
    backward(F.mse_loss(model(inputs), targets), optimizer)
    waiting = [p.grad.clone().float() for p in amp.master_params(optimizer)]
    amp.uninitialize()
    assert_identical([p.grad for p in model.parameters()], waiting)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_second_call_does_nothing(opt_level: str) -> None:
    amp.initialize(*new_pair(), opt_level=opt_level)
    amp.uninitialize()
    process = ProcessState.capture()
    amp.uninitialize()
    assert process.differences(ProcessState.capture()) == []


def test_a_call_without_a_session_does_nothing() -> None:
    process = ProcessState.capture()
    amp.uninitialize()
    assert process.differences(ProcessState.capture()) == []


def test_functions_that_need_a_session_say_so_afterwards() -> None:
    model, optimizer = new_pair()
    amp.initialize(model, optimizer, opt_level="O1")
    amp.uninitialize()
    loss = model(batch()[0]).sum()
    with pytest.raises(amp.AmpError, match="scale_loss: expected an earlier call"):
        backward(loss, optimizer)


def test_an_attribute_that_somebody_else_replaced_since_is_left_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amp.initialize(*new_pair(), opt_level="O1")
    theirs, ours = torch.tan, torch.tan.__wrapped__

    def replacement(x: torch.Tensor) -> torch.Tensor:
        return theirs(x)

    torch.tan = replacement
    amp.uninitialize()
    assert torch.tan is replacement
    half = torch.ones(1, dtype=torch.float16)
    assert replacement(half).dtype is torch.float16  # what they kept casts no longer
    torch.tan = ours


@pytest.mark.parametrize("opt_level", CAST_LEVELS)
def test_functions_kept_from_the_session_cast_no_longer(opt_level: str) -> None:
    amp.initialize(*new_pair(), opt_level=opt_level)
    kept = torch.mm
    amp.uninitialize()
    assert kept(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


def test_a_scheduler_made_during_the_session_goes_on_working() -> None:
    model, optimizer = new_pair()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train_step(model, optimizer, batch())
    scheduler.step()
    amp.uninitialize()
    before = snapshot(model, optimizer)
    plain_step(model, optimizer, batch())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.01 / 4
    assert not torch.equal(snapshot(model, optimizer)["updated"][0], before["updated"][0])


def test_groups_added_during_the_session_come_back_with_the_models_parameters() -> None:
    model, optimizer = new_pair(OPTIMIZERS["sgd"])
    late = nn.Linear(3, 3)
    amp.initialize([model, late], optimizer, opt_level="O2", loss_scale=128.0)
    optimizer.add_param_group({"params": list(late.parameters())})
    before = late.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        inputs, targets = batch()
        backward(F.mse_loss(late(model(inputs)), targets), optimizer)
        optimizer.step()
    masters = [p.detach().clone() for p in optimizer.param_groups[1]["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    amp.uninitialize()
    assert all(
        a is b for a, b in zip(optimizer.param_groups[1]["params"], late.parameters(), strict=True)
    )
    assert_identical([p.detach() for p in late.parameters()], masters)
    assert not torch.equal(late.weight.detach(), before.float())
