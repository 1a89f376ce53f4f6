from __future__ import annotations

import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

from amp_patch.tools import demo
from amp_patch.tools.digits import DigitSplit, load_digit_split, make_network, split_indices
from amp_patch.tools.level_table import LevelRun, make_table, summarize

CPU = torch.device("cpu")
SCANS = 1797
PARAMETERS = 6138  # 144 + 2 * 16 of the first convolution and norm, 4608 + 2 * 32, 1280 + 10
BATCHNORM_PARAMETERS = 96


@pytest.fixture(scope="module")
def digits() -> DigitSplit:
    return load_digit_split(CPU)


def a_run(**changes: Any) -> LevelRun:
    values: dict[str, Any] = {
        "opt_level": "O0",
        "seed": 0,
        "accuracy": 98.5,
        "final_loss": 0.25,
        "step_seconds": 0.002,
        "weight_bytes": 24552,
        "master_bytes": 0,
        "loss_scale": 1.0,
        "skipped_steps": 0,
    }
    return LevelRun(**values | changes)


def render(runs: list[LevelRun]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(make_table(summarize(runs), caption="how it was measured"))
    return console.file.getvalue()  # type: ignore[attr-defined]


class TestSplit:
    def test_parts_are_disjoint_and_hold_every_scan(self) -> None:
        train, test = split_indices(torch.arange(SCANS) % 10)
        assert len(test) == 599
        assert sorted(train + test) == list(range(SCANS))

    def test_split_is_the_same_whatever_the_seed(self, digits: DigitSplit) -> None:
        torch.manual_seed(1234)
        again = load_digit_split(CPU)
        assert torch.equal(again.test_images, digits.test_images)
        assert torch.equal(again.train_labels, digits.train_labels)

    def test_each_digit_has_its_share_in_both_parts(self, digits: DigitSplit) -> None:
        train = torch.bincount(digits.train_labels, minlength=10)
        test = torch.bincount(digits.test_labels, minlength=10)
        # A third of each digit is held out; whole scans can miss that by at most one.
        assert ((train + test) / 3 - test).abs().max() <= 1

    def test_no_scan_of_the_held_out_part_is_trained_on(self, digits: DigitSplit) -> None:
        trained = {tuple(scan.flatten().tolist()) for scan in digits.train_images}
        held_out = {tuple(scan.flatten().tolist()) for scan in digits.test_images}
        assert not trained & held_out

    def test_scans_are_float32_between_zero_and_one(self, digits: DigitSplit) -> None:
        assert digits.train_images.dtype is torch.float32
        assert digits.train_images.shape == (1198, 1, 8, 8)
        assert digits.train_images.min() == 0.0
        assert digits.train_images.max() == 1.0


class TestTraining:
    def test_o0_is_plain_torch_bit_for_bit(
        self, digits: DigitSplit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        networks: list[nn.Module] = []

        def make_and_keep() -> nn.Module:
            networks.append(make_network())
            return networks[-1]

        monkeypatch.setattr(demo, "make_network", make_and_keep)
        run = demo.train("O0", 7, 2, digits)

        torch.manual_seed(7)
        model = make_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        loader = demo.make_loader(digits)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * len(loader))
        for _ in range(2):
            losses = []
            for images, labels in loader:
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                losses.append(loss.item())

        expected = model.state_dict()
        for name, found in networks[0].state_dict().items():
            assert torch.equal(found, expected[name]), name
        assert run.final_loss == statistics.fmean(losses)
        assert run.accuracy == demo.measure_accuracy(model, digits)

    @pytest.mark.parametrize(
        ("level", "weight_bytes", "master_bytes"),
        [
            ("O1", 4 * PARAMETERS, 0),
            (
                "O2",
                2 * PARAMETERS + 2 * BATCHNORM_PARAMETERS,
                4 * (PARAMETERS - BATCHNORM_PARAMETERS),
            ),
            ("O3", 2 * PARAMETERS, 0),
            ("O4", 4 * PARAMETERS, 0),
            (
                "O5",
                2 * PARAMETERS + 2 * BATCHNORM_PARAMETERS,
                4 * (PARAMETERS - BATCHNORM_PARAMETERS),
            ),
        ],
    )
    def test_each_level_learns_and_keeps_the_bytes_it_should(
        self, digits: DigitSplit, level: str, weight_bytes: int, master_bytes: int
    ) -> None:
        run = demo.train(level, 0, 2, digits)
        assert run.accuracy > 80  # ten digits: who guesses has 10
        assert run.final_loss < 0.5 * math.log(10)
        assert (run.weight_bytes, run.master_bytes) == (weight_bytes, master_bytes)

    def test_result_follows_the_seed(self, digits: DigitSplit) -> None:
        first, again, other = (demo.train("O4", seed, 1, digits) for seed in (0, 0, 1))
        assert first.final_loss == again.final_loss
        assert first.final_loss != other.final_loss

    def test_every_step_is_reported(self, digits: DigitSplit) -> None:
        steps: list[int] = []
        demo.train("O0", 0, 1, digits, after_step=lambda: steps.append(1))
        assert len(steps) == 1198 // 32

    def test_exception_in_training_leaves_nothing_switched_on(self, digits: DigitSplit) -> None:
        def stop() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            demo.train("O1", 0, 1, digits, after_step=stop)
        # In float16 under a patch, 70,000 would overflow.
        assert functional.linear(torch.tensor([7e4]), torch.ones(1, 1)).dtype is torch.float32


class TestTable:
    def test_row_shows_every_figure(self) -> None:
        runs = [
            a_run(),
            a_run(
                opt_level="O2",
                accuracy=98.25,
                final_loss=0.125,
                step_seconds=0.005,
                weight_bytes=12468,
                master_bytes=24168,
                loss_scale=32768.0,
                skipped_steps=1,
            ),
        ]
        rows = [line.split() for line in render(runs).splitlines()]
        assert ["O0", "98.50", "0.2500", "1.00", "24,552", "-", "1", "0"] in rows
        assert ["O2", "98.25", "0.1250", "2.50", "12,468", "24,168", "32768", "1"] in rows

    def test_caption_is_shown(self) -> None:
        assert "how it was measured" in render([a_run()])

    def test_without_o0_there_is_no_ratio(self) -> None:
        rows = [line.split() for line in render([a_run(opt_level="O1")]).splitlines()]
        assert ["O1", "98.50", "0.2500", "-", "24,552", "-", "1", "0"] in rows

    def test_several_seeds_give_mean_and_spread(self) -> None:
        runs = [
            a_run(accuracy=98.0, final_loss=0.2, skipped_steps=1),
            a_run(accuracy=99.0, final_loss=0.4, skipped_steps=2, seed=1),
        ]
        text = render(runs)
        assert "98.50" in text
        assert "98.00 to 99.00" in text
        assert "0.3000" in text
        (summary,) = summarize(runs)
        assert summary.skipped_steps == 3

    def test_ratio_is_of_medians_over_the_seeds(self) -> None:
        times = {"O0": (1.0, 2.0, 9.0), "O1": (3.0, 4.0, 80.0)}
        runs = [
            a_run(opt_level=level, seed=seed, step_seconds=seconds)
            for level, values in times.items()
            for seed, seconds in enumerate(values)
        ]
        assert [summary.step_ratio for summary in summarize(runs)] == [1.0, 2.0]

    def test_loss_that_is_not_finite_still_makes_valid_json(self) -> None:
        (summary,) = summarize([a_run(final_loss=math.nan)])
        data = summary.as_data()
        assert data["final_loss"] is None
        assert data["runs"][0]["final_loss"] is None
        json.dumps(data, allow_nan=False)


def test_demo_prints_the_table_and_writes_the_same_figures(tmp_path: Path) -> None:
    output = Console(file=io.StringIO(), width=100)
    news = Console(file=io.StringIO())
    file = tmp_path / "demo.json"
    options = demo.DemoOptions(("O0", "O4"), seeds=2, epochs=1, device=CPU)

    demo.run_demo(options, file, output, news)

    data = json.loads(file.read_text())
    assert data["torch_version"] == torch.__version__
    assert data["threads"] == 1
    assert data["cpu"]
    assert (data["epochs"], data["seeds"], data["device"]) == (1, 2, "cpu")
    assert [level["level"] for level in data["levels"]] == ["O0", "O4"]
    table = output.file.getvalue()  # type: ignore[attr-defined]
    for level in data["levels"]:
        assert [run["seed"] for run in level["runs"]] == [0, 1]
        assert level["accuracy"] == statistics.fmean(run["accuracy"] for run in level["runs"])
        for shown in (
            level["level"],
            f"{level['accuracy']:.2f}",
            f"{level['final_loss']:.4f}",
            f"{level['step_ratio']:.2f}",
            f"{level['weight_bytes']:,}",
        ):
            assert shown in table
    assert "one after another" in table
    assert torch.__version__ in table
