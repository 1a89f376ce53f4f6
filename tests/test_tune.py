"""The smallest list of what stays in FP32 is found."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.tools.bisection import smallest_subset
from amp_patch.tools.tune import tune

BATCHES = [(torch.rand(8, 8), torch.arange(8) % 4)]


class Gate(nn.Module):
    """Weights by exponentials that float16 does not hold, without the care that softmax takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.linear(x) + 12).exp()  # about 160,000
        return weights / weights.sum(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.inner(x)


def build() -> tuple[nn.Module, Any]:
    blocks = [Block(Gate() if i == 2 else nn.Tanh()) for i in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def build_harmless() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_exponential_that_overflows_is_kept_in_fp32(opt_level: str) -> None:
    found = tune(build, BATCHES, tolerance=0.05, opt_level=opt_level)
    assert found.is_within
    assert dict(found.arguments) == {"opt_level": opt_level, "keep_fp32": ["2.inner"]}
    assert found.kept == ("2.inner",)


def test_arguments_are_for_initialize_and_hold_what_they_promise() -> None:
    found = tune(build, BATCHES, tolerance=0.05)
    torch.manual_seed(0)
    model, optimizer = build()
    amp.initialize(model, optimizer, verbosity=0, **found.arguments)
    loss = torch.nn.functional.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    assert loss.isfinite()


class OwnForward(nn.Module):
    """What overflows is computed by the forward of the model itself, in none of its children."""

    def __init__(self, children: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4) * 0.1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(children))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exponentials = (x + 12).exp()
        x = (exponentials / exponentials.sum(-1, keepdim=True)) @ self.weight
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("children", [0, 2])
def test_forward_of_the_model_itself_is_a_candidate(children: int) -> None:
    def build_own() -> tuple[nn.Module, Any]:
        model = OwnForward(children)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    found = tune(build_own, BATCHES, tolerance=0.05, opt_level="O2")
    assert found.is_within
    assert dict(found.arguments) == {"opt_level": "O2", "keep_fp32": ["*"]}
    model, optimizer = build_own()
    amp.initialize(model, optimizer, verbosity=0, **found.arguments)
    assert model(BATCHES[0][0]).isfinite().all()


@pytest.mark.parametrize("value", [7e4, 1.0 + 2.0**-20])
def test_with_the_whole_model_kept_nothing_is_rounded(value: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.full((2, 8), value)
    expected = model(x)
    amp.initialize(model, opt_level="O2", keep_fp32="*", verbosity=0)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_precision_is_acquitted_only_by_a_run_without_half(opt_level: str) -> None:
    """The loss of the first call is another one whatever the precision: nothing helps."""
    calls = iter(range(1_000))
    dtypes: list[set[torch.dtype]] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            dtypes[-1].add(found.dtype)
            return found

    def build_watched() -> tuple[nn.Module, Any]:
        dtypes.append(set())
        model = nn.Sequential(Watched(8, 8), Watched(8, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def drifting(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean() + next(calls)

    found = tune(build_watched, BATCHES, drifting, opt_level=opt_level)
    assert not found.is_within
    assert "Even with everything kept in FP32" in str(found)
    assert {torch.float32} in dtypes[1:]  # the first is the reference


def test_without_need_nothing_is_kept() -> None:
    found = tune(build_harmless, BATCHES, tolerance=0.05, opt_level="O2")
    assert dict(found.arguments) == {"opt_level": "O2"}
    assert len(found.measurements) == 1


def test_every_measurement_is_in_the_table() -> None:
    found = tune(build, BATCHES, tolerance=0.05)
    assert found.measurements[0].kept == ()
    assert found.measurements[0].error == float("inf")
    assert len(found.table().rows) == len(found.measurements)
    assert [row[-1] for row in found.table().rows] == [
        "yes" if one.error <= 0.05 else "no" for one in found.measurements
    ]
    text = str(found)
    assert "amp.initialize(model, optimizer, opt_level='O2', keep_fp32=['2.inner'])" in text
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["measurements"][0]["loss_error"] is None


def test_no_list_is_long_enough_below_what_chance_does() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        noise = 1.0 if next(model.parameters()).dtype is torch.float32 else 2.0
        return model(batch[0]).square().mean() * noise * torch.randn(()).abs().exp() + noisy.count()

    counts = iter(range(10_000))
    noisy.count = lambda: next(counts)  # type: ignore[attr-defined]
    found = tune(build_harmless, BATCHES, noisy, tolerance=1e-6)
    assert not found.is_within
    assert "it is not precision that makes the difference" in str(found)


class TestOperations:
    def test_exponential_is_kept_when_the_rest_moves_to_half(self) -> None:
        found = tune(build, BATCHES, tolerance=0.05, opt_level="O1", most_in_half=True)
        assert found.is_within
        assert set(found.kept) == {"torch.Tensor.exp", "torch.Tensor.sum"}  # and of eight of them
        assert found.moved == ("torch.nn.functional.cross_entropy",)
        torch.manual_seed(0)
        model, optimizer = build()
        amp.initialize(model, optimizer, verbosity=0, **found.arguments)
        assert torch.ones(3).half().exp().dtype is torch.float32
        assert torch.cumsum(torch.ones(3).half(), 0).dtype is torch.float32
        assert model(BATCHES[0][0]).isfinite().all()
        assert "cast_rules=amp.resolve_rules(half=['torch." in str(found)
        json.dumps(found.to_dict(), allow_nan=False)

    def test_product_that_overflows_is_kept(self) -> None:
        class Large(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                scores = torch.bmm(x[None] * 1e3, x.t()[None])[0]  # of 8 x 8 ones: 8,000
                return (scores * 100).log1p() / 10

        def build_large() -> tuple[nn.Module, Any]:
            model = nn.Sequential(nn.Linear(8, 8), Large(), nn.Linear(8, 4))
            with torch.no_grad():
                model[0].weight.fill_(1.0)  # type: ignore[union-attr, operator]
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        found = tune(build_large, BATCHES, tolerance=0.05, opt_level="O1")
        assert found.is_within
        assert found.kept == ("torch.bmm",)
        assert "cast_rules=amp.resolve_rules(float=['torch.bmm'])" in str(found)

    def test_operations_of_later_batches_are_candidates_too(self) -> None:
        class Sometimes(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if x.shape[0] > 8:
                    x = torch.bmm(x[None] * 1e3, torch.ones(1, 8, 8))[0]  # up to 80,000
                    return (x * 10).log1p()
                return x

        def build_sometimes() -> tuple[nn.Module, Any]:
            model = nn.Sequential(Sometimes(), nn.Linear(8, 4))
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        batches = [*BATCHES, (torch.full((16, 8), 10.0), torch.arange(16) % 4)]
        found = tune(build_sometimes, batches, opt_level="O1", count=2)
        assert found.is_within
        assert found.kept == ("torch.bmm",)

    def test_what_the_rules_compute_in_half_is_looked_at_where_the_rest_does_not_help(self) -> None:
        class Large(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (torch.bmm(x[None] * 1e5, torch.ones(1, 8, 8))[0] * 10).log1p()

        def build_large() -> tuple[nn.Module, Any]:
            model = nn.Sequential(Large(), nn.Linear(8, 4))
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        found = tune(build_large, BATCHES, opt_level="O1", most_in_half=True)
        assert found.is_within
        assert found.kept == ("torch.bmm",)
        assert found.moved == ()

    def test_without_need_the_level_is_left_alone(self) -> None:
        found = tune(build_harmless, BATCHES, tolerance=0.05, opt_level="O1")
        assert dict(found.arguments) == {"opt_level": "O1"}

    def test_most_in_half_is_for_casts_around_operations(self) -> None:
        with pytest.raises(amp.AmpError, match=r"^most_in_half: expected 'O1' or 'O4'"):
            tune(build, BATCHES, opt_level="O2", most_in_half=True)


def test_worst_batch_counts() -> None:
    calm, wild = torch.zeros(8, 8) - 20.0, torch.rand(8, 8)

    class Exponential(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = (x + 12).exp()
            return weights / weights.sum(-1, keepdim=True)

    def build_exponential() -> tuple[nn.Module, Any]:
        model = nn.Sequential(Exponential(), nn.Linear(8, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    batches = [(one, torch.arange(8) % 4) for one in (calm, wild)]
    assert tune(build_exponential, batches, opt_level="O3").kept == ()
    assert tune(build_exponential, batches, opt_level="O3", count=2).kept == ("0",)


def test_bfloat16_needs_nothing_kept_there() -> None:
    assert tune(build, BATCHES, tolerance=0.05, opt_level="O5").kept == ()


@pytest.mark.parametrize(("opt_level", "kept"), [("O2", "1"), ("O1", "torch.nn.functional.linear")])
def test_exception_of_the_models_own_is_a_run_that_is_outside(opt_level: str, kept: str) -> None:
    class HalfError(Exception):
        pass

    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            if found.dtype is torch.float16:
                raise HalfError
            return found

    def build_picky() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Tanh(), Picky(8, 4), nn.Tanh())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    found = tune(build_picky, BATCHES, opt_level=opt_level)
    assert found.is_within
    assert found.kept == (kept,)


@pytest.mark.parametrize("tolerance", [0, -1.0, float("inf"), "0.1"])
def test_tolerance_must_be_a_number_above_0(tolerance: Any) -> None:
    with pytest.raises(amp.AmpError, match=r"^tolerance: expected a number above 0"):
        tune(build, BATCHES, tolerance=tolerance)


def test_o0_has_nothing_to_tune() -> None:
    with pytest.raises(amp.AmpError, match="found O0"):
        tune(build, BATCHES, opt_level="O0")


@hypothesis.given(
    size=st.integers(1, 40), needed=st.sets(st.integers(0, 39), min_size=1, max_size=5)
)
def test_smallest_subset_is_what_is_needed(size: int, needed: set[int]) -> None:
    needed = {one % size for one in needed}
    trials: list[list[int]] = []

    def is_enough(found: list[int]) -> bool:
        trials.append(found)
        return needed <= set(found)

    assert smallest_subset(range(size), is_enough) == sorted(needed)


def test_one_of_many_is_found_in_few_trials() -> None:
    trials: list[list[int]] = []

    def is_enough(found: list[int]) -> bool:
        trials.append(found)
        return 700 in found

    assert smallest_subset(range(1024), is_enough) == [700]
    assert len(trials) <= 2 * 10  # 2 log2(1024)
