"""The comparison of levels: each figure against one computed by hand or by plain torch."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import mlp
from test_record_casts import MODELS
from torch import nn
from torch.profiler import ProfilerActivity, profile

import amp_patch as amp
from amp_patch.tools import compare_command
from amp_patch.tools.compare import compare
from amp_patch.tools.comparison import Comparison
from amp_patch.tools.gradient_figures import (
    ExponentHistogram,
    RangeShare,
    exponent_histogram,
    gradient_gaps,
    range_share,
)
from amp_patch.tools.jobs import Job, Variant, default_loss, seed_everything
from amp_patch.tools.level_result import LevelResult
from amp_patch.tools.level_runs import (
    Divergence,
    SeedRun,
    measure_memory,
    probe,
    time_steps,
    train,
)
from amp_patch.tools.live_memory import LiveMemory
from amp_patch.tools.machine import Machine
from amp_patch.tools.text_table import TextTable, bytes_text, share_text
from amp_patch.tools.verdict import Standing, verdict

STEPS = 6
Batch = tuple[torch.Tensor, torch.Tensor]


def build() -> tuple[nn.Module, Any]:
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches() -> Iterator[Batch]:
    for _ in range(STEPS):
        yield torch.randn(4, 6), torch.randn(4, 3)


def build_scheduled() -> tuple[nn.Module, Any, Any]:
    model, optimizer = build()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def a_run(*losses: float, seed: int = 0, divergence: Divergence | None = None) -> SeedRun:
    return SeedRun(seed, losses, (1.0,) * len(losses), (), divergence)


def a_comparison(*levels: LevelResult, spread: float = 0.1) -> Comparison:
    exponents = ExponentHistogram(-64, (0,) * 40 + (3,) + (0,) * 56)
    return Comparison(levels, 100, 1, (1.0, 1.0 + spread), exponents, Machine("2", "a cpu", 1))


def words(found: Comparison) -> str:
    """What is printed, without its line breaks."""
    return " ".join(str(found).split())


def interrupted(model: nn.Module, batch: Batch) -> torch.Tensor:
    raise KeyboardInterrupt


class TestTraining:
    def test_o0_is_plain_torch_bit_for_bit(self) -> None:
        run = train(Job(build, batches), Variant.of("O0"), 3, STEPS).run

        torch.manual_seed(3)
        model, optimizer = build()
        losses = []
        for inputs, targets in batches():
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert run.losses == tuple(losses)

    def test_all_levels_start_from_the_same_weights_order_and_randomness(self) -> None:
        seen: dict[str, list[tuple[float, float]]] = {}
        current: list[tuple[float, float]] = []

        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            current.append((batch[0].double().sum().item(), torch.rand(1).item()))
            return default_loss(model, batch)

        for level in ("O0", "O1", "O2", "O5"):
            current.clear()
            train(Job(build, batches, loss), Variant.of(level), 1, STEPS)
            seen[level] = list(current)
        assert len(seen["O0"]) == STEPS
        assert all(rows == seen["O0"] for rows in seen.values())

    def test_scheduler_steps_with_the_optimizer(self) -> None:
        made: list[Any] = []

        def build_and_keep() -> Any:
            made.append(build_scheduled())
            return made[-1]

        train(Job(build_and_keep, batches), Variant.of("O1"), 0, 3)
        assert made[0][1].param_groups[0]["lr"] == 0.1 * 0.5**3

    def test_skipped_step_holds_the_scheduler(self) -> None:
        made: list[Any] = []

        def build_and_keep() -> Any:
            made.append(build_scheduled())
            return made[-1]

        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            return default_loss(model, batch) * 1e6

        run = train(Job(build_and_keep, batches, loss), Variant.of("O2"), 0, STEPS).run
        assert run.skipped
        taken = STEPS - len(run.skipped)
        assert made[0][1].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**taken)

    def test_batches_are_gone_through_again(self) -> None:
        job = Job(build, [torch.ones(1), torch.zeros(1)])
        assert [float(one) for one in job.stream(5)] == [1, 0, 1, 0, 1]

    def test_generator_serves_every_level(self) -> None:
        found = compare(build, batches(), ["O0", "O4"], STEPS, turns=1, steps_a_turn=1)
        assert [len(level.runs[0].losses) for level in found.levels] == [STEPS, STEPS]

    def test_divergence_names_step_and_weight(self) -> None:
        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            loss.calls += 1  # type: ignore[attr-defined]
            found = default_loss(model, batch)
            if loss.calls == 4:  # type: ignore[attr-defined]
                return found + model[2].weight.sum() * math.inf  # type: ignore[index, operator]
            return found

        loss.calls = 0  # type: ignore[attr-defined]
        run = train(Job(build, batches, loss), Variant.of("O0"), 0, STEPS).run
        assert run.divergence == Divergence(3, "2.weight")
        assert len(run.losses) == 4
        assert math.isnan(run.final_loss)

    def test_skipped_steps_and_scales_are_recorded(self) -> None:
        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            return default_loss(model, batch) * 1e5  # more than float16 holds at scale 65536

        run = train(Job(build, batches, loss), Variant.of("O2"), 0, STEPS).run
        assert run.skipped[0] == 0
        assert run.scales[0] == 65536.0
        for step in run.skipped:
            if step + 1 < STEPS:
                assert run.scales[step + 1] == run.scales[step] / 2

    def test_final_loss_is_the_mean_of_the_last_tenth(self) -> None:
        assert a_run(*range(20)).final_loss == (18 + 19) / 2
        assert a_run(5.0, 3.0).final_loss == 3.0

    @pytest.mark.parametrize("made", [42, (1,), (nn.Linear(1, 1), 3)], ids=str)
    def test_build_that_returns_something_else_is_refused(self, made: Any) -> None:
        with pytest.raises(amp.AmpError, match=r"^build: expected"):
            train(Job(lambda: made, batches), Variant.of("O0"), 0, 1)

    def test_no_batches_are_refused(self) -> None:
        with pytest.raises(amp.AmpError, match=r"^batches: expected at least one"):
            train(Job(build, []), Variant.of("O0"), 0, 1)


class TestDefaultLoss:
    def test_integers_mean_cross_entropy(self) -> None:
        model, inputs, labels = nn.Linear(3, 4), torch.randn(2, 3), torch.tensor([0, 3])
        expected = F.cross_entropy(model(inputs), labels)
        assert torch.equal(default_loss(model, (inputs, labels)), expected)

    def test_loss_of_the_model_itself_is_taken(self) -> None:
        class Own(nn.Module):
            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": x.sum(), "logits": x}

        assert default_loss(Own(), {"x": torch.ones(3)}) == 3.0
        assert default_loss(Own(), torch.ones(2)) == 2.0

    def test_what_is_no_loss_is_refused(self) -> None:
        with pytest.raises(amp.AmpError, match=r"expected a function loss\(model, batch\)"):
            default_loss(nn.Linear(3, 4), torch.ones(2, 3))


class TestGradients:
    def test_gap_is_what_is_computed_by_hand(self) -> None:
        found = {"a.weight": torch.tensor([3.0, 0.0]), "a.bias": torch.tensor([0.0])}
        reference = {"a.weight": torch.tensor([3.0, 0.0]), "a.bias": torch.tensor([4.0])}
        (gap,) = gradient_gaps(found, reference)
        assert gap.layer == "a"
        assert gap.cosine == pytest.approx(3 / 5, abs=1e-15)  # (3,0,0) and (3,0,4): 9 / (3 * 5)
        assert gap.relative_error == pytest.approx(4 / 5, abs=1e-15)

    def test_gap_of_nothing_and_of_nan(self) -> None:
        zero, one = torch.zeros(2), torch.ones(2)
        assert gradient_gaps({"w": zero}, {"w": zero})[0].cosine == 1.0
        assert gradient_gaps({}, {"w": one})[0].cosine == 0.0
        assert math.isnan(gradient_gaps({"w": one * math.nan}, {"w": one})[0].cosine)

    def test_range_share_is_what_is_computed_by_hand(self) -> None:
        # float16 rounds 2^-25 and less to zero and 65520 and more to inf; zeros do not count.
        values = torch.tensor([0.0, 2.0**-25, 2.0**-24, 1.0, 65519.0, 65520.0])
        assert range_share([values], 1.0) == RangeShare(1.0, flushed=1 / 5, overflowed=1 / 5)
        assert range_share([values], 2.0) == RangeShare(2.0, flushed=0.0, overflowed=2 / 5)

    def test_histogram_counts_powers_of_two(self) -> None:
        values = torch.tensor([0.0, 1.0, -1.5, 2.0, 0.25, math.inf, 2.0**-120, 2.0**120])
        found = exponent_histogram([values])
        counts = {found.lowest + i: n for i, n in enumerate(found.counts) if n}
        assert counts == {0: 2, 1: 1, -2: 1, -64: 1, 32: 1}

    def test_probe_of_o0_is_the_gradient_of_plain_torch(self) -> None:
        found = probe(Job(build, batches), Variant.of("O0"), 2)
        torch.manual_seed(2)
        model, _ = build()
        inputs, targets = next(batches())
        F.mse_loss(model(inputs), targets).backward()
        for path, parameter in model.named_parameters():
            assert torch.equal(found.gradients[path], parameter.grad), path

    @pytest.mark.parametrize("level", ["O1", "O2", "O5"])
    def test_probe_gives_unscaled_gradients_by_path(self, level: str) -> None:
        batch = [(torch.randn(4, 6), torch.randn(4, 3))]
        reference = probe(Job(build, batch), Variant.of("O0"), 0)
        found = probe(Job(build, batch), Variant.of(level), 0)
        gaps = gradient_gaps(found.gradients, reference.gradients)
        assert [gap.layer for gap in gaps] == ["0", "2", "4"]
        # One rounding is off by 2^-8 in bfloat16, and a few of them add up.
        assert all(gap.relative_error < 0.05 and gap.cosine > 0.99 for gap in gaps)

    def test_probe_tries_again_after_an_overflow(self) -> None:
        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            return default_loss(model, batch) * 1e4

        job = Job(build, [(torch.randn(4, 6), torch.randn(4, 3))], loss)
        reference = probe(job, Variant.of("O0"), 0)
        found = probe(job, Variant.of("O2"), 0)
        assert all(gradient.isfinite().all() for gradient in found.gradients.values())
        assert gradient_gaps(found.gradients, reference.gradients)[0].cosine > 0.99


class TestMemory:
    def test_live_bytes_are_those_of_the_tensors_that_live(self) -> None:
        with LiveMemory() as memory:
            first = torch.ones(256)  # 1024 bytes
            second = first * 2  # 1024 more
            view = second.view(16, 16)  # none
            del first
            assert (memory.now, memory.peak) == (1024, 2048)
            del second
            assert memory.now == 1024
            del view
            assert (memory.now, memory.peak) == (0, 2048)

    def test_weights_gradients_and_momentum_are_in_the_peak(self) -> None:
        model, _ = build()
        weights = sum(p.numel() * 4 for p in model.parameters())
        peak = measure_memory(Job(build, batches), Variant.of("O0"), 0)
        # Weights, gradients and momentum; the largest layer's update comes on top.
        assert 3 * weights <= peak <= 6 * weights

    def test_state_of_the_optimizer_is_in_it_where_first_steps_overflow(self) -> None:
        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            return default_loss(model, batch) * 1e4

        job, level = Job(build, batches, loss), Variant.of("O1")
        assert train(job, level, 0, STEPS).run.skipped[:2] == (0, 1)  # all that are looked at
        settled = {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
        momentum = sum(p.numel() * 4 for p in build()[0].parameters())
        without = measure_memory(job, level, 0)
        assert measure_memory(job, level, 0, settled) > without + momentum / 2

    @pytest.mark.parametrize("name", ["gpt", "lstm"])
    def test_peak_is_that_of_torchs_profiler(self, name: str) -> None:
        # Not of convolutions: the scratch memory inside them counts for the profiler alone.
        make, batch = MODELS[name]

        def run() -> None:
            model, inputs = make(), batch()
            optimizer = torch.optim.Adam(model.parameters(), foreach=False)
            for _ in range(2):
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        run()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run()
        events = profiled.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        expected = max(itertools.accumulate(size for _, size in changes))
        with LiveMemory() as memory:
            run()
        assert memory.peak == pytest.approx(expected, rel=0.2)

    def test_allocator_of_a_device_is_asked_where_there_is_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        class Allocator:
            def memory_allocated(self) -> int:
                return 1000

            def reset_peak_memory_stats(self) -> None:
                asked.append("reset")

            def max_memory_allocated(self) -> int:
                return 5000

        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch, "get_device_module", lambda _: Allocator())
        assert measure_memory(Job(build, batches), Variant.of("O0"), 0) == 4000
        assert asked == ["reset"]

    def test_half_weights_need_less_than_fp32_ones(self) -> None:
        def wide() -> tuple[nn.Module, Any]:
            model = nn.Linear(256, 256)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        job = Job(wide, [(torch.ones(1, 256), torch.ones(1, 256))])
        full, half = (measure_memory(job, Variant.of(level), 0) for level in ("O0", "O3"))
        assert half < 0.6 * full


class TestTiming:
    def test_only_steps_after_the_warm_up_are_timed(self) -> None:
        seconds = time_steps(Job(build, batches), Variant.of("O0"), 0, {}, warm_up=2, count=3)
        assert len(seconds) == 3
        assert all(one > 0 for one in seconds)

    def test_ratio_is_the_median_over_the_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = {"O0": [1.0, 2.0, 4.0], "O5": [3.0, 5.0, 40.0]}  # ratios 3, 2.5 and 10
        taken = {level: iter(values) for level, values in times.items()}

        def timed(job: Job, variant: Variant, *_: Any) -> tuple[float, ...]:
            return (next(taken[variant.label]),)

        monkeypatch.setattr("amp_patch.tools.compare.time_steps", timed)
        found = compare(build, batches, ["O0", "O5"], STEPS, turns=3)
        assert found["O5"].step_ratio == 3.0
        assert found["O0"].step_ratio == 1.0
        assert found["O5"].step_seconds == statistics.median(times["O5"])

    def test_levels_take_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[str] = []

        def timed(job: Job, variant: Variant, *_: Any) -> tuple[float, ...]:
            order.append(variant.label)
            return (1.0,)

        monkeypatch.setattr("amp_patch.tools.compare.time_steps", timed)
        compare(build, batches, ["O0", "O4", "O5"], STEPS, turns=2)
        assert order == ["O0", "O4", "O5", "O4", "O5", "O0"]


@pytest.fixture(scope="module")
def found() -> Comparison:
    levels = ["O1", "O2", {"opt_level": "O2", "keep_fp32": "4"}]
    return compare(build, batches, levels, STEPS, turns=1, steps_a_turn=1)


class TestCompare:
    def test_o0_comes_first_though_it_was_not_asked_for(self, found: Comparison) -> None:
        assert [level.label for level in found.levels] == ["O0", "O1", "O2", "O2 keep_fp32=4"]

    def test_every_level_has_every_figure(self, found: Comparison) -> None:
        for level in found.levels:
            assert len(level.runs[0].losses) == len(level.runs[0].scales) == STEPS
            assert level.step_seconds is not None
            assert level.peak_bytes is not None
            assert level.gaps.keys() == {"start", "end"}
            assert level.range_at_one is not None

    def test_spread_is_that_of_o0_over_three_seeds(self, found: Comparison) -> None:
        finals = [
            train(Job(build, batches), Variant.of("O0"), seed, STEPS).run.final_loss
            for seed in range(3)
        ]
        assert found.baseline_losses == tuple(finals)
        assert found.spread == max(finals) - min(finals)

    def test_seeds_that_make_no_difference_are_said(self) -> None:
        def build_seeded() -> tuple[nn.Module, Any]:
            torch.manual_seed(0)
            return build()

        fixed = [(torch.ones(4, 6), torch.ones(4, 3))]
        found = compare(build_seeded, fixed, ["O4"], 4, turns=1, steps_a_turn=1)
        assert found.spread == 0
        assert "same from all 3 seeds" in words(found)
        assert "O0 ends alike from all seeds" in found.verdict
        assert "beyond" not in found.verdict

    def test_distance_is_from_the_same_seeds(self, found: Comparison) -> None:
        (own,), (reference,) = found["O1"].runs, found["O0"].runs
        assert found.distance(found["O1"]) == own.final_loss - reference.final_loss

    def test_print_is_a_table_and_two_sentences(self, found: Comparison) -> None:
        text = str(found)
        assert all(level.label in text for level in found.levels)
        assert text.endswith(found.verdict)
        assert len(re.findall(r"\.(?: |$)", found.verdict)) == 2

    def test_json_is_the_dict(self, found: Comparison, tmp_path: Path) -> None:
        found.to_json(tmp_path / "found.json")
        data = json.loads((tmp_path / "found.json").read_text())
        assert data == json.loads(json.dumps(found.to_dict()))
        assert data["verdict"] == found.verdict
        assert [level["label"] for level in data["levels"]] == ["O0", "O1", "O2", "O2 keep_fp32=4"]
        assert data["levels"][1]["runs"][0]["losses"] == list(found["O1"].runs[0].losses)

    def test_what_is_not_finite_is_null(self) -> None:
        diverged = a_run(1.0, math.nan, divergence=Divergence(1, "w"))
        found = a_comparison(LevelResult("O0", (a_run(1.0),)), LevelResult("O3", (diverged,)))
        data = json.loads(found.to_json())
        assert data["levels"][1]["runs"][0]["losses"] == [1.0, None]
        assert data["levels"][1]["final_loss"] is None

    def test_nothing_is_left_switched_on(self, found: Comparison) -> None:
        with pytest.raises(amp.AmpError):
            amp.state_dict()

    def test_level_that_cannot_run_is_reported_and_the_others_go_on(self) -> None:
        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            if next(model.parameters()).dtype is torch.float16:
                raise RuntimeError("no kernel for this")
            return default_loss(model, batch)

        found = compare(build, batches, ["O0", "O3", "O5"], 2, loss=loss, turns=1, steps_a_turn=1)
        assert found["O3"].failure == "RuntimeError: no kernel for this"
        assert "O3 fails (RuntimeError: no kernel for this)" in found.verdict
        assert found["O5"].failure == ""
        assert "fails" in str(found)

    def test_exception_of_the_models_own_is_the_failure_of_its_level(self) -> None:
        class UnstableError(Exception):
            pass

        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            if next(model.parameters()).dtype is torch.float16:
                raise UnstableError("half")
            return default_loss(model, batch)

        found = compare(build, batches, ["O3", "O5"], 2, loss=loss, turns=1, steps_a_turn=1)
        assert (found["O3"].failure, found["O5"].failure) == ("UnstableError: half", "")
        with pytest.raises(KeyboardInterrupt):
            compare(build, batches, ["O3"], 2, loss=interrupted, turns=1)

    @pytest.mark.parametrize(
        "levels",
        [
            ["O1", "O7"],
            ["o1"],
            [{"opt_level": "O2", "nonsense": 1}],
            [{"opt_level": "O2", "keep_fp32": 3}],
            [{"opt_level": "O2", "loss_scale": "large"}],
            [{1: "O2"}],
            [1],
            1,
            None,
        ],
        ids=str,
    )
    def test_levels_that_initialize_would_refuse_are_refused_before_the_work(
        self, levels: Any
    ) -> None:
        built = []

        def counted() -> Any:
            built.append(True)
            return build()

        with pytest.raises(amp.AmpError, match=r"^(opt_levels?|keep_fp32|loss_scale): expected "):
            compare(counted, batches, levels, 2)
        assert not built

    @pytest.mark.parametrize(
        "given",
        [{"build": 3}, {"batches": None}, {"loss": "mse"}],
        ids=["build", "batches", "loss"],
    )
    def test_parts_of_a_training_that_are_none_are_refused(self, given: dict[str, Any]) -> None:
        (name,) = given
        with pytest.raises(amp.AmpError, match=f"^{name}: expected "):
            compare(**{"build": build, "batches": batches, **given})
        with pytest.raises(amp.AmpError, match=f"^{name}: expected "):
            amp.tune(**{"build": build, "batches": batches, **given})

    def test_warnings_of_others_are_passed_on_once(self) -> None:
        def warning() -> Any:
            warnings.warn("mine", UserWarning, stacklevel=1)
            return build()

        for call in (
            lambda: compare(warning, batches, ["O5"], 2, turns=1, steps_a_turn=1),
            lambda: amp.tune(warning, list(batches())),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            assert [(str(one.message), one.filename) for one in caught] == [("mine", __file__)]

    def test_random_numbers_go_on_as_if_nothing_had_run(self) -> None:
        def drawn() -> tuple[float, ...]:
            return random.random(), float(np.random.rand()), float(torch.rand(1))

        for call in (
            lambda: compare(build, batches, ["O5"], 2, turns=1, steps_a_turn=1),
            lambda: amp.tune(build, batches),
        ):
            seed_everything(77)
            expected = drawn()
            seed_everything(77)
            call()
            assert drawn() == expected

    def test_o0_that_cannot_run_raises(self) -> None:
        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            raise RuntimeError("out of order")

        with pytest.raises(RuntimeError, match="out of order"):
            compare(build, batches, ["O0", "O1"], 2, loss=loss)
        with pytest.raises(amp.AmpError):
            amp.state_dict()

    def test_warnings_of_a_level_are_shown_with_it(self) -> None:
        def with_adam() -> tuple[nn.Module, Any]:
            model = mlp()
            return model, torch.optim.Adam(model.parameters())

        found = compare(with_adam, batches, ["O3"], 2, turns=1, steps_a_turn=1)
        assert "eps=1e-08 of Adam is 0 in float16" in found["O3"].warnings[0]
        assert "O3 warns: eps=1e-08" in str(found)

    def test_open_session_is_refused(self) -> None:
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        with pytest.raises(amp.AmpError, match=r"^compare: .* Call uninitialize\(\) first"):
            compare(build, batches)

    @pytest.mark.parametrize("name", ["steps", "seeds", "turns", "steps_a_turn"])
    def test_counts_below_one_are_refused(self, name: str) -> None:
        with pytest.raises(amp.AmpError, match=f"^{name}: expected an integer of at least 1"):
            compare(build, batches, **{name: 0})  # type: ignore[arg-type]

    def test_level_twice_is_refused(self) -> None:
        with pytest.raises(amp.AmpError, match=r"^opt_levels: expected each one once"):
            compare(build, batches, ["O1", "O1"])

    def test_progress_counts_up_to_the_end(self) -> None:
        told: list[tuple[int, int, str]] = []
        compare(
            build, batches, ["O0", "O4"], 2, turns=2, steps_a_turn=1,
            progress=lambda *row: told.append(row),
        )  # fmt: skip
        # 3 trainings of O0 and 1 of O4; for both memory, two probes and two turns
        assert [done for done, _, _ in told] == list(range(4 + 2 * 5))
        assert {total for _, total, _ in told} == {4 + 2 * 5}
        assert told[0][2] == "O0: training, seed 0"

    def test_isolated_levels_give_the_same_losses(self) -> None:
        options: dict[str, Any] = {"steps": 3, "turns": 1, "steps_a_turn": 1}
        here = compare(build, batches, ["O0", "O5"], **options)
        apart = compare(build, batches, ["O0", "O5"], **options, isolate=True)
        for level in ("O0", "O5"):
            assert apart[level].runs[0].losses == here[level].runs[0].losses

    def test_isolation_refuses_what_another_process_cannot_import(self) -> None:
        with pytest.raises(amp.AmpError, match=r"^isolate=True: expected .* can import"):
            compare(lambda: build(), batches, isolate=True)  # noqa: PLW0108 (a lambda is the point)


class TestVerdict:
    def test_fast_level_inside_the_spread_and_one_that_diverges(self) -> None:
        rows = [
            Standing("O0", 1.0, 0.0),
            Standing("O2", 1 / 1.9, 0.01),
            Standing("O3", 0.4, math.nan, "diverges at step 31 in `head.weight`"),
        ]
        assert verdict(rows, 0.02) == (
            "O2 is 1.9 times faster than O0, and its loss stays inside O0's spread. "
            "O3 diverges at step 31 in `head.weight`."
        )

    def test_no_level_is_faster(self) -> None:
        rows = [Standing("O0", 1.0, 0.0), Standing("O1", 2.5, 0.0), Standing("O4", 3.0, 0.0)]
        assert verdict(rows, 0.1) == (
            "No level is faster than O0 here: the fastest, O1, takes 2.5 times as long, and its "
            "loss stays inside O0's spread. O4 does too, but takes 3.0 times as long."
        )

    def test_sound_levels_are_told_apart_by_their_time(self) -> None:
        ratios = {"O1": 9.0, "O2": 12.0, "O4": 0.8, "O5": 0.7}
        rows = [Standing("O0", 1.0, 0.0), *(Standing(one, r, 0.0) for one, r in ratios.items())]
        assert verdict(rows, 0.1).partition(". ")[2] == (
            "O4 stays inside it too; O1 and O2 do too, but take up to 12.0 times as long."
        )

    def test_level_outside_the_spread_is_not_recommended(self) -> None:
        rows = [Standing("O0", 1.0, 0.0), Standing("O1", 0.9, 0.01), Standing("O3", 0.3, 0.5)]
        assert verdict(rows, 0.1) == (
            "O1 is 1.1 times faster than O0, and its loss stays inside O0's spread. "
            "O3 ends with a loss 0.5 higher, beyond the spread of 0.1."
        )

    def test_loss_far_below_is_said_as_well(self) -> None:
        rows = [Standing("O0", 1.0, 0.0), Standing("O1", 1.02, -0.5)]
        assert verdict(rows, 0.1) == (
            "O1 is about as fast as O0, and its loss ends 0.5 lower, beyond O0's spread of 0.1. "
            "No other level was run."
        )

    def test_level_that_skips_every_step_is_no_winner(self) -> None:
        rows = [Standing("O0", 1.0, 0.0), Standing("O1", 0.2, 0.0, skips_all=True)]
        assert verdict(rows, 0.1) == "No other level trains as O0 does. O1 skips every step."

    def test_sound_levels_come_before_those_that_are_not(self) -> None:
        """So that "too" follows what it refers to."""
        rows = [
            Standing("O0", 1.0, 0.0),
            Standing("O2", 1.1, 0.0),
            Standing("O4", 1.2, 0.5),
            Standing("O1", 1.6, 0.0),
        ]
        assert verdict(rows, 0.1).partition(". ")[2] == (
            "O1 does too, but takes 1.6 times as long; "
            "O4 ends with a loss 0.5 higher, beyond the spread of 0.1."
        )

    def test_levels_are_inside_too_only_if_the_best_one_is(self) -> None:
        rows = [Standing("O0", 1.0, 0.0), Standing("O2", 0.5, -0.5)]
        others = [Standing("O4", 0.8, 0.0), Standing("O1", 3.0, 0.0), Standing("O5", 3.0, -0.3)]
        assert verdict([*rows, *others], 0.1).partition(". ")[2] == (
            "O4 stays inside it; O1 does too, but takes 3.0 times as long; "
            "O5 ends 0.3 lower, but takes 3.0 times as long."
        )
        assert verdict([*rows, others[1]], 0.1).partition(". ")[2] == (
            "O1 stays inside it, but takes 3.0 times as long."
        )

    @pytest.mark.parametrize(
        "unsound",
        [
            Standing("O3", 0.6, 0.5),
            Standing("O3", 0.6, math.nan, "diverges at step 3 in `w`"),
            Standing("O3", 0.6, 0.0, skips_all=True),
        ],
        ids=["too high", "diverges", "skips"],
    )
    def test_faster_level_that_is_not_sound_is_not_denied(self, unsound: Standing) -> None:
        rows = [Standing("O0", 1.0, 0.0), Standing("O2", 1.3, 0.0), unsound]
        assert verdict(rows, 0.1).startswith(
            "No level that trains as O0 does is faster than O0 here: the fastest of those, O2, "
            "takes 1.3 times as long, and its loss stays inside O0's spread. O3 "
        )

    def test_without_a_spread_no_loss_is_beyond_it(self) -> None:
        rows = [Standing("O0", 1.0, 0.0), Standing("O4", 0.9, 0.002), Standing("O2", 2.0, -9e-6)]
        assert verdict(rows, 0.0) == (
            "O4 is 1.1 times faster than O0, and its loss ends 0.002 higher (O0 ends alike from "
            "all seeds: nothing says what chance does). O2 ends 9e-06 lower, but takes 2.0 times "
            "as long."
        )

    @pytest.mark.parametrize(
        ("finals", "where"),
        [
            ((1.0, 1.1, math.nan), "seed 2"),
            ((1.0, math.nan, 1.1), "seed 1"),
            ((1.0, math.nan, math.nan), "seeds 1, 2"),
        ],
    )
    def test_baseline_that_diverges_from_another_seed_is_said(
        self, finals: tuple[float, ...], where: str
    ) -> None:
        levels = LevelResult("O0", (a_run(1.0),), step_ratio=1.0), LevelResult("O2", (a_run(1.0),))
        found = replace(a_comparison(*levels), baseline_losses=finals)
        assert found.verdict.startswith(f"O0 itself diverges from {where} of 3, so there is ")
        rest = [one for one in finals if not math.isnan(one)]
        assert found.spread == max(rest) - min(rest)
        assert f"O0 diverges from {where} of 3, those from the others lie" in words(found)

    def test_bad_baseline_is_said_first(self) -> None:
        rows = [Standing("O0", 1.0, math.nan, "diverges at step 3 in `w`"), Standing("O1", 1, 0)]
        assert verdict(rows, math.nan).startswith("O0 itself diverges at step 3 in `w`")

    def test_comparison_hands_its_figures_to_the_verdict(self) -> None:
        diverged = a_run(1.0, math.nan, divergence=Divergence(1, "head.weight"))
        found = a_comparison(
            LevelResult("O0", (a_run(1.0),), step_ratio=1.0),
            LevelResult("O2", (a_run(1.05),), step_ratio=0.5),
            LevelResult("O3", (diverged,), step_ratio=0.4),
        )
        assert found.verdict == (
            "O2 is 2.0 times faster than O0, and its loss stays inside O0's spread. "
            "O3 diverges at step 1 in `head.weight`."
        )


class TestTable:
    TABLE = TextTable(("name", "a\ncount"), (("x", "1"), ("longer", "22")), notes=("A note.",))

    def test_plain_text_is_aligned(self) -> None:
        assert self.TABLE.plain() == (
            "            a\nname    count\n-------------\nx           1\nlonger     22\n\nA note."
        )

    def test_without_rich_the_text_is_plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("amp_patch.tools.text_table.find_extra", lambda _: None)
        assert str(self.TABLE) == self.TABLE.plain()

    def test_with_rich_the_same_cells_are_shown(self) -> None:
        rows = [line.split() for line in str(self.TABLE).splitlines()]
        assert ["longer", "22"] in rows
        assert "A note." in str(self.TABLE)

    def test_html_is_escaped(self) -> None:
        table = TextTable(("<b>",), (("a & b",),))
        assert '<th class="left">&lt;b&gt;</th>' in table.html()
        assert "a &amp; b" in table.html()

    def test_units(self) -> None:
        assert bytes_text(1023) == "1023 B"
        assert bytes_text(1536) == "1.5 KiB"
        assert share_text(1e-6) == "<0.01 %"
        assert share_text(0.0) == "0 %"


class TestCommandLine:
    def run(self, *arguments: str) -> int:
        import argparse

        parser = argparse.ArgumentParser()
        compare_command.add_command(parser.add_subparsers())
        options = parser.parse_args(["compare", *arguments])
        code: int = options.run(options)
        return code

    def test_user_functions_are_compared_and_files_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = [f"--{kind}={tmp_path / f'found.{kind}'}" for kind in ("json", "html")]
        code = self.run(
            "test_compare:build", "--batches", "test_compare:batches", "--levels", "O0,O4",
            "--steps", "3", "--turns", "1", *files,
        )  # fmt: skip
        assert code == 0
        data = json.loads((tmp_path / "found.json").read_text())
        assert [level["label"] for level in data["levels"]] == ["O0", "O4"]
        assert capsys.readouterr().out.rstrip().endswith(data["verdict"])
        assert "<!DOCTYPE html>" in (tmp_path / "found.html").read_text()

    def test_demo_runs_on_the_digits(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--demo", "--levels", "O0,O5", "--steps", "3", "--turns", "1") == 0
        assert "O5" in capsys.readouterr().out

    def test_nothing_to_train_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run() == 2
        assert "or --demo" in capsys.readouterr().err

    def test_name_that_cannot_be_imported_is_one_line(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            self.run("no_such_module:build")
        assert "cannot import 'no_such_module:build'" in capsys.readouterr().err
