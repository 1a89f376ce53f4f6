"""Each fault that is planted in a model is found, and a healthy model has none."""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp
from amp_patch.tools import device_probe, doctor_checks, doctor_command
from amp_patch.tools.device_probe import DtypeSpeed, measure_dtypes
from amp_patch.tools.diagnosis import Diagnosis, Finding, Severity
from amp_patch.tools.doctor import doctor


@pytest.fixture(autouse=True)
def _fast_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which both half dtypes are fast, whatever this one is."""
    monkeypatch.setattr(
        doctor_checks,
        "measure_dtypes",
        lambda _: {d: DtypeSpeed(d, 0.5) for d in (torch.float16, torch.bfloat16)},
    )


class Masking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.masked_fill(x > 0, -1e9)
        return x + (1.0 - x) * -1e30


class Harmless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 0, -1e4).masked_fill(x < -1, -float("inf"))[:70000]


class Probabilities(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(torch.sigmoid(x), torch.ones_like(x))


def build() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(127, 65))
    return model, torch.optim.Adam(model.parameters())


def kinds(diagnosis: Diagnosis) -> set[str]:
    return {one.kind for one in diagnosis.findings}


def test_healthy_model_has_no_findings() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for level in amp.OPT_LEVELS:
        found = doctor(model, optimizer, level, scheduler=scheduler)
        assert found.findings == (), level
        assert str(found) == f"{level}: nothing found that stands against it."


class TestEps:
    def test_of_the_optimizer_at_o3(self) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
        (finding,) = doctor(model, optimizer, "O3").of_kind("eps")
        assert (finding.where, finding.severity) == ("Adam", Severity.WRONG)
        assert doctor(model, optimizer, "O2").of_kind("eps") == ()  # it steps in FP32
        assert doctor(model, optimizer, "O5", master_weights=False).of_kind("eps") == ()

    def test_of_a_module(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12))
        (finding,) = doctor(model, None, "O2").of_kind("eps")
        assert finding.where == "1"
        assert doctor(model, None, "O1").of_kind("eps") == ()


class TestConstants:
    def test_beyond_float16_are_found_where_they_are(self) -> None:
        found = doctor(nn.Sequential(Masking()), None, "O2").of_kind("mask constant")
        assert [one.text.partition(" is")[0] for one in found] == [
            "the constant -1e+09",
            "the constant -1e+30",
        ]
        lines = Path(__file__).read_text().splitlines()
        for finding in found:
            line = int(finding.where.rpartition("line ")[2].rstrip(")"))
            assert "-1e" in lines[line - 1]

    def test_bfloat16_holds_them(self) -> None:
        assert doctor(nn.Sequential(Masking()), None, "O5").of_kind("mask constant") == ()

    def test_other_large_numbers_are_let_be(self) -> None:
        assert doctor(nn.Sequential(Harmless()), None, "O2").of_kind("mask constant") == ()


class TestProbabilityLosses:
    @pytest.mark.parametrize(
        "model",
        [Probabilities(), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), nn.BCELoss()],
        ids=["call", "last sigmoid", "module"],
    )
    def test_are_found(self, model: nn.Module) -> None:
        assert len(doctor(model, None, "O1").of_kind("bce after sigmoid")) == 1


class TestSizes:
    def test_linear_of_127_by_65_is_found(self) -> None:
        (finding,) = doctor(nn.Sequential(nn.Linear(127, 65)), None, "O1").of_kind("size off 8")
        assert finding.where == "0"
        assert "in_features=127, out_features=65" in finding.text
        assert "128, 72" in finding.fix

    def test_convolutions_and_recurrent_layers_too(self) -> None:
        model = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.LSTM(8, 12), nn.Conv2d(6, 6, 3, groups=6)])
        found = doctor(model, None, "O1").of_kind("size off 8")
        assert [one.where for one in found] == ["0", "1"]  # not the depthwise one


class TestSpeed:
    def test_slow_dtype_is_found_with_the_level_that_is_fast(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        speeds = {torch.float16: 7.0, torch.bfloat16: 0.5}
        monkeypatch.setattr(
            doctor_checks,
            "measure_dtypes",
            lambda _: {d: DtypeSpeed(d, ratio) for d, ratio in speeds.items()},
        )
        (finding,) = doctor(nn.Linear(8, 8), None, "O1").of_kind("slow dtype")
        assert "7.0 times as long in float16" in finding.text
        assert "use O4 or O5" in finding.fix
        assert doctor(nn.Linear(8, 8), None, "O4").of_kind("slow dtype") == ()
        assert doctor(nn.Linear(8, 8), None, "O0").of_kind("slow dtype") == ()

    def test_probe_measures_this_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_probe, "BUDGET", 0.01)
        found = measure_dtypes(torch.device("cpu"))
        assert found.keys() == {torch.float16, torch.bfloat16}
        assert all(one.ratio > 0 for one in found.values())


class TestArguments:
    """`doctor` takes what `initialize` takes."""

    def test_those_of_initialize_are_all_taken(self) -> None:
        model, optimizer = build()
        given = inspect.signature(amp.initialize).parameters
        defaults = {
            name: given[name].default for name in [*given][3:]
        }  # models, optimizers, enabled
        defaults["opt_level"] = "O2"
        assert doctor(model, optimizer, enabled=True, **defaults) == doctor(model, optimizer, "O2")

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"keep_fp32": ["nothing"]}, "^keep_fp32: 'nothing' selects nothing"),
            ({"keep_fp32": 3}, "^keep_fp32: expected modules"),
            ({"keep_inputs": ["y"]}, "^keep_inputs: expected names of arguments of forward"),
            ({"cast_rules": "none of these"}, "cast_rules|preset"),
            ({"num_losses": 0}, "^num_losses: expected"),
            ({"verbosity": -1}, "^verbosity: expected"),
            ({"enabled": "perhaps"}, "^enabled: expected"),
            ({"loss_scale": "large"}, "^loss_scale: expected"),
            (
                {"nonsense": 1},
                "^doctor: expected arguments that initialize takes, found 'nonsense'",
            ),
            ({"optimizer": 3}, "^optimizers: expected an optimizer"),
            (
                {"optimizer": [*build()[1:], *build()[1:]]},
                "^doctor: expected one optimizer, found 2",
            ),
        ],
    )
    def test_what_is_refused(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(amp.AmpError, match=message):
            doctor(nn.Sequential(nn.Linear(8, 8)), **{"opt_level": "O2", **given})

    def test_nothing_is_wrong_with_what_is_not_enabled(self) -> None:
        assert doctor(*build(), "O3", enabled=False).findings == ()

    def test_what_is_kept_in_fp32_loses_nothing(self) -> None:
        model = nn.Sequential(
            nn.Linear(127, 65), nn.LayerNorm(65, eps=1e-12), Masking(), nn.BCELoss()
        )
        model.register_buffer("table", torch.tensor([1e6]))
        optimizer = torch.optim.Adam(model.parameters())
        (path, *_), expected = (
            ["table"],
            {"eps", "mask constant", "bce after sigmoid", "size off 8"},
        )
        assert kinds(doctor(model, optimizer, "O3")) == {*expected, "buffer"}
        assert kinds(doctor(model, optimizer, "O3", keep_fp32=[path])) == expected
        found = doctor(model, optimizer, "O3", keep_fp32=["1", Masking])
        assert {one.where for one in found.of_kind("eps")} == {"Adam"}
        assert found.of_kind("mask constant") == ()
        assert doctor(model, optimizer, "O3", keep_fp32="*").findings == ()

    def test_mask_of_one_of_two_of_a_kind_is_still_found(self) -> None:
        model = nn.Sequential(Masking(), Masking())
        found = doctor(model, None, "O2", keep_fp32=["0"]).of_kind("mask constant")
        assert {one.where.partition(" ")[0] for one in found} == {"1"}


class TestStoredFunctions:
    @pytest.mark.parametrize(
        "store",
        [
            lambda m: {"act": m},
            lambda m: [m],
            lambda m: ([{"act": (m,)}],),
            lambda m: {m},
            lambda m: functools.partial(m, dim=-1),
            lambda m: lambda x, act=m: act(x, -1),
            lambda m: lambda x: m(x, -1),
            lambda m: argparse.Namespace(act=m),
        ],
        ids=["dict", "list", "nested", "set", "partial", "default", "closure", "object"],
    )
    @pytest.mark.parametrize("function", [torch.softmax, F.kl_div], ids=["builtin", "python"])
    def test_function_that_is_held_by_what_an_attribute_holds_is_found(
        self, store: Any, function: Any
    ) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        model.act = store(function)
        (finding,) = doctor(model, None, "O1").of_kind("stored function")
        assert finding.where == "Sequential.act"
        assert finding.text.startswith(f"holds {function.__name__}, ")
        assert doctor(model, None, "O2").of_kind("stored function") == ()

    def test_findings_are_what_is_not_cast(self) -> None:
        class Stored(nn.Module):
            shared = staticmethod(torch.matmul)

            def __init__(self) -> None:
                super().__init__()
                self.own = torch.matmul
                self.table = {"mm": torch.matmul}
                self.dtypes: dict[str, torch.dtype] = {}

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                stored = {"own": self.own, "table": self.table["mm"], "shared": self.shared}
                self.dtypes.update({name: one(x, x).dtype for name, one in stored.items()})
                return x

        model = nn.Sequential(Stored())
        found = doctor(model, None, "O1").of_kind("stored function")
        amp.initialize(model, opt_level="O1", verbosity=0)
        model(torch.ones(8, 8))
        dtypes: Any = model[0].dtypes
        plain = {name for name, dtype in dtypes.items() if dtype is torch.float32}
        assert {one.where for one in found} == {f"0.{name}" for name in plain}
        assert plain == {"table", "shared"}

    def test_cyclic_references_and_the_model_itself_are_no_trap(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        model.act, model.own = torch.softmax, [model]
        model.own.append(model.own)  # type: ignore[operator, union-attr]
        assert doctor(model, None, "O1").of_kind("stored function") == ()

    def test_after_initialize_it_is_the_wrapper_that_is_stored(self) -> None:
        model = amp.initialize(nn.Sequential(nn.Linear(8, 8)), opt_level="O1", verbosity=0)
        model.act = torch.softmax
        assert doctor(model, None, "O1").of_kind("stored function") == ()
        del model.act


class TestBuffers:
    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ([1e6], "values up to 1e+06 become inf"),
            ([1e-9], "values down to 1e-09 become 0"),
            ([2049.0], "whole numbers up to 2049 are rounded"),
        ],
    )
    def test_that_lose_values_are_found(self, values: list[float], text: str) -> None:
        model = nn.Module()
        model.inner = nn.Module()
        model.inner.register_buffer("table", torch.tensor(values))
        (finding,) = doctor(model, None, "O2").of_kind("buffer")
        assert finding.where == "inner.table"
        assert text in finding.text
        assert "keep_fp32=['inner.table']" in finding.fix
        assert doctor(model, None, "O1").of_kind("buffer") == ()

    def test_that_keep_their_values_are_not(self) -> None:
        model = nn.Module()
        model.register_buffer("table", torch.tensor([0.0, 0.1, 2048.0, float("-inf")]))
        model.register_buffer("count", torch.tensor([10**9]))
        assert doctor(model, None, "O2").of_kind("buffer") == ()


class TestOrder:
    def test_optimizer_of_another_model_is_found(self) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
        (finding,) = doctor(model, optimizer).of_kind("order")
        assert finding.severity is Severity.WRONG
        assert "2 of 2 tensors that the model does not have" in finding.text

    def test_weights_without_an_optimizer_are_found(self) -> None:
        model = nn.Linear(8, 8)
        (finding,) = doctor(model, torch.optim.SGD([model.weight], lr=0.1)).of_kind("order")
        assert "does not hold 1 weights" in finding.text

    def test_scheduler_of_another_optimizer_is_found(self) -> None:
        model = nn.Linear(8, 8)
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        scheduler = torch.optim.lr_scheduler.StepLR(first, 1)
        (finding,) = doctor(model, second, scheduler=scheduler).of_kind("order")
        assert finding.where == "StepLR"

    def test_half_model_is_found(self) -> None:
        (finding,) = doctor(nn.Linear(8, 8).half(), None, "O2").of_kind("order")
        assert "leave out .half()" in finding.fix

    @pytest.mark.filterwarnings("ignore:Lazy modules")  # of older torch
    def test_lazy_model_is_found(self) -> None:
        assert "lazy" in doctor(nn.LazyLinear(8), None, "O0").of_kind("order")[0].text


class TestDiagnosis:
    FINDINGS = (
        Finding("a", Severity.SLOW, "x", "is slow", "hurry"),
        Finding("b", Severity.WRONG, "y", "is wrong", "mend it"),
    )

    def test_gravest_comes_first(self) -> None:
        found = Diagnosis.of("O1", self.FINDINGS)
        assert [one.kind for one in found.findings] == ["b", "a"]
        assert not found.is_healthy
        assert Diagnosis.of("O1", self.FINDINGS[:1]).is_healthy

    def test_text_and_dict_tell_the_fix(self) -> None:
        found = Diagnosis.of("O1", self.FINDINGS)
        assert "[wrong] y: is wrong\n    Fix: mend it" in str(found)
        data = json.loads(json.dumps(found.to_dict()))
        assert data["findings"][0] == {
            "kind": "b", "severity": "wrong", "where": "y", "text": "is wrong", "fix": "mend it",
        }  # fmt: skip


def test_arguments_that_initialize_refuses_are_refused() -> None:
    with pytest.raises(amp.AmpError, match=r"expected a torch\.nn\.Module"):
        doctor(42)  # type: ignore[arg-type]
    with pytest.raises(amp.AmpError, match="opt_level"):
        doctor(nn.Linear(8, 8), None, "O9")


class TestCommandLine:
    def run(self, *arguments: str) -> int:
        parser = argparse.ArgumentParser()
        doctor_command.add_command(parser.add_subparsers())
        options = parser.parse_args(["doctor", *arguments])
        code: int = options.run(options)
        return code

    def test_wrong_is_exit_code_1(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "found.json"
        assert self.run("test_doctor:build", "--level", "O3", "--json", str(file)) == 1
        assert "[wrong] Adam: eps=1e-08 is 0 in float16" in capsys.readouterr().out
        assert {one["kind"] for one in json.loads(file.read_text())["findings"]} == {
            "eps",
            "size off 8",
        }

    def test_lost_time_is_exit_code_0(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("test_doctor:build", "--level", "O2") == 0
        assert "Fix: pad to 128, 72" in capsys.readouterr().out
