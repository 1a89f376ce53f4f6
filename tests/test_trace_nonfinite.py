"""Planted overflows are found where they were planted: by the tracer and by the diagnosis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import with_gradient_times
from torch import nn

import amp_patch as amp
from amp_patch.tools.module_paths import ModuleStack
from amp_patch.tools.trace_nonfinite import NonFiniteError, tensor_facts, trace_nonfinite

LEVELS = ("O1", "O2", "O3")


class Overflowing(nn.Module):
    """A linear layer whose result, or gradient, leaves the range of float16 by `factor`."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factors = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.factors
        return with_gradient_times(self.linear(x).tanh() + 1, backward) * forward


class Eight(nn.Module):
    """Eight layers, of which the third, `layers.2`, may be told to overflow."""

    def __init__(self, **factors: float) -> None:
        super().__init__()
        plain = [Overflowing() for _ in range(7)]
        self.layers = nn.ModuleList([*plain[:2], Overflowing(**factors), *plain[2:]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def started(opt_level: str, **factors: float) -> tuple[Eight, Any]:
    model = Eight(**factors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(
        model, optimizer, opt_level=opt_level, loss_scale=1.0 if opt_level == "O3" else 8.0,
        verbosity=0,
    )  # fmt: skip


def train(model: nn.Module, optimizer: Any) -> None:
    loss = F.mse_loss(model(torch.randn(4, 8)).float(), torch.zeros(4, 8))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("opt_level", LEVELS)
def test_overflow_of_the_forward_pass_is_named_by_path(opt_level: str) -> None:
    model, optimizer = started(opt_level, forward=1e5)
    with pytest.raises(NonFiniteError) as raised, trace_nonfinite(model):
        train(model, optimizer)
    found = raised.value.found
    assert (found.phase, found.module, found.operation) == ("forward", "layers.2", "mul")
    assert found.output.dtype == "float16"
    assert found.output.infs > 0
    assert found.inputs[0].dtype == "float16"
    assert found.inputs[0].largest <= 2.0


@pytest.mark.parametrize("opt_level", LEVELS)
def test_overflow_of_the_backward_pass_is_named_by_path(opt_level: str) -> None:
    model, optimizer = started(opt_level, backward=1e30)
    with pytest.raises(NonFiniteError) as raised, trace_nonfinite(model):
        train(model, optimizer)
    found = raised.value.found
    assert (found.phase, found.module) == ("backward", "layers.2")
    assert found.node


def test_twenty_operations_before_and_the_users_lines_are_told() -> None:
    model, optimizer = started("O1", forward=1e5)
    with pytest.raises(NonFiniteError) as raised, trace_nonfinite(model):
        train(model, optimizer)
    found = raised.value.found
    assert len(found.before) == 20
    assert found.before[-1].module == "layers.2"
    assert found.before[-1].largest == pytest.approx(found.inputs[0].largest)
    assert [frame.rpartition(" ")[2] for frame in found.frames[-2:]] == ["forward", "forward"]
    assert any(frame.endswith("in train") for frame in found.frames)
    assert str(raised.value) == str(found)
    assert "mul in layers.2, forward pass, made the first new inf or NaN" in str(found)


def test_gradients_are_afterwards_what_they_were() -> None:
    model, optimizer = started("O2", backward=1e30)
    with pytest.raises(NonFiniteError), trace_nonfinite(model):
        train(model, optimizer)
    assert all(p.grad is None for p in amp.master_params(optimizer))
    with pytest.warns(amp.AmpWarning), trace_nonfinite(model, backward=False):
        train(model, optimizer)  # skipped as ever
    assert amp.step_was_skipped(optimizer)


def test_clean_training_is_let_through() -> None:
    model, optimizer = started("O1")
    with trace_nonfinite(model):
        train(model, optimizer)
    assert not amp.step_was_skipped(optimizer)


def test_mask_of_minus_infinity_is_no_fault() -> None:
    model = nn.Linear(4, 4)
    mask = torch.tensor([True, False, False, False])
    with trace_nonfinite(model):
        scores = model(torch.ones(2, 4)).masked_fill(mask, -math.inf)
        causal = torch.full((4, 4), -math.inf).triu(1) + torch.zeros(4, 4)
        assert torch.softmax(scores, -1).isfinite().all()
        assert causal.isinf().any()


def test_nan_from_a_row_that_is_masked_as_a_whole_is_one() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(NonFiniteError, match="softmax"), trace_nonfinite(model):
        torch.softmax(model(torch.ones(1, 4)).fill_(-math.inf), -1)


def test_inf_that_came_in_is_not_blamed_on_who_passes_it_on() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    x = torch.full((1, 4), math.inf)
    with trace_nonfinite(model):
        model[0](x)
    with pytest.raises(NonFiniteError) as raised, trace_nonfinite(model):
        model(x)  # of weights of both signs: inf - inf
    found = raised.value.found
    assert (found.module, found.inputs[1].infs, found.output.nans) == ("1", 4, 4)


def test_operation_in_place_is_found() -> None:
    model = nn.Linear(4, 4)
    x = torch.full((4,), 60000.0).half()
    with pytest.raises(NonFiniteError) as raised, trace_nonfinite(model):
        x.mul_(2)
    assert raised.value.found.operation == "mul_"


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda x: x.mul_(1e30),
        lambda x: x.copy_(x * 1.0).pow_(4),
        lambda x: torch.mul(x, 1e30, out=x),
        lambda x: torch._foreach_mul_([x], 1e30),
    ],
    ids=["in place", "pow_", "out", "foreach"],
)
def test_input_that_is_overwritten_is_told_as_it_came_in(overwrite: Any) -> None:
    with pytest.raises(NonFiniteError) as caught, trace_nonfinite(nn.Identity()):
        overwrite(torch.full((3,), 1e20))
    first = caught.value.found.inputs[0]
    assert (first.largest, first.infs, first.nans) == (pytest.approx(1e20), 0, 0)
    assert caught.value.found.output.infs == 3


def test_healthy_ctc_is_let_through() -> None:
    """Its kernel keeps the logarithms of the probabilities of prefixes, also of impossible ones."""
    model = nn.Linear(4, 5)
    labels, lengths = torch.tensor([[1, 2, 3], [1, 1, 4]]), torch.tensor([3, 3])
    with trace_nonfinite(model):
        scores = model(torch.randn(10, 2, 4)).log_softmax(-1)
        F.ctc_loss(scores, labels, torch.tensor([10, 10]), lengths).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()


def test_ctc_of_labels_that_cannot_be_reached_is_a_fault() -> None:
    model = nn.Linear(4, 5)
    labels, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    with pytest.raises(NonFiniteError, match="_ctc_loss"), trace_nonfinite(model):
        scores = model(torch.randn(2, 1, 4)).log_softmax(-1)  # shorter than the labels
        F.ctc_loss(scores, labels, torch.tensor([2]), lengths)


def test_cast_that_overflows_is_found() -> None:
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    with pytest.raises(NonFiniteError) as raised, trace_nonfinite(model):
        model(torch.full((1, 4), 1e5))
    found = raised.value.found
    assert (found.operation, found.module) == ("_to_copy", "Linear")
    assert (found.inputs[0].dtype, found.output.dtype) == ("float32", "float16")


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(amp.AmpError, match=r"expected a torch\.nn\.Module"), trace_nonfinite(42):  # type: ignore[arg-type]
        pass


def test_facts_are_those_of_the_values() -> None:
    facts = tensor_facts(torch.tensor([1.0, -7.0, math.inf, math.nan, -math.inf]))
    assert (facts.infs, facts.nans, facts.largest) == (2, 1, 7.0)
    assert str(facts) == "float32 5, largest magnitude 7, 2 inf, 1 NaN"


class TestModulePaths:
    def test_paths_count_from_the_outermost(self) -> None:
        seen: list[str] = []

        class Noting(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(stack.path)
                return x

        stack = ModuleStack()
        with stack.following():
            nn.Sequential(nn.Sequential(Noting()), Noting())(torch.ones(1))
            Noting()(torch.ones(1))
        assert seen == ["0.0", "1", "Noting"]

    def test_exception_in_a_forward_leaves_the_stack_right(self) -> None:
        class Failing(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise KeyError

        stack = ModuleStack()
        with stack.following():
            with pytest.raises(KeyError):
                nn.Sequential(Failing())(torch.ones(1))
            assert stack.path == ""


class TestLastOverflow:
    """The diagnosis of the scaler, as data."""

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_planted_overflow_is_named_by_path(self, opt_level: str) -> None:
        model = Eight(backward=math.inf)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        train(model, optimizer)
        found = amp.last_overflow()
        assert found is not None
        named = {one.parameter for one in found.gradients}
        # The layers below the third get its gradient; those above do not.
        assert named == {
            f"layers.{i}.linear.{name}" for i in range(3) for name in ("weight", "bias")
        }
        assert found.loss_scale == 65536.0
        assert found.may_smaller_scale_help

    def test_counts_and_largest_value_are_those_of_the_gradient(self) -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=4.0)
        factor = torch.tensor([math.inf, math.nan, 2.0])
        with (
            pytest.warns(amp.AmpWarning),
            amp.scale_loss(with_gradient_times(model.weight, factor).sum(), optimizer) as scaled,
        ):
            scaled.backward()
        (one,) = amp.last_overflow().gradients  # type: ignore[union-attr]
        assert (one.parameter, one.infs, one.nans, one.elements) == ("weight", 1, 1, 3)
        assert one.largest == 2.0  # unscaled

    def test_loss_that_is_not_finite_cannot_be_helped(self) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        loss = model(torch.ones(1, 3)).float().sum() * math.inf
        with pytest.warns(amp.AmpWarning), amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert not amp.last_overflow().may_smaller_scale_help  # type: ignore[union-attr]

    def test_latest_of_several_calls_counts(self) -> None:
        pairs = []
        for size in (2, 3):
            model = nn.Linear(size, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            pairs.append(amp.initialize(model, optimizer, opt_level="O1", verbosity=0))
        assert amp.last_overflow() is None
        for model, optimizer in reversed(pairs):
            loss = with_gradient_times(model.weight, math.inf).sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        assert amp.last_overflow().gradients[0].elements == 2  # type: ignore[union-attr]
