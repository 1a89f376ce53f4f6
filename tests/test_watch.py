"""What nothing of torch tells of is noticed, and only as long as it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

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
