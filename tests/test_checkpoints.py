"""State dicts of a cast model hold the FP32 values, and loading one sets them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_patch as amp

FP16, FP32 = torch.float16, torch.float32
MASTERED = pytest.mark.parametrize("opt_level", ["O2", "O5"])
CAST = pytest.mark.parametrize("opt_level", ["O2", "O3", "O5"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.randn(2))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + self.table


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def started(opt_level: str) -> tuple[Net, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model under `opt_level`, its optimizer, and its state dict from before."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = values(model)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    return model, optimizer, before


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype is other[name].dtype, name
        assert torch.equal(value, other[name]), name


@MASTERED
def test_state_dict_is_what_it_was_before_rounding(opt_level: str) -> None:
    model, _, before = started(opt_level)
    assert_same(values(model), before)


@CAST
def test_state_dict_has_the_dtypes_of_the_model_as_it_was(opt_level: str) -> None:
    model, _, before = started(opt_level)
    found = values(model)
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in before.items()
    }


def test_state_dict_without_masters_has_the_rounded_values() -> None:
    model, _, before = started("O3")
    assert torch.equal(values(model)["linear.weight"], before["linear.weight"].half().float())


@MASTERED
def test_state_dict_has_the_exact_masters_after_a_step(opt_level: str) -> None:
    model, optimizer, _ = started(opt_level)
    with amp.scale_loss(model(torch.randn(4, 3)).square().mean() * 1e-2, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    weight = next(amp.master_params(optimizer))
    assert not torch.equal(weight, weight.half().float())
    assert torch.equal(values(model)["linear.weight"], weight)


@MASTERED
def test_state_dict_needs_no_gradient_unless_variables_are_kept(opt_level: str) -> None:
    model, *_ = started(opt_level)
    assert not any(value.requires_grad for value in model.state_dict().values())
    assert model.state_dict(keep_vars=True)["linear.weight"].requires_grad


@MASTERED
def test_state_dict_of_a_part_and_with_a_prefix_is_full_too(opt_level: str) -> None:
    model, _, before = started(opt_level)
    assert torch.equal(model.linear.state_dict()["weight"], before["linear.weight"])
    assert torch.equal(
        model.state_dict(prefix="net.")["net.linear.weight"], before["linear.weight"]
    )


@MASTERED
def test_state_dict_of_a_wrapper_made_later_is_full_too(opt_level: str) -> None:
    model, _, before = started(opt_level)
    wrapper = nn.ModuleDict({"inner": model})
    assert torch.equal(wrapper.state_dict()["inner.linear.weight"], before["linear.weight"])


@MASTERED
def test_load_sets_masters_exactly_and_the_model_rounded(opt_level: str) -> None:
    model, optimizer, _ = started(opt_level)
    state = values(Net())
    result = model.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same(values(model), state)
    assert torch.equal(next(amp.master_params(optimizer)), state["linear.weight"])
    assert torch.equal(model.linear.weight, state["linear.weight"].to(model.linear.weight.dtype))


@CAST
def test_load_keeps_the_model_cast_and_its_parameters_the_same_objects(opt_level: str) -> None:
    model, _, _ = started(opt_level)
    before = {name: (parameter, parameter.dtype) for name, parameter in model.named_parameters()}
    model.load_state_dict(values(Net()))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert parameter.dtype is before[name][1]


@MASTERED
def test_step_after_a_load_starts_from_the_loaded_masters(opt_level: str) -> None:
    model, optimizer, _ = started(opt_level)
    state = values(Net())
    model.load_state_dict(state)
    for parameter in amp.master_params(optimizer):
        parameter.grad = torch.full_like(parameter, 2.0**-20)
    optimizer.step()
    assert torch.equal(values(model)["linear.weight"], state["linear.weight"] - 0.1 * 2.0**-20)


@MASTERED
def test_half_checkpoint_loads_into_the_masters(opt_level: str) -> None:
    model, *_ = started(opt_level)
    state = {
        name: value.half() if value.is_floating_point() else value
        for name, value in values(Net()).items()
    }
    model.load_state_dict(state)
    assert torch.equal(values(model)["linear.weight"], state["linear.weight"].float())


@MASTERED
def test_part_of_a_checkpoint_sets_only_that_part(opt_level: str) -> None:
    model, _, before = started(opt_level)
    weight = torch.randn(2, 3)
    model.load_state_dict({"linear.weight": weight}, strict=False)
    assert_same(values(model), {**before, "linear.weight": weight})


@CAST
def test_checkpoint_of_another_shape_is_refused_by_torch_and_sets_nothing(opt_level: str) -> None:
    model, *_ = started(opt_level)
    before = values(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"linear.weight": torch.zeros(3, 3)}, strict=False)
    assert_same(values(model), before)


@CAST
def test_load_that_assigns_leaves_a_model_that_runs_and_has_the_values(opt_level: str) -> None:
    model, _, _ = started(opt_level)
    state = values(Net())
    try:
        model.load_state_dict(state, assign=True)
    except amp.AmpError as error:
        assert "assign" in str(error)  # noqa: PT017 (either is right: to refuse, or to work)
        return
    model(torch.randn(4, 3))
    found = {name: value.float() for name, value in values(model).items()}
    assert_same(found, {name: value.float() for name, value in state.items()})


@torch.no_grad()
def fill(model: Net) -> None:
    model.linear.weight.fill_(7.0)


@torch.no_grad()
def clamp(model: Net) -> None:
    model.linear.weight.clamp_(-0.1, 0.1)


def initialise(model: Net) -> None:
    nn.init.constant_(model.linear.weight, 3.0)


WRITES = pytest.mark.parametrize("write", [fill, clamp, initialise])


@WRITES
@MASTERED
def test_what_the_user_wrote_into_the_model_is_in_the_state_dict(
    opt_level: str, write: Callable[[Net], None]
) -> None:
    model, *_ = started(opt_level)
    write(model)
    assert torch.allclose(
        values(model)["linear.weight"], model.linear.weight.float(), atol=1e-2, rtol=0
    )
    half = model.linear.weight.dtype
    assert torch.equal(values(model)["linear.weight"].to(half), model.linear.weight)


@WRITES
@MASTERED
def test_copy_made_after_the_user_wrote_has_what_was_written(
    opt_level: str, write: Callable[[Net], None]
) -> None:
    model, *_ = started(opt_level)
    write(model)
    twin = copy.deepcopy(model)
    assert_same(values(twin), values(model))


@MASTERED
def test_copy_has_the_exact_values_and_a_life_of_its_own(opt_level: str) -> None:
    model, _, before = started(opt_level)
    twin = copy.deepcopy(model)
    assert_same(values(twin), before)
    state = values(Net())
    twin.load_state_dict(state)
    assert_same(values(twin), state)
    assert_same(values(model), before)
    fill(model)
    assert_same(values(twin), state)


@MASTERED
def test_copy_of_a_copy_is_exact_after_the_first_is_gone(opt_level: str) -> None:
    model, optimizer, before = started(opt_level)
    twin = copy.deepcopy(copy.deepcopy(model))
    del model, optimizer
    assert_same(values(twin), before)


@CAST
def test_checkpoint_goes_into_a_model_without_amp_and_back(opt_level: str) -> None:
    model, *_ = started(opt_level)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain = Net()
    plain.load_state_dict(torch.load(buffer))
    assert plain.linear.weight.dtype is FP32
    state = values(plain)
    model.load_state_dict(state)
    assert_same(values(model), state)


@CAST
def test_state_dict_is_that_of_plain_torch_after_uninitialize(opt_level: str) -> None:
    model, *_ = started(opt_level)
    before = values(model)
    amp.uninitialize()
    assert_same(values(model), before)
    assert model.state_dict(keep_vars=True)["linear.weight"] is model.linear.weight


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O4"])
def test_model_that_is_not_cast_saves_its_own_tensors(opt_level: str) -> None:
    model, *_ = started(opt_level)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    assert state["linear.weight"] is model.linear.weight
