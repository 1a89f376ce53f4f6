"""torch.utils.checkpoint: what is run again in backward has the casts that it had in forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from networks import assert_identical
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import amp_patch as amp

VARIANTS = pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
# Cast weights that are used several times have their gradients added in half precision, and the
# recomputation of the reentrant variant casts once more: a few units of bfloat16 at 1.
NEAR: Any = {"rtol": 2**-6, "atol": 2**-6}


class Net(nn.Module):
    """Two blocks, each of which may be recomputed; weights are also used outside of them."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.call(self.first, x)
        h = self.call(self.second, h) + self.first(h)
        return self.call(self.second, h)


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def recomputed(reentrant: bool) -> Callable[..., torch.Tensor]:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=reentrant)

    return call


def nothing(net: Net) -> None:
    pass


def warm_without_gradients(net: Net) -> None:
    with torch.no_grad():
        net.first(torch.ones(2, 4))
        net.second(torch.ones(2, 4))


def warm_with_gradients(net: Net) -> None:
    net.first(torch.ones(2, 4))


def warm_halfway(net: Net) -> None:
    net.second[0](torch.ones(2, 4))
    with torch.no_grad():
        net.second[2](torch.ones(2, 4))


BEFORE = {
    f.__name__: f for f in (nothing, warm_without_gradients, warm_with_gradients, warm_halfway)
}


def gradients(
    call: Callable[..., torch.Tensor],
    opt_level: str = "O4",
    before: Callable[[Net], None] = nothing,
    around: Callable[[], Any] = nullcontext,
    between: Callable[[Net], None] = nothing,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Net(call)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=opt_level, verbosity=0, loss_scale=128.0)
    x = torch.randn(2, 4, requires_grad=True)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        before(net) if opt_level in ("O1", "O4") else None
        with around():
            loss = net(x).float().square().sum()
        between(net)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        found += [parameter.grad.clone() for parameter in amp.master_params(optimizer)]
        optimizer.step()
    found.append(x.grad.clone())
    amp.uninitialize()
    return found


@VARIANTS
@pytest.mark.parametrize("before", BEFORE)
def test_gradients_are_those_without_recomputation(before: str, reentrant: bool) -> None:
    found = gradients(recomputed(reentrant), before=BEFORE[before])
    expected = gradients(plain, before=BEFORE[before])
    assert {gradient.dtype for gradient in found} == {torch.float32}
    torch.testing.assert_close(found, expected, **NEAR)


@VARIANTS
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O4", "O5"])
def test_recomputation_works_at_every_level(opt_level: str, reentrant: bool) -> None:
    found = gradients(recomputed(reentrant), opt_level)
    torch.testing.assert_close(found, gradients(plain, opt_level), **NEAR)


@VARIANTS
def test_what_ran_without_casts_is_recomputed_without_them(reentrant: bool) -> None:
    found = gradients(recomputed(reentrant), around=amp.disable_casts)
    assert_identical(found, gradients(plain, around=amp.disable_casts))
    assert_identical(found, gradients(plain, "O0"))


@VARIANTS
def test_what_ran_with_casts_is_recomputed_with_them_inside_a_suspension(reentrant: bool) -> None:
    seen = []

    def note(x: torch.Tensor) -> torch.Tensor:
        product = x @ x
        seen.append(product.dtype)
        return product @ x  # so that the recomputation does not stop before the note

    model = amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    x = torch.eye(2, requires_grad=True)
    output = checkpoint(note, x, use_reentrant=reentrant)
    with amp.disable_casts():
        output.float().sum().backward()
    assert seen == [torch.bfloat16] * 2
    with amp.disable_casts():
        output = checkpoint(note, x, use_reentrant=reentrant)
    output.sum().backward()
    assert seen[2:] == [torch.float32] * 2
    del model


@VARIANTS
def test_the_cache_may_be_emptied_between_forward_and_backward(reentrant: bool) -> None:
    def empty(net: Net) -> None:
        amp.clear_cache()

    torch.testing.assert_close(
        gradients(recomputed(reentrant), between=empty), gradients(plain, between=empty), **NEAR
    )


@VARIANTS
def test_another_model_between_forward_and_backward_changes_nothing(reentrant: bool) -> None:
    def add_another(net: Net) -> None:
        others.append(amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0))

    others: list[nn.Module] = []
    found = gradients(recomputed(reentrant), between=add_another)
    torch.testing.assert_close(found, gradients(plain), **NEAR)


@VARIANTS
def test_sequential_checkpointing_works(reentrant: bool) -> None:
    def run(recomputes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        amp.initialize(layers, opt_level="O4", verbosity=0)
        x = torch.randn(2, 4, requires_grad=True)
        output = (
            checkpoint_sequential(layers, 2, x, use_reentrant=reentrant)
            if recomputes
            else (layers(x))
        )
        output.float().sum().backward()
        found = [parameter.grad for parameter in layers.parameters()]
        amp.uninitialize()
        return found

    assert_identical(run(recomputes=True), run(recomputes=False))


def test_dropout_in_a_recomputed_block_is_the_same_twice() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    amp.initialize(block, opt_level="O4", verbosity=0)
    x = torch.ones(2, 4)
    found = []
    for call in (plain, recomputed(reentrant=False)):
        block.zero_grad()
        torch.manual_seed(1)
        call(block, x).float().sum().backward()
        found.append([parameter.grad.clone() for parameter in block.parameters()])
    assert_identical(found[0], found[1])


def test_offloaded_activations_come_back() -> None:
    torch.manual_seed(0)
    net = Net(plain)
    amp.initialize(net, opt_level="O4", verbosity=0)
    x = torch.randn(2, 4)
    found = []
    for context in (nullcontext, torch.autograd.graph.save_on_cpu):
        net.zero_grad()
        with context():
            output = net(x)
        output.float().square().sum().backward()
        found.append([parameter.grad.clone() for parameter in net.parameters()])
    assert_identical(found[0], found[1])


def test_the_functions_of_torch_are_those_they_were_after_uninitialize() -> None:
    before = {name: vars(torch.utils.checkpoint)[name] for name in NAMES}
    forward = vars(torch.utils.checkpoint.CheckpointFunction)["forward"]
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    amp.uninitialize()
    assert all(vars(torch.utils.checkpoint)[name] is value for name, value in before.items())
    assert vars(torch.utils.checkpoint.CheckpointFunction)["forward"] is forward


NAMES = ("checkpoint", "_checkpoint_without_reentrant_generator", "CheckpointFunction")
