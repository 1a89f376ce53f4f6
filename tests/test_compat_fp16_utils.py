"""Half precision by hand: FP16_Optimizer, lists of masters, half models, loss scalers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from amp_patch import AmpError
from amp_patch.compat import half_models, param_lists
from amp_patch.compat.flat_fp16_optimizer import FP16_Optimizer as FlatOptimizer
from amp_patch.compat.fp16_optimizer import FP16_Optimizer
from amp_patch.compat.fused_adam import FusedAdam
from amp_patch.compat.loss_scalers import DynamicLossScaler, LossScaler, to_python_float

KINDS = {"masters": FP16_Optimizer, "flat": FlatOptimizer}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).half()


def backward(optimizer: Any, model: torch.nn.Module, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(2, 4).half()).float().mean() * factor)


def masters(optimizer: Any) -> torch.Tensor:
    found = [p.detach().flatten() for group in optimizer.param_groups for p in group["params"]]
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_training_equals_that_of_fp32_masters_by_hand(kind: str, scale: float) -> None:
    model = network()
    values = [p.detach().double().numpy().copy() for p in model.parameters()]
    optimizer = KINDS[kind](torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=scale)
    for _ in range(3):
        backward(optimizer, model)
        gradients = [p.grad.double().numpy() / scale for p in model.parameters()]
        optimizer.step()
        values = [v - 0.1 * g for v, g in zip(values, gradients, strict=True)]
        for parameter, value in zip(model.parameters(), values, strict=True):
            # The model is the FP32 master, which rounds at 6e-8, rounded to half.
            rounded = value.astype(np.float16).astype(np.float64)
            np.testing.assert_allclose(parameter.detach().double().numpy(), rounded, atol=2e-3)
    total = np.concatenate([value.ravel() for value in values])
    np.testing.assert_allclose(masters(optimizer).double().numpy(), total, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
def test_overflow_skips_the_step(kind: str, is_dynamic: bool) -> None:
    model = network()
    optimizer = KINDS[kind](
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        static_loss_scale=8.0,
        dynamic_loss_scale=is_dynamic,
        dynamic_loss_args={"init_scale": 8.0},
    )
    before = masters(optimizer).clone()
    backward(optimizer, model, 1e30)
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    optimizer.step()
    assert torch.equal(masters(optimizer), before)
    assert optimizer.state == {}
    assert optimizer.loss_scale == (4.0 if is_dynamic else 8.0)
    backward(optimizer, model)
    optimizer.step()
    assert not torch.equal(masters(optimizer), before)


def test_state_of_the_optimizer_moves_to_the_masters() -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    model.half()
    optimizer = FP16_Optimizer(inner)
    assert [state["momentum_buffer"].dtype for state in optimizer.state.values()] == (
        [torch.float32] * 2
    )


def test_accumulation_updates_the_masters_once() -> None:
    model = network()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=16.0)
    backward(optimizer, model)
    single = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    for _ in range(2):
        loss = model(torch.ones(2, 4).half()).float().mean()
        optimizer.backward(loss, update_master_grads=False)
    optimizer.update_master_grads()
    double = [p.grad for group in optimizer.param_groups for p in group["params"]]
    for one, two in zip(single, double, strict=True):
        torch.testing.assert_close(two, 2 * one)


def test_closure_is_called_again_until_the_scale_fits() -> None:
    model = network()
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**24},
    )
    before = masters(optimizer).clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4).half()).float().mean()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    assert optimizer.loss_scale < 2.0**24
    assert not torch.equal(masters(optimizer), before)


def test_closure_that_always_overflows_is_an_error() -> None:
    model = network()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
    with pytest.raises(AmpError, match="loss scale 8"):
        optimizer.step(lambda: backward(optimizer, model, 1e30))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_state_continues_bit_for_bit(kind: str) -> None:
    def trained(steps: int, model: torch.nn.Module, optimizer: Any) -> None:
        for _ in range(steps):
            backward(optimizer, model)
            optimizer.step()

    def made() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = network()
        return model, KINDS[kind](FusedAdam(model.parameters(), lr=0.01), dynamic_loss_scale=True)

    straight, optimizer = made()
    trained(20, straight, optimizer)
    model, before = made()
    trained(18, model, before)
    saved = before.state_dict()
    resumed, after = made()
    after.load_state_dict(saved)
    trained(2, resumed, after)
    assert after.loss_scale == optimizer.loss_scale
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))


def test_masters_of_another_model_are_refused() -> None:
    one = FP16_Optimizer(torch.optim.SGD(network().parameters(), lr=0.1))
    other = FP16_Optimizer(torch.optim.SGD(torch.nn.Linear(2, 2).half().parameters(), lr=0.1))
    with pytest.raises(AmpError, match="other shapes"):
        one.load_state_dict(other.state_dict())


@pytest.mark.parametrize("flat_master", [False, True])
def test_lists_of_masters_go_round(flat_master: bool) -> None:
    model = network()
    ours, theirs = param_lists.prep_param_lists(model, flat_master=flat_master)
    assert {one.dtype for one in theirs} == {torch.float32}
    model(torch.ones(2, 4).half()).sum().backward()
    param_lists.model_grads_to_master_grads(ours, theirs, flat_master=flat_master)
    torch.optim.SGD(theirs, lr=1.0).step()
    expected = [p.detach().float() - p.grad.float() for p in ours]
    param_lists.master_params_to_model_params(ours, theirs, flat_master=flat_master)
    for parameter, value in zip(ours, expected, strict=True):
        assert torch.equal(parameter, value.half())


def test_flat_master_needs_one_dtype() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).half(), torch.nn.Linear(2, 2))
    with pytest.raises(AmpError, match="one dtype"):
        param_lists.prep_param_lists(model, flat_master=True)


def test_batchnorm_stays_in_fp32() -> None:
    model = half_models.network_to_half(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LSTM(2, 2))
    )
    assert model[1][1].weight.dtype is torch.float32
    assert model[1][0].weight.dtype is torch.float16
    wrapped = half_models.FP16Model(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    )
    assert wrapped(torch.ones(3, 2)).dtype is torch.float16
    assert wrapped.network[1].running_mean.dtype is torch.float32


def test_dynamic_scaler_follows_its_window() -> None:
    scaler = DynamicLossScaler(init_scale=4.0, scale_factor=2.0, scale_window=2)
    scales = []
    for overflow in (True, False, False, False, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    # Grows 2 and 4 iterations after the last overflow; ends at the floor of 1.
    assert scales == [2.0, 2.0, 4.0, 4.0, 2.0, 1.0, 1.0]
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([float("inf")])
    assert scaler.has_overflow([weight])
    assert not LossScaler(2.0).has_overflow([weight])


def test_static_scaler_scales_backward() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    scaler = LossScaler(4.0)
    scaler.backward(weight.sum())
    assert weight.grad.item() == 4.0
    assert scaler.scale_gradient(None, (torch.ones(1),), None)[0].item() == 4.0
    assert to_python_float([3.0]) == to_python_float(torch.tensor(3.0)) == 3.0
