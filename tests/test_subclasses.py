"""Tensor subclasses, modes, fake and meta tensors, inference mode and hooks, at O1."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amp_patch as amp

FP32, HALF = torch.float32, torch.bfloat16


def new_net(opt_level: str = "O4") -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return amp.initialize(net, opt_level=opt_level, verbosity=0)


@pytest.fixture
def net() -> nn.Sequential:
    return new_net()


# -- subclasses -----------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass without code of its own: results are of the subclass, as torch does."""


class Noting(torch.Tensor):
    """A subclass that sees every call."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


class Refusing:
    """A tensor-like that takes over the operations it knows, by the function itself."""

    table: dict[Any, Callable[..., str]] = {}  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.table.get(function, lambda *_: NotImplemented)(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Tagged, Noting])
def test_subclass_stays_and_is_cast(kind: type[torch.Tensor], net: nn.Sequential) -> None:
    x = torch.ones(4, 4).as_subclass(kind)
    for result in (torch.mm(x, x), x @ x, F.linear(x, x), net(x), x.matmul(x)):
        assert type(result) is kind
        assert result.dtype is HALF
    for result in (torch.exp(net(x)), net(x).softmax(-1)):
        assert type(result) is kind
        assert result.dtype is FP32


def test_subclass_sees_the_operations_and_gradients_flow(net: nn.Sequential) -> None:
    Noting.calls.clear()
    x = torch.ones(4, 4).as_subclass(Noting).requires_grad_()
    net(x).float().sum().backward()
    assert {"linear", "tanh"} <= set(Noting.calls)
    assert net[0].weight.grad.dtype is x.grad.dtype is FP32


def test_tables_keyed_by_functions_know_them_before_and_after(net: nn.Sequential) -> None:
    Refusing.table.clear()
    Refusing.table[torch.mm] = lambda *_: "mm"
    Refusing.table[torch.exp] = lambda *_: "exp"
    assert torch.mm(Refusing(), torch.ones(2, 2)) == "mm"
    assert torch.exp(Refusing()) == "exp"
    amp.uninitialize()
    assert torch.mm(Refusing(), torch.ones(2, 2)) == "mm"


def test_parameter_of_a_subclass_is_cast_and_never_stale(net: nn.Sequential) -> None:
    class Weight(nn.Parameter):
        """A parameter class of the user."""

    layer = nn.Linear(4, 4, bias=False)
    layer.weight = Weight(torch.ones(4, 4))
    assert layer(torch.ones(1, 4)).dtype is HALF
    layer.weight.data.fill_(2)
    assert_identical(layer(torch.ones(1, 4)).detach().float(), torch.full((1, 4), 8.0))
    layer(torch.ones(1, 4)).float().sum().backward()
    assert layer.weight.grad.dtype is FP32


def test_buffers_and_uninitialized_parameters_work(net: nn.Sequential) -> None:
    lazy = nn.LazyLinear(3)
    lazy(torch.ones(2, 5))
    amp.initialize(lazy, opt_level="O4", verbosity=0)
    assert lazy(torch.ones(2, 5)).dtype is HALF
    buffer = nn.Buffer(torch.ones(4, 4)) if hasattr(nn, "Buffer") else torch.ones(4, 4)
    assert F.linear(torch.ones(1, 4), buffer).dtype is HALF


def test_nested_and_masked_and_sparse_tensors_still_work(net: nn.Sequential) -> None:
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(torch.mm(sparse, torch.ones(4, 4)).float(), torch.ones(4, 4))


# -- modes ----------------------------------------------------------------------------------------


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


def test_function_mode_sees_operations_and_casts_hold(net: nn.Sequential) -> None:
    expected = net(torch.ones(1, 4)).detach()
    with Counting() as mode:
        found = net(torch.ones(1, 4)).detach()
    assert_identical(found, expected)
    assert mode.names.count("linear") == 2


def test_default_device_mode_works(net: nn.Sequential) -> None:
    expected = net(torch.ones(1, 4)).detach()
    with torch.device("cpu"):
        assert_identical(net(torch.ones(1, 4)).detach(), expected)
    with torch.device("meta"):
        assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype is HALF


class Passing(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Passing, lambda: FlopCounterMode(display=False)])
def test_dispatch_modes_work(mode: Callable[[], Any], net: nn.Sequential) -> None:
    expected = net(torch.ones(1, 4)).detach()
    with mode():
        assert_identical(net(torch.ones(1, 4)).detach(), expected)
    assert_identical(net(torch.ones(1, 4)).detach(), expected)


# -- fake and meta tensors ------------------------------------------------------------------------


def test_fake_tensors_are_cast_and_never_kept(net: nn.Sequential) -> None:
    expected = net(torch.ones(1, 4)).detach()
    amp.clear_cache()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = net(mode.from_tensor(torch.ones(1, 4)))
        assert isinstance(fake, FakeTensor)
        assert fake.dtype is HALF
    found = net(torch.ones(1, 4))
    assert type(found) is torch.Tensor
    assert_identical(found.detach(), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # with a warm cache
        assert isinstance(net(mode.from_tensor(torch.ones(1, 4))), FakeTensor)


def test_fake_model_runs(net: nn.Sequential) -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 4)
        assert model(torch.ones(1, 4)).dtype is HALF
        model(torch.ones(1, 4)).float().sum().backward()
        assert model.weight.grad.dtype is FP32


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_meta_model_has_the_dtypes_of_the_real_one(opt_level: str) -> None:
    real = new_net(opt_level)
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    amp.initialize(meta, opt_level=opt_level, verbosity=0)
    for count in (1, 2):  # the second from the cache
        output = meta(torch.ones(count, 4, device="meta"))
        assert output.dtype is real(torch.ones(count, 4)).dtype
        assert output.device.type == "meta"
    meta.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert_identical(meta(torch.ones(1, 4)).detach(), real(torch.ones(1, 4)).detach())


# -- inference mode -------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_inference_mode_leaves_nothing_behind_for_training(opt_level: str) -> None:
    net = new_net(opt_level)
    with torch.inference_mode():
        inferred = net(torch.ones(1, 4)).clone()
    output = net(torch.ones(1, 4))
    output.float().sum().backward()
    assert_identical(output.detach(), inferred.detach().clone())
    assert all(parameter.grad is not None for parameter in net.parameters())
    with torch.inference_mode():
        assert_identical(net(torch.ones(1, 4)), inferred)


def test_weights_made_in_inference_mode_are_cast(net: nn.Sequential) -> None:
    with torch.inference_mode():
        layer = nn.Linear(4, 4)
    with torch.no_grad():
        first = layer(torch.ones(1, 4))
    with torch.inference_mode():
        layer.weight.zero_()
        layer.bias.zero_()
        assert torch.count_nonzero(layer(torch.ones(1, 4))) == 0
    assert first.dtype is HALF


# -- hooks ----------------------------------------------------------------------------------------


def test_hooks_on_modules_tensors_and_weights_see_what_the_casts_made(net: nn.Sequential) -> None:
    seen: dict[str, torch.dtype] = {}
    net[0].register_forward_pre_hook(lambda _, args: seen.update(entry=args[0].dtype))
    net[0].register_forward_hook(lambda _, __, output: seen.update(output=output.dtype))
    net[2].register_full_backward_hook(lambda _, __, o: seen.update(backward=o[0].dtype))
    net[0].weight.register_hook(lambda gradient: seen.update(weight=gradient.dtype))
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.update(final=p.grad.dtype))
    net(torch.ones(2, 4)).float().sum().backward()
    assert seen == {"entry": FP32, "output": HALF, "backward": HALF, "weight": FP32, "final": FP32}


def test_forward_hook_may_replace_the_output(net: nn.Sequential) -> None:
    net[0].register_forward_hook(lambda _, __, output: output.float())
    assert net(torch.ones(1, 4)).dtype is HALF


def test_global_hooks_and_saved_tensor_hooks_work(net: nn.Sequential) -> None:
    names: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: names.append(type(module).__name__)
    )
    packed: list[torch.dtype] = []
    try:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: packed.append(tensor.dtype) or tensor, lambda tensor: tensor
        ):
            output = net(torch.ones(1, 4))
        output.float().sum().backward()
    finally:
        handle.remove()
    assert names == ["Linear", "Tanh", "Linear", "Sequential"]
    assert HALF in packed


def test_a_hook_that_raises_leaves_no_scope_open(net: nn.Sequential) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("hook")

    handle = net[1].register_forward_hook(fail)
    with pytest.raises(ValueError, match="hook"):
        net(torch.ones(1, 4))
    handle.remove()
    other = amp.initialize(nn.Linear(4, 4), opt_level="O5", verbosity=0)
    assert other(torch.ones(1, 4)).dtype is FP32
    assert net(torch.ones(1, 4)).dtype is HALF


def test_parametrized_and_normed_weights_are_cast(net: nn.Sequential) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with nn.utils.parametrize.cached():
        assert layer(torch.ones(1, 4)).dtype is HALF
    layer(torch.ones(1, 4)).float().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {FP32}


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_saved_bytes_of_an_identity_cast_are_none(mode: Any, net: nn.Sequential) -> None:
    x = torch.ones(2, 4, dtype=HALF)
    packed: list[torch.Tensor] = []
    with (
        mode(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
        ),
    ):
        net[0](x)
        net[0](x)
    # Of each call its half input; of both together the one cast of the weight.
    storages = {tensor.untyped_storage().data_ptr() for tensor in packed}
    assert len(storages) <= 2
