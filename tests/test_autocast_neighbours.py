"""Beside torch's own AMP: models of amp and models under autocast give what they give alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_patch as amp

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASTING = ["O1", "O4", "O2", "O5"]


class Net(nn.Module):
    """Operations on which the two differ: autocast has other lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.tanh(self.first(x)))
        return self.second(h @ h.t() @ h).exp().softmax(-1)


def new_net(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", BF16)


def inputs() -> torch.Tensor:
    torch.manual_seed(9)
    return torch.randn(4, 4)


def amp_step(net: Net, optimizer: Any, region: Callable[[], Any] = nullcontext) -> torch.Tensor:
    optimizer.zero_grad()
    with region():
        output = net(inputs())
    loss = output.float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return output.detach()


def autocast_step(net: Net, optimizer: Any, scaler: Any) -> torch.Tensor:
    optimizer.zero_grad()
    with autocast():
        output = net(inputs())
        loss = F.mse_loss(output, torch.zeros_like(output))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return torch.cat([output.detach().float(), loss.detach().float().expand(1, 4)])


def amp_alone(opt_level: str) -> list[torch.Tensor]:
    net, optimizer = new_net(1)
    amp.initialize(net, optimizer, opt_level=opt_level, verbosity=0, loss_scale=128.0)
    found = [amp_step(net, optimizer) for _ in range(3)]
    amp.uninitialize()
    return found


def autocast_alone() -> list[torch.Tensor]:
    net, optimizer = new_net(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    return [autocast_step(net, optimizer, scaler) for _ in range(3)]


@pytest.mark.parametrize("opt_level", CASTING)
def test_both_train_side_by_side_as_they_train_alone(opt_level: str) -> None:
    alone, neighbour_alone = amp_alone(opt_level), autocast_alone()
    net, optimizer = new_net(1)
    neighbour, its_optimizer = new_net(2)
    amp.initialize(net, optimizer, opt_level=opt_level, verbosity=0, loss_scale=128.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    found, neighbour_found = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # they never meet, so nothing warns
        for _ in range(3):
            found.append(amp_step(net, optimizer))
            neighbour_found.append(autocast_step(neighbour, its_optimizer, scaler))
    assert_identical(found, alone)
    assert_identical(neighbour_found, neighbour_alone)


@contextmanager
def meeting() -> Iterator[None]:
    with pytest.warns(amp.AmpWarning, match=r"meets torch\.autocast") as record:
        yield
    assert len([one for one in record if one.category is amp.AmpWarning]) == 1


@pytest.mark.parametrize("opt_level", CASTING)
def test_a_model_of_amp_in_an_autocast_region_gives_what_it_gives_alone_and_warns_once(
    opt_level: str,
) -> None:
    alone = amp_alone(opt_level)
    net, optimizer = new_net(1)
    amp.initialize(net, optimizer, opt_level=opt_level, verbosity=0, loss_scale=128.0)
    with meeting():
        found = [amp_step(net, optimizer, autocast) for _ in range(3)]
    assert_identical(found, alone)
    assert not torch.is_autocast_enabled("cpu")


def test_the_warning_points_at_the_users_line() -> None:
    net, _ = new_net(1)
    amp.initialize(net, opt_level="O4", verbosity=0)
    with pytest.warns(amp.AmpWarning) as record, autocast():
        net(inputs())
    assert record[0].filename == __file__


@pytest.mark.parametrize("opt_level", CASTING)
def test_autocast_is_on_again_after_the_forward_also_after_one_that_raises(opt_level: str) -> None:
    net, _ = new_net(1)
    amp.initialize(net, opt_level=opt_level, verbosity=0)
    with meeting(), autocast():
        net(inputs())
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError):
            net(torch.ones(4, 5))
        assert torch.is_autocast_enabled("cpu")
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is BF16
    assert not torch.is_autocast_enabled("cpu")


def test_in_an_autocast_region_torch_alone_casts() -> None:
    net, _ = new_net(1)
    amp.initialize(net, opt_level="O1", verbosity=0)  # float16, autocast bfloat16
    a = torch.ones(2, 2)
    assert torch.mm(a, a).dtype is FP16
    with autocast():
        assert torch.mm(a, a).dtype is BF16
        with torch.autocast("cpu", enabled=False):
            assert torch.mm(a, a).dtype is FP32
        assert torch.mm(a, a).dtype is BF16
    assert torch.mm(a, a).dtype is FP16


def test_a_disabled_autocast_region_changes_nothing() -> None:
    net, _ = new_net(1)
    amp.initialize(net, opt_level="O1", verbosity=0)
    with torch.autocast("cpu", enabled=False):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is FP16
        assert net(inputs()).dtype is FP32  # softmax comes last


def test_an_autocast_region_inside_the_forward_is_torchs_and_warns_once() -> None:
    class Inner(nn.Module):
        def forward(self, a: torch.Tensor) -> list[torch.dtype]:
            with autocast():
                inside = torch.mm(a, a).dtype
            return [torch.mm(a, a).dtype, inside, torch.mm(a, a).dtype]

    inner = amp.initialize(Inner(), opt_level="O1", verbosity=0)
    with meeting():
        for _ in range(2):
            assert inner(torch.ones(2, 2)) == [FP16, BF16, FP16]


@pytest.mark.parametrize("as_decorator", [False, True], ids=["block", "decorator"])
def test_nested_and_recursive_regions_end_where_they_began(as_decorator: bool) -> None:
    net, _ = new_net(1)
    amp.initialize(net, opt_level="O1", verbosity=0)
    a = torch.ones(2, 2)

    def dtypes(depth: int) -> list[torch.dtype]:
        if as_decorator:
            return torch.autocast("cpu", BF16)(plain)(depth)
        with torch.autocast("cpu", BF16):
            return plain(depth)

    def plain(depth: int) -> list[torch.dtype]:
        inner = dtypes(depth - 1) if depth else []
        return [*inner, torch.mm(a, a).dtype]

    assert dtypes(2) == [BF16] * 3
    assert torch.mm(a, a).dtype is FP16


def test_a_region_left_by_an_exception_has_ended() -> None:
    net, _ = new_net(1)
    amp.initialize(net, opt_level="O1", verbosity=0)
    with pytest.raises(ValueError, match="inside"), autocast():
        raise ValueError("inside")
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is FP16


def test_disable_casts_and_autocast_go_together() -> None:
    net, _ = new_net(1)
    amp.initialize(net, opt_level="O1", verbosity=0)
    a = torch.ones(2, 2)
    with amp.disable_casts():
        with autocast():
            assert torch.mm(a, a).dtype is BF16
        assert torch.mm(a, a).dtype is FP32
    with autocast():
        with amp.disable_casts():
            assert torch.mm(a, a).dtype is BF16
        assert torch.mm(a, a).dtype is BF16
    assert torch.mm(a, a).dtype is FP16


def test_o0_stays_under_autocast_as_a_plain_script_does() -> None:
    plain, _ = new_net(1)
    with autocast():
        expected = plain(inputs())
    net, _ = new_net(1)
    other = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    amp.initialize(net, opt_level="O0", verbosity=0)
    with autocast():
        assert_identical(net(inputs()).detach(), expected.detach())
    del other


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_part_in_an_autocast_region_is_recomputed_as_it_was(reentrant: bool) -> None:
    def gradients(region: Callable[[], Any]) -> list[torch.Tensor]:
        net, _ = new_net(1)
        amp.initialize(net, opt_level="O4", verbosity=0)
        x = inputs().requires_grad_()
        with region():
            output = checkpoint(net, x, use_reentrant=reentrant)
        output.float().square().sum().backward()
        found = [parameter.grad.clone() for parameter in net.parameters()]
        amp.uninitialize()
        return found

    alone = gradients(nullcontext)
    with meeting():
        found = gradients(autocast)
    assert_identical(found, alone)


def test_torch_autocast_is_what_it_was_after_uninitialize() -> None:
    before = torch.autocast.__enter__, torch.autocast.__exit__
    net, _ = new_net(1)
    amp.initialize(net, opt_level="O4", verbosity=0)
    assert torch.autocast.__enter__ is not before[0]
    amp.uninitialize()
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == before
