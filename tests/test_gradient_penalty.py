"""Gradients of gradients: `amp.grad` scales inside, and its result is unscaled FP32."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from injections import overflowing
from networks import LEVELS, ROUNDING_UNIT, assert_identical, gradients, snapshot
from plain_torch import assert_trains_as_in_fp32
from torch import nn

import amp_patch as amp

SCALED_LEVELS = ("O1", "O2")
SCALES = {level: {"loss_scale": 128.0} for level in SCALED_LEVELS}  # nothing overflows


def critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def critic_without_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


CRITICS: dict[str, Callable[[], nn.Sequential]] = {
    "plain": critic_without_norm,
    "batchnorm": critic,
}


def penalised(library: Any, build: Callable[[], nn.Sequential], **options: Any) -> Any:
    """A critic whose gradient by its input is to have length one."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    library.initialize(model, optimizer, **options)
    losses = []
    for _ in range(5):
        inputs = torch.randn(6, 4, requires_grad=True)
        optimizer.zero_grad()
        found = model(inputs)
        (slopes,) = library.grad(found.sum(), inputs, create_graph=True)
        penalty = (slopes.norm(2, 1) - 1).square().mean()
        loss = found.float().mean() + 10 * penalty
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return [model], losses


@pytest.mark.parametrize("build", CRITICS.values(), ids=CRITICS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_gradient_penalty_trains_as_in_fp32(
    opt_level: str, build: Callable[[], nn.Sequential]
) -> None:
    if opt_level == "O3" and build is critic:
        pytest.skip("a half BatchNorm differentiated twice is outside what O3 promises")
    assert_trains_as_in_fp32(
        lambda library, **options: penalised(library, build, **options), opt_level, factor=2.0
    )


@pytest.mark.parametrize("opt_level", LEVELS)
def test_grad_is_unscaled_fp32_and_near_fp64(opt_level: str) -> None:
    model = critic_without_norm()
    exact = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, **SCALES.get(opt_level, {}))
    inputs = torch.randn(6, 4, requires_grad=True)
    (found,) = amp.grad(model(inputs).sum(), inputs)
    with amp.disable_casts():
        wide = inputs.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(exact(wide).sum(), wide)
    assert found.dtype is torch.float32
    assert not found.requires_grad
    unit = ROUNDING_UNIT[
        torch.float32 if opt_level == "O0" else amp.OPT_LEVELS[opt_level].half_dtype
    ]
    # Two layers: two roundings forward, weights, and two backward, with some room.
    assert (found.double() - expected).norm() <= 16 * unit * expected.norm()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_gradient_too_small_for_half_survives_inside_grad(opt_level: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    model.load_state_dict({"weight": torch.full((1, 1), 0.5)})
    inputs = torch.ones(1, 1, requires_grad=True)
    tiny = 2.0**-27  # float16 ends at 2^-24
    (found,) = amp.grad(model(inputs).float() * tiny, inputs)
    assert found.item() == 0.5 * tiny
    # What the scale is for: without it the same gradient is lost.
    (lost,) = torch.autograd.grad(model(inputs).float() * tiny, inputs)
    assert lost.item() == 0.0


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_penalty_on_tiny_gradients_reaches_the_weights(opt_level: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=2.0**12)
    model.load_state_dict({"weight": torch.tensor([[0.75, -1.0]])})  # of length 1.25
    inputs = torch.ones(1, 2, requires_grad=True)
    small = 2.0**-23
    (slopes,) = amp.grad(model(inputs).float() * small, inputs, create_graph=True)
    assert slopes.tolist() == [[0.75 * small, -small]]
    with amp.scale_loss(slopes.norm(), optimizer) as scaled:
        scaled.backward()
    # The direction of the weight, rounded to half on the way.
    expected = torch.tensor([[0.6, -0.8]]) * small
    torch.testing.assert_close(gradients(optimizer)[0], expected, rtol=4 * 2.0**-11, atol=0)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_inside_grad_skips_the_step(opt_level: str) -> None:
    model = critic_without_norm()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    amp.initialize(model, optimizer, opt_level=opt_level)
    before = snapshot(model, optimizer)
    inputs = torch.randn(6, 4, requires_grad=True)
    (slopes,) = amp.grad(overflowing(model(inputs).float().sum()), inputs, create_graph=True)
    assert not slopes.isfinite().all()
    penalty = (slopes.norm(2, 1) - 1).square().mean()
    with amp.scale_loss(penalty, optimizer) as scaled:  # no warning: a smaller scale helps
        scaled.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert amp.loss_scale() == 2.0**15
    assert_identical(snapshot(model, optimizer), before)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_a_penalty_finds_its_scale_without_a_warning(opt_level: str) -> None:
    model = critic_without_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=opt_level)
    skipped = []
    for _ in range(10):
        inputs = torch.randn(6, 4, requires_grad=True)
        optimizer.zero_grad()
        (slopes,) = amp.grad(model(inputs).sum(), inputs, create_graph=True)
        loss = (slopes.norm(2, 1) - 1).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    assert sum(skipped) <= 4
    assert not any(skipped[4:])


@pytest.mark.parametrize("opt_level", LEVELS)
def test_grad_takes_lists_weights_and_unused_inputs_as_torch_does(opt_level: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, **SCALES.get(opt_level, {}))
    model.load_state_dict({"weight": torch.tensor([[0.5, -0.25]])})
    inputs, unused = torch.ones(1, 2, requires_grad=True), torch.ones(1, requires_grad=True)
    outputs = [model(inputs).float(), model(inputs).float()]
    found = amp.grad(
        outputs,
        [inputs, unused],
        [torch.full((1, 1), 2.0), torch.full((1, 1), 4.0)],
        allow_unused=True,
    )
    assert found[0].tolist() == [[3.0, -1.5]]
    assert found[1] is None


def test_grad_uses_the_scale_of_its_loss() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", num_losses=2, loss_scale=[2.0, 2.0**20])
    inputs = torch.ones(1, 1, requires_grad=True)
    tiny = 2.0**-30
    assert amp.grad(model(inputs).float() * tiny, inputs, loss_id=0)[0].item() == 0.0
    assert amp.grad(model(inputs).float() * tiny, inputs, loss_id=1)[0].item() != 0.0
    with pytest.raises(amp.AmpError, match="loss_id: expected 0 to 1, found 2"):
        amp.grad(model(inputs).sum(), inputs, loss_id=2)


def test_grad_of_float64_stays_float64() -> None:
    model = nn.Linear(1, 1, bias=False)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1")
    inputs = torch.full((1,), 0.1, dtype=torch.float64, requires_grad=True)
    (found,) = amp.grad(inputs.square().sum(), inputs)
    assert found.dtype is torch.float64
    assert found.item() == pytest.approx(0.2, rel=2.0**-50)


def test_grad_before_initialize_says_so_and_disabled_is_torchs() -> None:
    inputs = torch.ones(2, requires_grad=True)
    with pytest.raises(amp.AmpError, match=r"grad: expected an earlier call of amp\.initialize"):
        amp.grad(inputs.sum(), inputs)
    model = nn.Linear(2, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)
    assert_identical(amp.grad((inputs * math.pi).sum(), inputs)[0], torch.full((2,), math.pi))


OPTIONS_OF_TORCH: dict[str, dict[str, Any]] = {
    "only_inputs": {"only_inputs": True},
    "materialize_grads": {"materialize_grads": True},
    "allow_unused": {"allow_unused": True},
    "batched": {"is_grads_batched": True},
}


@pytest.mark.parametrize("options", OPTIONS_OF_TORCH.values(), ids=OPTIONS_OF_TORCH)
def test_every_argument_of_torchs_own_function_is_taken(options: dict[str, Any]) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O0", loss_scale=128.0)
    x, unused = torch.randn(2, 4, requires_grad=True), torch.ones(3, requires_grad=True)
    inputs = [x, unused] if {"materialize_grads", "allow_unused"} & set(options) else [x]
    outputs = model(x)
    weights = torch.ones(5, 2, 1) if "is_grads_batched" in options else torch.ones(2, 1)
    found = amp.grad(outputs, inputs, weights, True, **options)
    expected = torch.autograd.grad(outputs, inputs, weights, True, **options)
    assert_identical(list(found), list(expected))
    names = list(inspect.signature(torch.autograd.grad).parameters)
    assert list(inspect.signature(amp.grad).parameters) == [*names, "loss_id"]
