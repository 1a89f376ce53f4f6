"""What would leave the range of half precision is found in FP32, by module."""

from __future__ import annotations

import json
import math
from typing import Any

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
