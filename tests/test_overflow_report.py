"""What is said of overflows: one quiet line where all is well, one diagnosis where it is not."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import pytest
import torch
from injections import overflowing
from networks import assert_identical, backward, snapshot
from torch import nn

import amp_patch as amp

LEVELS = ("O1", "O2")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"first": nn.Linear(3, 4), "second": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder["first"](x)
        return self.head(self.encoder["second"](x))


def started(opt_level: str = "O1", **options: Any) -> tuple[Net, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-20)
    return amp.initialize(model, optimizer, opt_level=opt_level, **options)


def iterate(model: Net, optimizer: Any, fault: float = 1.0, loss_factor: float = 1.0) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).float().sum() * 2.0**-10 * loss_factor
    backward(overflowing(loss, fault), optimizer)
    optimizer.step()


def diagnoses(model: Net, optimizer: Any, times: int, **fault: float) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            iterate(model, optimizer, **fault)
    assert all(one.category is amp.AmpWarning for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_overflows_of_the_start_are_logged_quietly_and_warned_of_never(
    opt_level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "amp_patch")
    pair = started(opt_level)
    caplog.clear()
    iterate(*pair, fault=math.inf)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert (
        "overflowed at loss scale 65536: the step is skipped. Normal at the start" in record.message
    )


def test_lines_become_rarer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "amp_patch")
    pair = started(min_loss_scale=2.0**-200)
    caplog.clear()
    for _ in range(100):
        iterate(*pair, fault=math.inf)
    # 1, 2, 3, 4, 8, 16, 32, 64
    assert len(caplog.records) == 8


def test_verbosity_0_is_silent(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "amp_patch")
    pair = started(verbosity=0)
    for _ in range(3):
        iterate(*pair, fault=math.inf)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_nothing_is_printed_and_the_library_has_no_handler(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pair = started()
    for _ in range(3):
        iterate(*pair, fault=math.inf)
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger("amp_patch").handlers


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_loss_that_is_not_finite_is_told_apart_from_an_overflow(opt_level: str) -> None:
    found = diagnoses(*started(opt_level), times=1, loss_factor=math.nan)
    (text,) = found
    assert text.startswith("the loss itself is inf or NaN, before any scaling (1 step(s) in a row")
    assert "No loss scale helps" in text
    assert "division by zero" in text
    assert "bfloat16" in text


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_diagnosis_names_the_first_parameters_and_counts_inf_and_nan(opt_level: str) -> None:
    model, optimizer = started(opt_level, loss_scale=128.0)
    head = next(iter([model.head.weight]))
    hook = head.register_hook(lambda g: torch.tensor([[math.inf, math.nan, 1.0, -math.inf]]).to(g))
    (text,) = diagnoses(model, optimizer, 1)
    hook.remove()
    assert "gradients are inf or NaN at loss scale 128" in text
    assert "head.weight (2 inf, 1 nan of 4)" in text
    assert "encoder" not in text


def test_a_diagnosis_of_many_parameters_names_three() -> None:
    (text,) = diagnoses(*started(loss_scale=128.0), times=1, fault=math.inf)
    assert text.count(" nan of ") == 3
    assert "and 3 more" in text
    assert "encoder.first.weight" in text


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_diagnosis_at_the_floor_says_what_would_help_once_a_row(opt_level: str) -> None:
    model, optimizer = started(opt_level, min_loss_scale=2.0**12)
    found = diagnoses(model, optimizer, 50, fault=math.inf)
    assert len(found) == 1
    assert "gradients are inf or NaN at loss scale 4096 (5 step(s) in a row skipped)" in found[0]
    assert "min_loss_scale" in found[0]
    assert "'O4' or 'O5'" in found[0]
    assert not diagnoses(model, optimizer, 1)
    assert len(diagnoses(model, optimizer, 20, fault=math.inf)) == 1


@pytest.mark.parametrize("loss_factor", [math.inf, math.nan], ids=["inf", "nan"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_thousand_bad_losses_draw_one_diagnosis_and_end_at_the_floor(
    opt_level: str, loss_factor: float
) -> None:
    model, optimizer = started(opt_level)
    before = snapshot(model, optimizer)
    found = diagnoses(model, optimizer, 1000, loss_factor=loss_factor)
    assert len(found) == 1
    assert amp.loss_scale() == 1.0
    assert_identical(snapshot(model, optimizer), before)
    assert not diagnoses(model, optimizer, 1)
    assert not amp.step_was_skipped(optimizer)


def test_a_diagnosis_points_at_the_line_of_the_user() -> None:
    model, optimizer = started()
    loss = model(torch.ones(2, 3)).sum() * math.nan
    with (
        pytest.warns(amp.AmpWarning, match="loss itself") as caught,
        amp.scale_loss(loss, optimizer) as scaled,
    ):
        scaled.backward()
    assert caught[0].filename == __file__


def test_the_path_is_that_of_the_model_which_was_passed() -> None:
    models = [Net(), Net()]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=2.0**-20)
    amp.initialize(models, optimizer, opt_level="O1", loss_scale=128.0)
    models[1].head.bias.register_hook(lambda g: g * math.nan)
    loss = (models[0](torch.ones(2, 3)) + models[1](torch.ones(2, 3))).float().sum() * 2.0**-10
    with pytest.warns(amp.AmpWarning, match=r"gradients: head\.bias \(0 inf, 1 nan of 1\)"):
        backward(loss, optimizer)


def test_parameters_outside_of_any_model_are_counted_too() -> None:
    model, extra = Net(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=2.0**-20)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
    loss = model(torch.ones(2, 3)).float().sum() * 2.0**-10 + overflowing(extra).sum()
    with pytest.warns(amp.AmpWarning, match=r"a parameter \(3 inf, 0 nan of 3\)"):
        backward(loss, optimizer)


def test_sparse_gradients_are_counted_too() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
    with pytest.warns(amp.AmpWarning, match=r"0\.weight \(2 inf, 0 nan of 2\)"):
        backward(overflowing(model(torch.tensor([3])).float().sum()), optimizer)


@pytest.mark.parametrize("opt_level", amp.OPT_LEVELS)
def test_a_scale_of_1_that_is_asked_to_be_dynamic_diagnoses_at_once(opt_level: str) -> None:
    model, optimizer = started(
        opt_level, loss_scale=amp.DynamicLossScale(initial=1.0, growth_interval=10**6)
    )
    (text,) = diagnoses(model, optimizer, 5, fault=math.inf)
    assert "at loss scale 1 (1 step(s) in a row skipped)" in text


class TestLastOverflow:
    @pytest.mark.parametrize("opt_level", LEVELS)
    def test_it_is_kept_where_all_is_well_and_nothing_is_warned_of(self, opt_level: str) -> None:
        model, optimizer = started(opt_level)
        iterate(model, optimizer)
        assert amp.last_overflow() is None
        iterate(model, optimizer, fault=math.inf)
        found = amp.last_overflow()
        assert found is not None
        assert [one.parameter for one in found.gradients] == [
            p for p, _ in model.named_parameters()
        ]
        assert (found.loss_scale, found.skipped_in_a_row) == (65536.0, 1)
        assert (found.is_loss_finite, found.is_scale_dynamic) == (True, True)
        iterate(model, optimizer)
        assert amp.last_overflow() is found  # also after steps that were clean

    @pytest.mark.parametrize("opt_level", LEVELS)
    def test_check_that_was_put_off_is_described_at_the_step(self, opt_level: str) -> None:
        model, optimizer = started(opt_level)
        model.head.bias.register_hook(lambda g: g * math.nan)
        loss = model(torch.ones(2, 3)).float().sum() * 2.0**-10
        with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
        assert amp.last_overflow() is None
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        found = amp.last_overflow()
        assert found is not None
        assert [str(one) for one in found.gradients] == ["head.bias (0 inf, 1 nan of 1)"]
        assert (found.loss_scale, found.is_loss_finite) == (65536.0, True)

    def test_largest_value_is_that_of_the_finite_ones_unscaled(self) -> None:
        model = nn.Linear(4, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0)
        gradient = torch.tensor([[math.inf, -3.0, 2.0, math.nan], [0.0, -math.inf, 1.0, -0.5]])
        model.weight.register_hook(lambda _: gradient * 8)
        with pytest.warns(amp.AmpWarning, match="at loss scale 8"):
            backward(model(torch.ones(1, 4)).float().sum(), optimizer)
        (one,) = amp.last_overflow().gradients  # type: ignore[union-attr]
        assert (one.infs, one.nans, one.elements, one.largest) == (2, 1, 8, 3.0)

    def test_loss_from_scaled_gradients_may_be_helped(self) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        x = torch.ones(2, 4, requires_grad=True)
        (gradient,) = amp.grad(model(x).float().sum(), x, create_graph=True)
        backward(gradient.sum() * math.inf, optimizer)
        found = amp.last_overflow()
        assert found is not None
        assert (found.is_loss_finite, found.may_smaller_scale_help) == (False, True)

    def test_nothing_is_asked_of_the_gradients_where_all_is_well(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError

        model, optimizer = started()
        monkeypatch.setattr("amp_patch.scaling.scaled_loss.report_overflow", refuse)
        iterate(model, optimizer)
        with pytest.raises(AssertionError):
            iterate(model, optimizer, fault=math.inf)

    def test_before_initialize_and_where_amp_is_off(self) -> None:
        with pytest.raises(amp.AmpError, match=r"^last_overflow: expected an earlier call"):
            amp.last_overflow()
        started(enabled=False)
        assert amp.last_overflow() is None


@pytest.mark.parametrize(
    ("values", "is_overflow"),
    [
        ([3e38] * 10, False),
        ([math.inf, -math.inf], True),
        ([math.nan], True),
        ([0.0] * 10**6 + [math.inf], True),
        ([3e38, -3e38], False),
        ([1e-45, -0.0], False),
    ],
    ids=["huge", "opposite infinities", "nan", "one in a million", "opposite", "tiny"],
)
def test_the_test_looks_at_every_element_and_not_at_their_sum(
    values: list[float], is_overflow: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(len(values)))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    model = nn.Linear(1, 1)
    setting = amp.DynamicLossScale(initial=1.0, growth_interval=10**6)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=setting, min_loss_scale=0.5)
    loss = (parameter * torch.tensor(values)).nan_to_num(0.0, 0.0, 0.0).sum()
    parameter.register_hook(lambda _: torch.tensor(values))
    backward(loss, optimizer)
    assert amp.step_will_be_skipped(optimizer) == is_overflow


def test_a_normal_overflow_is_not_said_to_be_at_the_floor() -> None:
    pair = started(min_loss_scale=2.0**15)
    found = []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the second one is diagnosed
            iterate(*pair, fault=math.inf)
        found.append(amp.last_overflow())
    first, second = found
    assert not first.is_scale_at_floor
    assert "backs off by itself" in str(first)
    assert "no lower" not in str(first)
    assert second.is_scale_at_floor
    assert "The loss scale can go no lower" in str(second)
