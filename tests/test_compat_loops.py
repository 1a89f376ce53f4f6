"""Training loops as scripts of the old package wrote them, through its names."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amp_patch
from amp_patch.compat.installer import install_as_apex

SCALE = 128.0
ULP = 2.0**-10  # of float16, relative


@pytest.fixture
def amp() -> Iterator[Any]:
    undo = install_as_apex()
    yield importlib.import_module("apex.amp")
    undo()


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def total(parameters: Any) -> float:
    return sum(float(p.detach().double().square().sum()) for p in parameters) ** 0.5


def plain_losses(model: torch.nn.Module, optimizer: Any, steps: int) -> list[float]:
    """The same loop in FP32 by torch alone: the oracle."""
    losses = []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(amp: Any, model: torch.nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(batch(step)).float().square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_collected_before", [True, False], ids=["list", "model.parameters()"])
def test_clipping_inside_the_block_clips_scaled_gradients(
    amp: Any, level: str, is_collected_before: bool
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parameters = list(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE)
    clipped = parameters if is_collected_before else model.parameters()
    with amp.scale_loss(model(batch(0)).float().sum(), optimizer) as scaled:
        scaled.backward()
        torch.nn.utils.clip_grad_norm_(clipped, 0.5)
    norm = total(p.grad for p in amp.master_params(optimizer))
    assert norm == pytest.approx(0.5 / SCALE, rel=10 * ULP)


# -- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_groups_and_schedules_made_before_hold(amp: Any, level: str) -> None:
    def build() -> tuple[torch.nn.Module, Any, Any]:
        model = network()
        groups = [{"params": [p], "lr": 0.02 * (i + 1)} for i, p in enumerate(model.parameters())]
        optimizer = torch.optim.SGD(groups[:3], lr=0.1, momentum=0.9)
        optimizer.add_param_group(groups[3])
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def trained(model: torch.nn.Module, optimizer: Any, scheduler: Any, run: Any) -> list[float]:
        losses = []
        for _ in range(3):
            losses += run(model, optimizer, 1)
            scheduler.step()
        return losses

    expected = trained(*build(), plain_losses)
    model, optimizer, scheduler = build()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE)
    found = trained(model, optimizer, scheduler, lambda *given: losses_of(amp, *given))
    assert found == pytest.approx(expected, rel=20 * ULP)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [0.02 * (i + 1) / 8 for i in range(4)]
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradient_dropped_before_the_step_moves_nothing(amp: Any, level: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with amp.scale_loss(model(batch(0)).float().sum(), optimizer) as scaled:
        scaled.backward()
    next(iter(amp.master_params(optimizer))).grad = None
    optimizer.step()
    moved = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
    assert moved == ["0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_optimizer_over_a_net_and_a_target_without_gradients(amp: Any, level: str) -> None:
    net, target = network(), network()
    for parameter in target.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.Adam([*net.parameters(), *target.parameters()], lr=0.01)
    [net, target], optimizer = amp.initialize([net, target], optimizer, opt_level=level)
    kept = {name: value.clone() for name, value in target.state_dict().items()}
    start = net.state_dict()["0.weight"].clone()
    for step in range(2):
        loss = (net(batch(step)) - target(batch(step + 1)).detach()).float().square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss / 100, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert all(value.equal(kept[name]) for name, value in target.state_dict().items())
    assert not net.state_dict()["0.weight"].equal(start)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_one_model_with_two_optimizers_trains_as_in_fp32(amp: Any, level: str) -> None:
    def build() -> tuple[Any, list[Any]]:
        model = network()
        parts = (model[0].parameters(), model[2].parameters())
        return model, [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]

    def trained(model: Any, optimizers: list[Any], *, is_plain: bool) -> list[float]:
        losses = []
        for step in range(3):
            loss = model(batch(step)).float().square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if is_plain:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizers) as scaled:
                    scaled.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        return losses

    expected = trained(*build(), is_plain=True)
    model, optimizers = build()
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, loss_scale=SCALE)
    assert trained(model, optimizers, is_plain=False) == pytest.approx(expected, rel=20 * ULP)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_initialize_may_be_called_for_a_second_model(amp: Any, level: str) -> None:
    pairs = []
    for _ in range(2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pairs.append(amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE))
    both = [losses_of(amp, *one, 3) for one in pairs]
    assert both[0] == both[1]
    again = amp.initialize(*pairs[0], opt_level=level, loss_scale=SCALE)
    assert again == pairs[0]
    assert losses_of(amp, *again, 1)[0] < both[0][0]


# -- what is done with the model ------------------------------------------------------------------


@torch.jit.script
def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(swish(self.first(x)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scripted_activations_run(amp: Any, level: str) -> None:
    torch.manual_seed(0)
    model = Scripted()
    expected = model(batch(0)).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE)
    torch.testing.assert_close(model(batch(0)).float(), expected, rtol=4 * ULP, atol=4 * ULP)
    losses = losses_of(amp, model, optimizer, 3)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_saved_model_loads_without_amp(level: str) -> None:
    undo = install_as_apex()
    amp = importlib.import_module("apex.amp")
    model = network()
    expected = model(batch(0)).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    file = io.BytesIO()
    torch.save(model, file)
    amp_patch.uninitialize()
    undo()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    dtype = next(loaded.parameters()).dtype
    torch.testing.assert_close(
        loaded(batch(0).to(dtype)).float(), expected, rtol=4 * ULP, atol=4 * ULP
    )


def test_statistics_in_float64_meet_float32_and_half(amp: Any) -> None:
    model = amp.initialize(network(), opt_level="O1")
    output = model(batch(0))
    assert output.dtype is torch.float16
    mean = torch.full((), 2.0, dtype=torch.float64)
    counts = torch.ones(3, 1, dtype=torch.float64)
    assert (output.float() * mean).dtype is torch.float32  # a number, as torch promotes
    assert torch.cat([counts, batch(0)[:, :1]]).dtype is torch.float64
    assert F.mse_loss(output.double(), counts).dtype is torch.float64
    assert torch.addcmul(counts, counts, counts).dtype is torch.float64
