"""What would leave the range of half precision is found in FP32, by module."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical, normalised_mlp, with_gradient_times
from torch import nn

import amp_patch as amp
from amp_patch.tools.range_check import RangeRecord, range_check

BATCH = [(torch.ones(4, 8), torch.zeros(4, 8))]


class Layer(nn.Module):
    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factors = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.factors
        x = with_gradient_times(self.linear(x).tanh() + 1, backward) * forward
        return x / forward


def eight(**factors: float) -> nn.Sequential:
    return nn.Sequential(*(Layer(**factors if i == 2 else {}) for i in range(8)))


def test_overflow_planted_in_the_third_of_eight_layers_is_named() -> None:
    report = range_check(eight(forward=1e5), BATCH)
    first = report.findings[0]
    assert (first.module, first.phase, first.operation) == ("2", "forward", "mul")
    assert first.overflowed["float16"] > 0
    assert first.overflowed["bfloat16"] == 0
    assert {one.module for one in report.findings} == {"2"}


def test_overflow_of_gradients_is_named() -> None:
    report = range_check(eight(backward=1e9), BATCH)
    backward = [one for one in report.findings if one.phase == "backward"]
    # What is below the third layer gets its gradient.
    assert {one.module.partition(".")[0] for one in backward} == {"0", "1", "2"}
    assert report.largest_scale < 1


def test_clean_model_has_no_findings() -> None:
    report = range_check(eight(), BATCH)
    assert report.findings == ()
    assert str(report).startswith("Nothing leaves the range of float16 or bfloat16.")


def test_record_counts_what_the_dtypes_lose() -> None:
    record = RangeRecord("m", "forward", "op")
    record.add(torch.tensor([0.0, 1.0, 65519.0, 65520.0, 1e30, 2.0**-25, 1e-30, math.inf]))
    assert record.values == 6  # zeros and what is not finite already do not count
    assert record.largest == pytest.approx(1e30)
    assert record.overflowed == {"float16": 2, "bfloat16": 0}
    assert record.flushed == {"float16": 2, "bfloat16": 0}


def test_largest_scale_keeps_the_largest_gradient_in_range() -> None:
    model = nn.Linear(1, 1, bias=False)
    # The loss is 3 w x with x = 1, so that the gradient of the weight is 3.
    report = range_check(model, [torch.ones(1, 1)], lambda m, x: 3 * m(x).sum())
    largest = max(one.largest for one in report.records if one.phase == "backward")
    assert report.largest_scale == 2.0 ** math.floor(math.log2(65504 / largest))
    assert report.largest_scale * largest <= 65504 < 2 * report.largest_scale * largest


def test_weights_and_buffers_are_looked_at() -> None:
    model = nn.Linear(8, 8)
    model.register_buffer("table", torch.tensor([1e6]))
    (finding,) = range_check(model, BATCH).findings
    assert (finding.phase, finding.operation, finding.largest) == ("weights", "table", 1e6)


class Scaled(nn.Module):
    """Takes an input that float16 does not hold to values that it does."""

    def __init__(self, table: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = torch.full((8,), table)  # neither a parameter nor a buffer
        with torch.no_grad():
            self.linear.weight.fill_(2.0**-14)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        x = self.linear(x) if shift is None else self.linear(x).div(shift)
        return x.div(self.table)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda m, batch: m(batch["large"])),
        ("x", lambda m, batch: m(x=batch["large"])),
        ("shift", lambda m, batch: m(batch["ones"], batch["large"])),
        ("shift", lambda m, batch: m(batch["ones"], shift=batch["large"])),
    ],
)
def test_inputs_of_the_model_are_looked_at(name: str, call: Any) -> None:
    batch = {"ones": torch.ones(4, 8), "large": torch.full((4, 8), 7e4)}
    report = range_check(Scaled(), [batch], lambda m, batch: call(m, batch).sum())
    first = report.findings[0]
    assert (first.module, first.phase, first.operation) == ("Scaled", "input", name)
    assert first.overflowed == {"float16": 32, "bfloat16": 0}


def test_tensors_that_a_module_holds_by_the_way_are_looked_at() -> None:
    report = range_check(nn.Sequential(Scaled(7e4)), [torch.ones(4, 8)], lambda m, x: m(x).sum())
    first = report.findings[0]
    assert (first.module, first.phase, first.operation) == ("0", "weights", "table")


@pytest.mark.filterwarnings("ignore::amp_patch.AmpWarning")  # of the skip at twice the scale
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda m, x: m(x).sum(), id="expanded"),
        pytest.param(lambda m, x: m(x)[0, 0] * 8, id="selected"),
        pytest.param(lambda m, x: m(x[:1])[:, :1].reshape(()), id="as it is"),
    ],
)
def test_no_gradient_overflows_at_the_largest_scale(loss: Any, opt_level: str) -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((4, 8), 1e-3)
    scale = range_check(model, [x], loss).largest_scale
    for times, is_skipped in ((1, False), (2, True)):
        amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=times * scale, verbosity=0)
        with amp.scale_loss(loss(model, x), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert amp.step_was_skipped(optimizer) is is_skipped
        amp.uninitialize()


def test_no_hook_stays() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    model = Returns()
    range_check(model, [torch.ones(1)], lambda m, x: m(x).sum())
    assert not model.weight._backward_hooks  # noqa: SLF001 (no public name)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_values_that_become_zero_are_found() -> None:
    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1e-9

    report = range_check(nn.Sequential(nn.Linear(8, 8), Small()), BATCH)
    first = report.findings[0]
    assert (first.module, first.operation, first.flushed["bfloat16"]) == ("1", "mul", 0)


def test_model_is_afterwards_what_it_was() -> None:
    model = normalised_mlp()
    before: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = torch.ones(3)
    model[3].bias.grad = gradient  # type: ignore[union-attr]
    batches = [(torch.randn(4, 6), torch.randn(4, 3))]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    range_check(model, batches, lambda m, batch: F.dropout(m(batch[0])).square().mean())
    assert torch.equal(torch.rand(1), expected)
    assert_identical(dict(model.state_dict()), before)
    assert model[3].bias.grad is gradient  # type: ignore[union-attr]
    assert model[0].weight.grad is None  # type: ignore[union-attr]


def test_buffers_that_forward_replaces_are_put_back() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("average", torch.zeros(1))
            self.register_buffer("cache", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            self.average.add_(1)
            self.average = 0.9 * self.average + 0.1 * x.detach().mean()
            self.cache = x.detach()
            self.register_buffer("added", x.detach())
            return x

    model = nn.Sequential(Average())
    average = model[0].average
    range_check(model, BATCH)
    assert model[0].average is average
    assert torch.equal(average, torch.zeros(1))  # type: ignore[arg-type]
    assert model[0].cache is None
    assert list(model.state_dict()) == ["0.average", "0.linear.weight", "0.linear.bias"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_modules_are_left_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return self.linear(x)

    scripted = torch.jit.script(Counting())
    for model in (scripted, nn.Sequential(scripted)):
        assert range_check(model, BATCH).findings == ()
        assert torch.equal(scripted.calls, torch.zeros(1))


def test_random_numbers_of_python_and_numpy_go_on_as_if_nothing_had_run() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).sum() * (random.random() + np.random.rand())

    random.seed(3)
    np.random.seed(3)
    range_check(nn.Linear(8, 8), BATCH, noisy)
    found = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    assert found == (random.random(), np.random.rand())


def test_casts_are_off_inside() -> None:
    model = eight()
    amp.initialize(model, opt_level="O1", verbosity=0)
    report = range_check(model, BATCH)
    assert any(one.operation == "addmm" and one.phase == "forward" for one in report.records)


def test_half_model_is_refused() -> None:
    model = amp.initialize(nn.Linear(8, 8), opt_level="O3", verbosity=0)
    with pytest.raises(amp.AmpError, match=r"^range_check: .* 'weight' in half"):
        range_check(model, BATCH)


def test_table_and_dict_tell_the_same() -> None:
    report = range_check(eight(forward=1e5), BATCH)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert len(data["findings"]) == len(report.table().rows) > 0
    assert data["findings"][0]["module"] == "2"
    assert report.table().rows[0][:3] == ("2", "forward", "mul")
