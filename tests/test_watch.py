"""What nothing of torch tells of is noticed, and only as long as it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.watch import watch_weights


class Record:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_data_taken(self, parameter: torch.Tensor) -> None:
        self.events.append(("taken", parameter))

    def on_data_set(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.events.append(("set", parameter))
        return value

    def on_swap(self, tensor: torch.Tensor) -> None:
        self.events.append(("swap", tensor))

    def on_step(self) -> None:
        self.events.append(("step", None))

    def on_zero_grad(self, module: nn.Module) -> None:
        self.events.append(("zero_grad", module))


@pytest.fixture
def record() -> Iterator[Record]:
    patcher, record = Patcher(), Record()
    watch_weights(patcher, record)
    yield record
    patcher.restore()


def test_data_that_is_read_or_set_is_noticed(record: Record) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.data.add_(1)
    weight.data = torch.zeros(2)
    assert record.events == [("taken", weight), ("set", weight)]
    assert torch.equal(weight, torch.zeros(2))


def test_data_of_what_is_no_parameter_is_nobodys_affair(record: Record) -> None:
    value = torch.ones(2)
    value.data = value.data + 1
    assert record.events == []
    assert torch.equal(value, torch.full((2,), 2.0))


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_step_of_any_optimizer_is_noticed(record: Record, is_fused: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], fused=is_fused)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert ("step", None) in record.events


def test_zero_grad_of_a_module_is_done_and_noticed(record: Record) -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    layer.zero_grad()
    assert layer.weight.grad is None
    assert ("zero_grad", layer) in record.events


def test_swapped_tensors_are_noticed_before_they_swap(record: Record) -> None:
    first, second = torch.ones(2), torch.zeros(2)
    torch.utils.swap_tensors(first, second)
    assert [what for what, _ in record.events] == ["swap", "swap"]
    assert first.tolist() == [0, 0]


def test_nothing_is_noticed_after_restore() -> None:
    patcher, record = Patcher(), Record()
    plain = torch.Tensor.data
    watch_weights(patcher, record)
    patcher.restore()
    patcher.restore()
    weight = nn.Parameter(torch.ones(2))
    weight.data.add_(1)
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    nn.Linear(1, 1).zero_grad()
    assert record.events == []
    assert torch.Tensor.data is plain
    assert "data" not in vars(torch.Tensor)


def by_hand(layer: nn.Linear) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(2, 2)))


def by_conversion(layer: nn.Linear) -> None:
    layer.double().float()


def by_loading(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})


@pytest.fixture
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_swapping")
@pytest.mark.parametrize("swap", [by_hand, by_conversion, by_loading])
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O4"])
def test_weights_can_be_swapped_after_a_forward_and_the_next_one_has_the_new(
    opt_level: str, swap: Any
) -> None:
    layer, x = nn.Linear(2, 2), torch.randn(2, 2)
    amp.initialize(layer, opt_level=opt_level, verbosity=0)
    layer(x)
    swap(layer)
    found = layer(x)
    amp.clear_cache()
    assert torch.equal(found, layer(x))
    assert swap is by_conversion or torch.equal(layer.weight, torch.ones(2, 2))


@pytest.mark.usefixtures("_swapping")
@pytest.mark.parametrize("swap", [by_hand, by_conversion, by_loading])
@pytest.mark.parametrize("opt_level", ["O2", "O3", "O5"])
def test_swap_of_weights_that_amp_has_cast_is_refused_with_the_remedy(
    opt_level: str, swap: Any
) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    amp.initialize(layer, optimizer, opt_level=opt_level, verbosity=0)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError) as caught:
        swap(layer)
    messages, error = "", caught.value
    while error is not None:
        messages, error = f"{messages}{error}", error.__cause__
    assert "amp.uninitialize() before" in messages
    assert swap is by_loading or torch.equal(layer.weight, before)  # that loads what it can
    amp.uninitialize()
    if opt_level != "O3":  # of weights that lost their FP32 values amp remembers that
        swap(layer)
