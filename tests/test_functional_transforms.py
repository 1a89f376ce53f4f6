"""torch.func, forward-mode AD and derivatives of derivatives, at O1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp, vmap

import amp_patch as amp
from amp_patch.slot import slot

FP32, HALF = torch.float32, torch.bfloat16
# Two graphs that compute the same round in different places: some units of bfloat16.
NEAR: Any = {"rtol": 2**-5, "atol": 2**-5}


def new_net(opt_level: str = "O4") -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return amp.initialize(net, opt_level=opt_level, verbosity=0)


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 3)


def loss_of(net: nn.Module) -> Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, parameters, (x,)).float().square().sum()

    return loss


def assert_cache_holds_plain_tensors() -> None:
    assert slot.session is not None
    entries = vars(slot.session.context.cache)["_entries"].values()
    for *_, cast in entries:
        assert type(cast) is torch.Tensor
        assert not torch._C._functorch.is_functorch_wrapped_tensor(cast)
    assert len(entries) > 0


def assert_ordinary_training_works(net: nn.Module) -> None:
    net.zero_grad()
    net(batch()).float().square().sum().backward()
    assert all(parameter.grad.dtype is FP32 for parameter in net.parameters())
    assert_cache_holds_plain_tensors()


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_per_sample_gradients_by_vmap_of_grad(opt_level: str) -> None:
    net = new_net(opt_level)
    net(batch())  # a warm cache
    parameters = dict(net.named_parameters())
    found = vmap(grad(loss_of(net)), (None, 0))(parameters, batch())
    for position, x in enumerate(batch()):
        net.zero_grad()
        net(x).float().square().sum().backward()
        for name, parameter in net.named_parameters():
            assert found[name].dtype is FP32
            torch.testing.assert_close(found[name][position], parameter.grad, **NEAR)
    assert_ordinary_training_works(net)


def test_functional_call_uses_the_values_it_is_given() -> None:
    net = new_net()
    before = net(batch())
    zeros = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    assert torch.count_nonzero(functional_call(net, zeros, (batch(),))) == 0
    assert_identical(net(batch()).detach(), before.detach())
    trained = {name: nn.Parameter(value) for name, value in zeros.items()}
    assert torch.count_nonzero(functional_call(net, trained, (batch(),))) == 0
    assert_identical(net(batch()).detach(), before.detach())


def test_gradients_of_func_are_those_of_backward() -> None:
    net = new_net()
    gradients, value = grad_and_value(loss_of(net))(dict(net.named_parameters()), batch())
    loss = net(batch()).float().square().sum()
    loss.backward()
    torch.testing.assert_close(value, loss.detach(), **NEAR)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, **NEAR)


@pytest.mark.parametrize("in_dims", [0, 1])
def test_vmap_casts_as_a_loop_does(in_dims: int) -> None:
    net = new_net()
    a, b = torch.randn(4, 4, 4), torch.randn(4, 4)

    def compute(one: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.matmul(one, b), b).softmax(-1)

    found = vmap(compute, in_dims)(a)
    expected = torch.stack([compute(one) for one in a.unbind(in_dims)])
    assert found.dtype is expected.dtype is FP32
    torch.testing.assert_close(found, expected, **NEAR)
    del net


def test_jacobians_agree_with_backward() -> None:
    net = new_net()
    x = batch()[0]
    found = jacrev(lambda x: net(x).float())(x)
    expected = torch.autograd.functional.jacobian(lambda x: net(x).float(), x)
    torch.testing.assert_close(found, expected, **NEAR)
    output, pull = vjp(lambda x: net(x).float(), x)
    torch.testing.assert_close(pull(torch.ones_like(output))[0], expected.sum(0), **NEAR)
    assert_ordinary_training_works(net)


def test_forward_mode_agrees_with_backward() -> None:
    net = new_net()
    net(batch())
    x, tangent = batch(), torch.ones(5, 3)
    _, found = jvp(lambda x: net(x).float(), (x,), (tangent,))
    jacobian = torch.autograd.functional.jacobian(lambda x: net(x).float().sum(0), x)
    expected = torch.stack([(jacobian[:, i] * tangent[i]).sum(-1) for i in range(5)])
    torch.testing.assert_close(found, expected, **NEAR)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        assert_identical(forward_ad.unpack_dual(net(dual).float()).tangent.detach(), found.detach())
    assert_ordinary_training_works(net)


def test_forward_mode_reaches_weights() -> None:
    net = new_net()
    net(batch())
    parameters = dict(net.named_parameters())
    tangents = {name: torch.ones_like(value) for name, value in parameters.items()}
    _, found = jvp(lambda parameters: loss_of(net)(parameters, batch()), (parameters,), (tangents,))
    gradients = grad(loss_of(net))(parameters, batch())
    expected = sum(gradient.sum() for gradient in gradients.values())
    torch.testing.assert_close(found, expected, **NEAR)
    assert_ordinary_training_works(net)


def test_double_backward_through_cached_casts() -> None:
    net = new_net()
    with torch.no_grad():
        net(batch())
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).float().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with amp.disable_casts():
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    for mixed, parameter in zip(found, net.parameters(), strict=True):
        if parameter.grad is None:
            assert mixed is None
        else:
            torch.testing.assert_close(mixed, parameter.grad, rtol=0.05, atol=0.05)


def test_hessian_of_a_small_function() -> None:
    net = new_net()
    b = torch.eye(3)
    found = torch.func.hessian(lambda x: (x @ b).float().square().sum())(torch.ones(3))
    torch.testing.assert_close(found, 2 * torch.eye(3), **NEAR)
    del net


def test_nested_transforms_leave_nothing_in_the_cache() -> None:
    net = new_net()
    loss = loss_of(net)
    parameters = dict(net.named_parameters())
    vmap(lambda x: grad(lambda p: grad(loss)(p, x)["0.weight"].sum())(parameters))(batch())
    assert_ordinary_training_works(net)


def test_ensembles_by_stacked_modules() -> None:
    nets = [nn.Linear(3, 2) for _ in range(3)]
    amp.initialize(nets, opt_level="O4", verbosity=0)
    parameters, buffers = torch.func.stack_module_state(nets)

    def run(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(nets[0], (parameters, buffers), (x,))

    found = vmap(run, (0, 0, None))(parameters, buffers, batch())
    assert found.dtype is HALF
    torch.testing.assert_close(found, torch.stack([net(batch()) for net in nets]), **NEAR)
