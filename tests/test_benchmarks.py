"""The benchmarks run to their ends, count and compare rightly, and let nobody train wrongly."""

from __future__ import annotations

import ast
import graphlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_patch.tools.live_memory import LiveMemory
from benchmarks import gpu
from benchmarks.__main__ import GROUPS, RESULTS, main
from benchmarks.contenders import Plain
from benchmarks.erfnet import make_erfnet
from benchmarks.gradients import check_level
from benchmarks.inference import check as check_inference
from benchmarks.large_models import TINY_PROBLEMS
from benchmarks.models import Gpt, texts
from benchmarks.races import Entry, check_training, make_race
from benchmarks.rows import Report, Row, at_least, at_most
from benchmarks.turns import Settings, median_difference, median_ratio, take_turns

# The losses of tiny models and the reductions of many threads are no subject here.
pytestmark = pytest.mark.filterwarnings("ignore::amp_patch.AmpWarning")


@pytest.mark.parametrize("name", GROUPS)
def test_group_runs_and_gives_each_row_a_verdict(name: str) -> None:
    report = GROUPS[name].measure(Settings(is_quick=True))
    verdicts = [row.verdict for row in report.rows]
    assert verdicts
    assert [verdict for verdict in verdicts if "wrong" in verdict] == []
    known = ("met", "missed by", "no AMX here", "autocast raises")
    without_target = [row for row in report.rows if row.target is None]
    assert [v for v in verdicts if not v.startswith(known)] == ["-"] * len(without_target)


def test_command_writes_tables_and_data(tmp_path: Path) -> None:
    data, tables = tmp_path / "data.json", tmp_path / "tables.md"
    assert main(["gradients", "--quick", "--json", str(data), "--write", str(tables)]) == 0
    written = json.loads(data.read_text("utf-8"))
    assert written["is_quick"] is True
    assert written["torch_version"] == torch.__version__
    assert list(written["groups"]) == ["gradients"]
    text = tables.read_text("utf-8")
    assert "figures say nothing" in text
    for row in written["groups"]["gradients"]["rows"]:
        assert row["what"] in text
        assert row["verdict"] == "quick run"


def test_command_refuses_a_group_that_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["steps", "speed"])
    assert "found speed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--write", "--quick"], "expected a FILE after --write"),
        (["startup", "--write"], "expected a FILE after --write"),
        (["--json", "missing/figures.json"], "expected a file in a folder that exists"),
        (["--write", "missing/tables.md"], "expected a file in a folder that exists"),
        (["--json", "."], "expected a file in a folder that exists"),
    ],
    ids=" ".join,
)
def test_command_refuses_before_it_measures(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.__main__.run_group", lambda *_: pytest.fail("it measures"))
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err


def test_committed_results_have_all_groups() -> None:
    text = RESULTS.read_text("utf-8")
    assert [group.TITLE for group in GROUPS.values() if f"## {group.TITLE}\n" not in text] == []


def test_run_for_an_accelerator_comes_to_its_end_on_any_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--json", str(path)]) == 0
    reports = json.loads(path.read_text("utf-8"))["reports"]
    assert len(reports) == 2 * len(TINY_PROBLEMS) + len(gpu.OTHER_GROUPS)
    printed = capsys.readouterr().out
    assert [title for title in reports if f"## {title}\n" not in printed] == []
    assert "| O5 " in printed


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("", 1.02, at_most(1.02)), "met"),
        (Row("", 1.03, at_most(1.02)), "missed by 0.010"),
        (Row("", 3.0, at_least(3.0)), "met"),
        (Row("", 2.5, at_least(3.0)), "missed by 0.500"),
        (Row("", 2.5, at_least(3.0), excuse="no AMX here"), "no AMX here"),
        (Row("", None, at_least(3.0)), "not measured"),
        (Row("", 2.5), "-"),
    ],
)
def test_verdict_follows_from_value_and_target(row: Row, verdict: str) -> None:
    assert row.verdict == verdict


def test_report_is_a_table_in_markdown() -> None:
    lines = str(Report([Row("a call", 1.5, at_most(2), "ms")], ["A note."])).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")] == [
        "",
        "a call",
        "1.500 ms",
        "at most 2 ms",
        "met",
        "",
    ]
    assert lines[-1] == "A note."


def test_each_round_starts_with_another_contender() -> None:
    order: list[str] = []
    contenders = {name: (lambda name=name: order.append(name) or name) for name in "abc"}
    turns = take_turns(contenders, 4)
    assert "".join(order) == "abcbcacababc"
    assert turns == {"a": ["a"] * 4, "b": ["b"] * 4, "c": ["c"] * 4}


def test_slow_rounds_are_fewer_but_never_less_than_three() -> None:
    assert len(take_turns({"a": lambda: 1}, 10, limit_s=0.0)["a"]) == 3
    assert len(take_turns({"a": lambda: 1}, 2, limit_s=0.0)["a"]) == 2


def test_ratio_and_difference_are_medians_over_rounds() -> None:
    mine, base = [2.0, 30.0, 8.0], [1.0, 10.0, 2.0]
    assert median_ratio(mine, base) == 3.0
    assert median_difference(mine, base) == 6.0


def test_live_bytes_are_those_of_tensors_that_are_alive() -> None:
    with LiveMemory() as live:
        kept = torch.zeros(1000)  # 4,000 bytes
        view = kept.view(10, 100)[2:]
        half = kept.half()  # 2,000
        assert live.now == 6000
        del kept
        assert live.now == 6000  # the view holds its memory
        del view
        assert live.now == 2000
        (half + 1).sum()
        assert live.now == 2000
        assert live.peak == 6000
        del half
    assert live.now == 0


def test_live_bytes_include_what_autograd_has_saved() -> None:
    with LiveMemory() as live:
        x = torch.zeros(1000, requires_grad=True)
        y = x.exp().exp()  # backward needs both results
        assert live.now == 12_000
        y.sum().backward()
        assert x.grad is not None
        del y
        assert live.now == 8000  # x and its gradient


class Idler(Plain):
    """Computes the loss, and leaves the weights as they are."""

    def step(self) -> torch.Tensor:
        return self.compute_loss()


class Raiser(Plain):
    """Stands for what torch cannot run."""

    def step(self) -> torch.Tensor:
        raise RuntimeError("no such kernel. It is missing")


@pytest.mark.parametrize(
    ("kind", "verdict", "reason"),
    [(Idler, "wrong", "expected updates"), (Raiser, "raises", "RuntimeError: no such kernel")],
)
def test_contender_that_does_not_train_is_ruled_out(
    kind: type[Plain], verdict: str, reason: str
) -> None:
    problem = TINY_PROBLEMS["mlp"]
    race = make_race(problem, problem.full, torch.bfloat16)
    race.entries["O5"] = Entry(kind("O5", torch.bfloat16, problem, problem.full, "cpu"))
    check_training(race)
    assert {name: entry.verdict for name, entry in race.entries.items()} == {
        "FP32": "",
        "autocast": "",
        "O0": "",
        "O4": "",
        "O5": verdict,
    }
    assert reason in race.entries["O5"].reason


def test_wrong_gradients_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gradients.amp.loss_scale", lambda: 3.0)
    with pytest.raises(RuntimeError, match="O1: expected each gradient to be"):
        check_level("O1", 1, 8, torch.device("cpu"))


def test_wrong_logits_are_not_timed() -> None:
    model = Gpt(layers=1, width=16, heads=2, context=8).eval()
    tokens = texts(1, 8).inputs
    with torch.no_grad():
        expected = model(tokens)
        check_inference("O5", model, tokens, expected)
        with pytest.raises(RuntimeError, match="expected logits within 5% of FP32's"):
            check_inference("O5", model, tokens, 1.2 * expected)


def test_erfnet_gives_each_pixel_its_classes_and_has_the_size_of_the_paper() -> None:
    model = make_erfnet(classes=20)
    logits = model(torch.randn(1, 3, 32, 64))
    assert logits.shape == (1, 20, 32, 64)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == pytest.approx(2.06e6, rel=0.02)  # the authors count 2.06 millions
    dilations = [m.dilation for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert max(max(dilation) for dilation in dilations) == 16


FOLDER = Path(gpu.__file__).parent
SOURCES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.py"))}


@pytest.mark.parametrize("module", SOURCES)
def test_module_is_short_and_says_its_job(module: str) -> None:
    assert SOURCES[module].count("\n") <= 300
    assert ast.get_docstring(ast.parse(SOURCES[module]))


def test_modules_import_each_other_without_a_cycle() -> None:
    graph = {
        module: set(re.findall(r"^from benchmarks\.(\w+) import", source, re.MULTILINE))
        for module, source in SOURCES.items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("turns") < order.index("races") < order.index("steps")


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - {"ranks"}))
def test_module_names_no_accelerator(module: str) -> None:
    assert re.findall(r"\b(?:cuda|xpu|mps|hip)\b", SOURCES[module]) == []
