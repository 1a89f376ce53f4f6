"""What a session looks like after an interrupt, and after calls at odd moments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_patch as amp

X = torch.ones(2, 4)


class Interruptible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.is_interrupted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_interrupted:
            raise KeyboardInterrupt
        return self.linear(x)


def interrupt(model: Interruptible) -> None:
    model.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model.is_interrupted = False


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_forward_after_an_interrupted_one_gives_what_it_gave(opt_level: str) -> None:
    model = Interruptible()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=opt_level)
    dtype = model(X).dtype
    interrupt(model)
    assert model(X).dtype is dtype


def test_casts_outside_models_are_back_at_the_next_block() -> None:
    cast, plain = nn.Linear(4, 2), Interruptible()
    optimizer = torch.optim.SGD(cast.parameters(), lr=0.1)
    amp.initialize(cast, optimizer, opt_level="O4")
    amp.initialize(plain, torch.optim.SGD(plain.parameters(), lr=0.1), opt_level="O0")
    interrupt(plain)
    with amp.scale_loss(cast(X).float().sum(), optimizer) as scaled:
        scaled.backward()
    assert torch.mm(X, X.T).dtype is torch.bfloat16


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
def test_gradients_that_a_block_leaves_on_another_optimizer_are_unscaled(opt_level: str) -> None:
    found = []
    for level in (None, opt_level):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
        if level is not None:
            amp.initialize(model, optimizers, opt_level=level, loss_scale=1024.0)
        for optimizer in optimizers:
            loss = model(X).float().square().mean()
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([value.flatten() for value in model.state_dict().values()]).clone())
    # The gradients are about 1 in size, so rounding to bfloat16 moves a weight by 1e-3 at most.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-3)


def test_overflow_on_another_optimizer_is_no_matter_if_it_is_cleared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    own, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    amp.initialize(model, [own, other], opt_level="O1")
    handle = model[1].weight.register_hook(lambda gradient: gradient * torch.inf)
    with amp.scale_loss(model(X).float().mean() * 1e-3, own) as scaled:
        scaled.backward()
    handle.remove()
    assert not amp.step_will_be_skipped(own)
    assert amp.step_will_be_skipped(other)
    other.zero_grad()
    assert not amp.step_will_be_skipped(other)
    assert amp.loss_scale() == 2.0**16


def test_masters_written_through_data_reach_the_model() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5")
    for master in amp.master_params(optimizer):
        master.data.fill_(0.5)
    model(X)
    assert torch.all(model.weight == 0.5)


def test_uninitialize_inside_full_precision_gives_exact_weights() -> None:
    model = nn.Linear(4, 2)
    exact = model.weight.detach().clone()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2")
    with amp.full_precision(model):
        amp.uninitialize()
    assert torch.equal(model.weight, exact)
    assert model(X).dtype is torch.float32


def test_optimizer_that_comes_later_is_told_of_rounded_weights() -> None:
    model = nn.Linear(4, 2)
    amp.initialize(model, opt_level="O2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(amp.AmpWarning, match="model and optimizer to initialize together"):
        amp.initialize(model, optimizer, opt_level="O2")


def test_counts_may_be_strings() -> None:
    model = amp.initialize(nn.Linear(4, 2), opt_level="O1", num_losses="2", verbosity="0")
    assert model.weight.dtype is torch.float32
    assert len(amp.state_dict()) == 2
