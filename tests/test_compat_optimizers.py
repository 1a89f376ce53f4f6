"""The optimizers with the names of apex, against the formulas of their papers in FP64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from amp_patch import AmpError
from amp_patch.compat.fused_adagrad import FusedAdagrad
from amp_patch.compat.fused_adam import FusedAdam
from amp_patch.compat.fused_lamb import FusedLAMB
from amp_patch.compat.fused_novograd import FusedNovoGrad
from amp_patch.compat.fused_sgd import FusedSGD
from amp_patch.compat.larc import LARC

STEPS = 8
SHAPES = ((3, 2), (5,), (1,))
# FP32 rounds each of a few dozen operations by 6e-8 of values around 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

Array = Any
Rule = Callable[[list[Array], list[Array], dict[str, Any], int], list[Array]]


def norm(value: Array) -> float:
    return math.sqrt(float((value**2).sum()))


def adam(
    lr: float = 1e-2,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
) -> Rule:
    def rule(w: list[Array], g: list[Array], memory: dict[str, Any], t: int) -> list[Array]:
        result = []
        for i, (weight, raw) in enumerate(zip(w, g, strict=True)):
            gradient = raw
            if not adam_w_mode:
                gradient = gradient + weight_decay * weight
            m = betas[0] * memory.get(("m", i), 0) + (1 - betas[0]) * gradient
            v = betas[1] * memory.get(("v", i), 0) + (1 - betas[1]) * gradient**2
            memory["m", i], memory["v", i] = m, v
            if bias_correction:
                m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
            step = m / (np.sqrt(v) + eps)
            if adam_w_mode:
                step = step + weight_decay * weight
            result.append(weight - lr * step)
        return result

    return rule


def lamb(
    lr: float = 1e-2,
    bias_correction: bool = True,
    weight_decay: float = 0.01,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
) -> Rule:
    beta1, beta2, eps = 0.9, 0.999, 1e-6

    def rule(w: list[Array], g: list[Array], memory: dict[str, Any], t: int) -> list[Array]:
        total = math.sqrt(sum(norm(one) ** 2 for one in g))
        g = [one / max(1.0, total / max_grad_norm) for one in g]
        result = []
        for i, (weight, raw) in enumerate(zip(w, g, strict=True)):
            gradient = raw
            if not adam_w_mode:
                gradient = gradient + weight_decay * weight
            share = 1 - beta1 if grad_averaging else 1.0
            m = beta1 * memory.get(("m", i), 0) + share * gradient
            v = beta2 * memory.get(("v", i), 0) + (1 - beta2) * gradient**2
            memory["m", i], memory["v", i] = m, v
            if bias_correction:
                m, v = m / (1 - beta1**t), v / (1 - beta2**t)
            step = m / (np.sqrt(v) + eps)
            if adam_w_mode:
                step = step + weight_decay * weight
            ratio = 1.0
            if (weight_decay or use_nvlamb) and norm(weight) and norm(step):
                ratio = norm(weight) / norm(step)
            result.append(weight - lr * ratio * step)
        return result

    return rule


def sgd(
    lr: float = 1e-2,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
) -> Rule:
    def rule(w: list[Array], g: list[Array], memory: dict[str, Any], t: int) -> list[Array]:
        result = []
        for i, (weight, raw) in enumerate(zip(w, g, strict=True)):
            step = raw
            if not wd_after_momentum:
                step = step + weight_decay * weight
            if momentum:
                old = memory.get(("b", i))
                buffer = step if old is None else momentum * old + (1 - dampening) * step
                memory["b", i] = buffer
                step = step + momentum * buffer if nesterov else buffer
            if wd_after_momentum:
                step = step + weight_decay * weight
            result.append(weight - lr * step)
        return result

    return rule


def novograd(
    lr: float = 1e-2,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    norm_type: int = 2,
    init_zero: bool = False,
) -> Rule:
    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def rule(w: list[Array], g: list[Array], memory: dict[str, Any], t: int) -> list[Array]:
        result = []
        for i, (weight, raw) in enumerate(zip(w, g, strict=True)):
            gradient = raw
            size = norm(gradient) if norm_type == 2 else float(abs(gradient).max())
            old = memory.get(("v", i), 0.0 if init_zero else size)
            power = norm_type or 1
            v = (beta2 * old**power + (1 - beta2) * size**power) ** (1 / power)
            memory["v", i] = v
            first, second = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
            denominator = v / math.sqrt(second) + eps
            share = 1 - beta1 if grad_averaging else 1.0
            if reg_inside_moment:
                gradient = gradient / denominator + weight_decay * weight
            m = beta1 * memory.get(("m", i), 0) + share * gradient
            memory["m", i] = m
            step = m / first
            if not reg_inside_moment:
                step = step / denominator + weight_decay * weight
            result.append(weight - lr * step)
        return result

    return rule


def adagrad(
    lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, adagrad_w_mode: bool = False
) -> Rule:
    def rule(w: list[Array], g: list[Array], memory: dict[str, Any], t: int) -> list[Array]:
        result = []
        for i, (weight, raw) in enumerate(zip(w, g, strict=True)):
            gradient = raw
            if not adagrad_w_mode:
                gradient = gradient + weight_decay * weight
            memory[i] = memory.get(i, 0) + gradient**2
            step = gradient / (np.sqrt(memory[i]) + eps)
            if adagrad_w_mode:
                step = step + weight_decay * weight
            result.append(weight - lr * step)
        return result

    return rule


CASES: dict[str, tuple[Any, Callable[..., Rule], dict[str, Any]]] = {
    "adamw": (FusedAdam, adam, {"weight_decay": 0.1}),
    "adam with l2": (FusedAdam, adam, {"weight_decay": 0.1, "adam_w_mode": False}),
    "adam uncorrected": (FusedAdam, adam, {"bias_correction": False, "betas": (0.8, 0.95)}),
    "lamb": (FusedLAMB, lamb, {}),
    "lamb with l2": (FusedLAMB, lamb, {"adam_w_mode": False, "grad_averaging": False}),
    "lamb without decay": (FusedLAMB, lamb, {"weight_decay": 0.0, "max_grad_norm": 0.1}),
    "nvlamb": (FusedLAMB, lamb, {"weight_decay": 0.0, "use_nvlamb": True}),
    "lamb uncorrected": (FusedLAMB, lamb, {"bias_correction": False, "max_grad_norm": 1e9}),
    "sgd": (FusedSGD, sgd, {"weight_decay": 0.1}),
    "momentum": (FusedSGD, sgd, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": (FusedSGD, sgd, {"momentum": 0.9, "nesterov": True}),
    "decay after momentum": (
        FusedSGD,
        sgd,
        {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
    ),
    "novograd": (FusedNovoGrad, novograd, {"weight_decay": 0.1}),
    "novograd inside": (FusedNovoGrad, novograd, {"weight_decay": 0.1, "reg_inside_moment": True}),
    "novograd largest": (FusedNovoGrad, novograd, {"norm_type": 0, "grad_averaging": False}),
    "novograd from zero": (FusedNovoGrad, novograd, {"init_zero": True, "bias_correction": False}),
    "adagrad": (FusedAdagrad, adagrad, {"weight_decay": 0.1}),
    "adagradw": (FusedAdagrad, adagrad, {"weight_decay": 0.1, "adagrad_w_mode": True}),
}


def gradients_of(step: int) -> list[Array]:
    random = np.random.default_rng(step)
    return [random.standard_normal(shape) for shape in SHAPES]


def start() -> list[Array]:
    random = np.random.default_rng(99)
    return [random.standard_normal(shape) for shape in SHAPES]


def run(optimizer: Any, parameters: list[torch.nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for parameter, gradient in zip(parameters, gradients_of(step), strict=True):
            parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
        optimizer.step()


def expected(rule: Rule, steps: int = STEPS) -> list[Array]:
    weights, memory = start(), {}
    for step in range(steps):
        weights = rule(weights, gradients_of(step), memory, step + 1)
    return weights


def parameters_in(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor(one, dtype=dtype)) for one in start()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_updates_follow_the_formula(name: str, dtype: torch.dtype) -> None:
    make, oracle, keywords = CASES[name]
    parameters = parameters_in(dtype)
    run(make(parameters, lr=1e-2, **keywords), parameters, STEPS)
    for parameter, value in zip(parameters, expected(oracle(**keywords)), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), value, **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_saved_state_continues_bit_for_bit(name: str) -> None:
    make, _, keywords = CASES[name]
    straight, resumed = parameters_in(torch.float32), parameters_in(torch.float32)
    run(make(straight, lr=1e-2, **keywords), straight, STEPS)
    before = make(resumed, lr=1e-2, **keywords)
    run(before, resumed, 3)
    after = make(resumed, lr=1e-2, **keywords)
    after.load_state_dict(before.state_dict())
    run(after, resumed, STEPS - 3, first=3)
    assert all(map(torch.equal, straight, resumed))


@pytest.mark.parametrize("name", ["adamw", "lamb", "momentum", "novograd", "adagrad"])
def test_half_parameters_are_updated_in_fp32(name: str) -> None:
    make, oracle, keywords = CASES[name]
    parameters = parameters_in(torch.float16)
    optimizer = make(parameters, lr=1e-2, **keywords)
    run(optimizer, parameters, STEPS)
    for parameter, value in zip(parameters, expected(oracle(**keywords)), strict=True):
        # A weight near 2 is rounded by 1e-3 at each of the steps, as are the gradients.
        np.testing.assert_allclose(parameter.detach().float().numpy(), value, atol=8e-3)
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert dtypes == {torch.float32}


def larc_rates(clip: bool) -> Rule:
    def rule(w: list[Array], g: list[Array], memory: dict[str, Any], t: int) -> list[Array]:
        lr, decay, trust, eps = 0.1, 0.05, 0.02, 1e-8
        result = []
        for weight, gradient in zip(w, g, strict=True):
            rate = trust * norm(weight) / (norm(gradient) + decay * norm(weight) + eps)
            rate = min(rate / lr, 1.0) if clip else rate
            result.append(weight - lr * rate * (gradient + decay * weight))
        return result

    return rule


@pytest.mark.parametrize("clip", [True, False])
def test_larc_follows_the_formula(clip: bool) -> None:
    parameters = parameters_in(torch.float32)
    optimizer = LARC(torch.optim.SGD(parameters, lr=0.1, weight_decay=0.05), 0.02, clip)
    run(optimizer, parameters, STEPS)
    for parameter, value in zip(parameters, expected(larc_rates(clip)), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), value, **TOLERANCE)
    assert optimizer.param_groups[0]["weight_decay"] == 0.05


def test_larc_leaves_zero_weights_to_the_optimizer() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    LARC(torch.optim.SGD([weight], lr=0.5)).step()
    assert weight.tolist() == [-0.5, -0.5]


def test_fused_sgd_takes_groups_with_their_own_lr() -> None:
    parameters = parameters_in(torch.float32)
    optimizer = FusedSGD([{"params": [p], "lr": 0.1} for p in parameters], momentum=0.9)
    assert optimizer.materialize_master_grads
    with pytest.raises(ValueError, match="lr"):
        FusedSGD(parameters)


def test_fused_sgd_zeroes_gradients_unless_told_otherwise() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    FusedSGD([weight], lr=0.1).zero_grad()
    assert weight.grad.tolist() == [0.0, 0.0]
    FusedSGD([weight], lr=0.1, set_grad_none=True).zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_amsgrad_is_refused(make: Any) -> None:
    with pytest.raises(AmpError, match="amsgrad=False"):
        make([torch.nn.Parameter(torch.ones(1))], amsgrad=True)


def test_arguments_of_a_retired_step_are_refused() -> None:
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(AmpError, match="scale_loss unscales"):
        optimizer.step(grads=[torch.ones(1)])


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = FusedAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(AmpError, match="SparseAdam"):
        optimizer.step()


def test_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = FusedAdam([weight], lr=0.1)

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert weight.item() < 2.0


def test_state_of_torch_adam_is_taken_over() -> None:
    ours, theirs = parameters_in(torch.float32), parameters_in(torch.float32)
    adam_of_torch = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    run(adam_of_torch, theirs, 3)
    run(torch.optim.AdamW(ours, lr=1e-2, weight_decay=0.1), ours, 3)
    optimizer = FusedAdam(ours, lr=1e-2)
    optimizer.load_state_dict(copy.deepcopy(adam_of_torch.state_dict()))
    run(optimizer, ours, 3, first=3)
    run(adam_of_torch, theirs, 3, first=3)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
