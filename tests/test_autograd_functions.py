"""`torch.autograd.Function` of the user, at O1 and with the decorators of amp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import assert_identical
from torch import nn
from torch.autograd.function import once_differentiable

import amp_patch as amp

FP32, HALF = torch.float32, torch.bfloat16


class Fp32Only(torch.autograd.Function):
    """Raises in half precision, as a kernel without one, and gives FP32 gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        check(x)
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        check(gradient)
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def check(x: torch.Tensor) -> None:
    if x.dtype is not FP32:
        raise TypeError(f"a kernel for FP32 alone, given {x.dtype}")


class Decorated(torch.autograd.Function):
    """The same with the decorators on the static methods."""

    @staticmethod
    @amp.float_function
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Fp32Only.forward(ctx, x)

    @staticmethod
    @amp.float_function
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return Fp32Only.backward(ctx, gradient)


class DecoratedAbove(torch.autograd.Function):
    """The same with the decorators on the other side."""

    @amp.float_function
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Fp32Only.forward(ctx, x)

    @amp.float_function
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return Fp32Only.backward(ctx, gradient)


@amp.float_function
def around_apply(x: torch.Tensor) -> torch.Tensor:
    return Fp32Only.apply(x)


WAYS = {
    "around the call": around_apply,
    "apply": amp.float_function(Fp32Only.apply),
    "on the methods": Decorated.apply,
    "above the methods": DecoratedAbove.apply,
}


class Net(nn.Module):
    def __init__(self, way: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self.linear(x))


def gradients_of(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net(x).float().sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def net_for(way: Any) -> Net:
    torch.manual_seed(0)
    return amp.initialize(Net(way), opt_level="O4", verbosity=0)


@pytest.mark.parametrize("way", WAYS)
def test_function_for_fp32_alone_runs_after_a_half_layer_and_gives_gradients(way: str) -> None:
    net = net_for(WAYS[way])
    x = torch.randn(4, 4)
    assert net(x).dtype is FP32
    found = gradients_of(net, x)
    amp.uninitialize()
    expected = gradients_of(net_for(lambda h: h.float() * h.float()), x)
    # The gradient of the half activation is rounded once, in the one graph as in the other.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    assert {gradient.dtype for gradient in found} == {FP32}


def test_without_a_decorator_it_says_what_it_got() -> None:
    with pytest.raises(TypeError, match=r"given torch\.bfloat16"):
        net_for(Fp32Only.apply)(torch.ones(1, 4))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opt_level", ["none", "O0"])
def test_decorated_functions_work_without_casts(opt_level: str, way: str) -> None:
    net = Net(WAYS[way])
    if opt_level != "none":
        amp.initialize(net, opt_level=opt_level, verbosity=0)
    assert {gradient.dtype for gradient in gradients_of(net, torch.ones(2, 4))} == {FP32}


class HalfProduct(torch.autograd.Function):
    """Products in forward and backward, which O1 casts in both."""

    seen: list[torch.dtype] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        products = gradient @ weight.t(), x.t() @ gradient
        HalfProduct.seen.extend(product.dtype for product in products)
        return products


def test_operations_inside_a_function_are_cast_and_its_gradients_fit_its_inputs() -> None:
    net = net_for(nn.Identity())
    weight = nn.Parameter(torch.ones(4, 4))
    x = torch.ones(4, 4, requires_grad=True)
    HalfProduct.seen.clear()
    output = HalfProduct.apply(x, weight)
    output.float().sum().backward()
    assert output.dtype is HALF
    assert HalfProduct.seen == [HALF, HALF]
    assert x.grad.dtype is weight.grad.dtype is FP32
    assert_identical(weight.grad, torch.full((4, 4), 4.0))
    del net


def test_torchs_own_custom_fwd_and_custom_bwd_work() -> None:
    class WithTorchs(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=FP32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.saved_tensors[0] * gradient

    net = net_for(WithTorchs.apply)
    assert {gradient.dtype for gradient in gradients_of(net, torch.ones(2, 4))} == {FP32}


def test_registered_apply_is_cast() -> None:
    class Library:
        function = Fp32Only

        @staticmethod
        def run(x: torch.Tensor) -> torch.Tensor:
            return Fp32Only.apply(x)

    net = net_for(lambda h: Library.run(h))  # noqa: PLW0108 (looks `run` up anew at each call)
    amp.register_float_function(Library, "run")
    try:
        assert net(torch.ones(2, 4)).dtype is FP32
    finally:
        amp.unregister_function(Library, "run")


def test_function_with_setup_context_and_vmap_works() -> None:
    class Square(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.saved_tensors[0] * gradient

    net = net_for(Square.apply)
    assert gradients_of(net, torch.ones(2, 4))[0].dtype is FP32
    assert torch.func.vmap(Square.apply)(torch.ones(3, 4)).shape == (3, 4)
