"""Settings of the loss scale, seen from a loop; and what is true of every setting."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from injections import overflowing
from torch import nn
from waits import counted_waits

import amp_patch as amp

LEVELS = ("O1", "O2")


def started(opt_level: str = "O1", **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-20)
    return amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)


def iterate(model: nn.Module, optimizer: Any, *, overflows: bool, loss_id: int = 0) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).float().sum() * 2.0**-12
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
        (overflowing(scaled) if overflows else scaled).backward()
    optimizer.step()


@pytest.mark.parametrize("opt_level", LEVELS)
def test_every_setting_is_honoured(opt_level: str) -> None:
    setting = amp.DynamicLossScale(
        initial=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3
    )
    pair = started(opt_level, loss_scale=setting)
    seen = [amp.loss_scale()]
    for overflows in (False, False, False, True, False, False, True, False, False, False):
        iterate(*pair, overflows=overflows)
        seen.append(amp.loss_scale())
    assert seen == [64, 64, 64, 256, 64, 64, 64, 16, 16, 16, 64]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_hysteresis_bears_overflows_before_it_backs_off_but_skips_each(opt_level: str) -> None:
    setting = amp.DynamicLossScale(initial=64.0, hysteresis=3)
    model, optimizer = started(opt_level, loss_scale=setting)
    seen = []
    for overflows in (True, True, False, True, True, True, True, False, True):
        iterate(model, optimizer, overflows=overflows)
        assert amp.step_was_skipped(optimizer) == overflows
        seen.append(amp.loss_scale())
    assert seen == [64, 64, 64, 64, 64, 32, 16, 16, 16]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_each_loss_can_have_a_setting_of_its_own(opt_level: str) -> None:
    settings_of = [128.0, "dynamic", amp.DynamicLossScale(initial=8.0, backoff_factor=0.125)]
    pair = started(opt_level, num_losses=3, loss_scale=settings_of)
    assert [amp.loss_scale(i) for i in range(3)] == [128.0, 65536.0, 8.0]
    for loss_id in (1, 2):
        iterate(*pair, overflows=True, loss_id=loss_id)
    assert [amp.loss_scale(i) for i in range(3)] == [128.0, 32768.0, 1.0]


@pytest.mark.parametrize("floor", [None, 0.25, 1.0, 2.0**-14, 4.0])
@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.filterwarnings("ignore::amp_patch.AmpWarning")  # the floor is meant to be reached
def test_the_floor_is_reached_exactly_and_never_passed(opt_level: str, floor: float | None) -> None:
    pair = started(opt_level, min_loss_scale=floor)
    lowest = 1.0 if floor is None else floor
    for i in range(40):
        iterate(*pair, overflows=True)
        assert amp.loss_scale() == max(2.0 ** (15 - i), lowest)
    iterate(*pair, overflows=False)
    assert not amp.step_was_skipped(pair[1])


@pytest.mark.parametrize("ceiling", [2.0**17, 100000.0, 2.0**16])
def test_the_ceiling_is_reached_exactly_and_never_passed(ceiling: float) -> None:
    setting = amp.DynamicLossScale(growth_interval=1)
    pair = started(loss_scale=setting, max_loss_scale=ceiling)
    for _ in range(4):
        iterate(*pair, overflows=False)
    assert amp.loss_scale() == ceiling


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"initial": 0.0}, "initial: expected a finite number above zero, found 0.0"),
        ({"initial": math.inf}, "initial: expected a finite number above zero, found inf"),
        ({"initial": math.nan}, "initial: expected a finite number above zero, found nan"),
        ({"growth_factor": 1.0}, "growth_factor: expected a number above 1, found 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor: expected a number between 0 and 1, found 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor: expected a number between 0 and 1, found 0.0"),
        ({"growth_interval": 0}, "growth_interval: expected an integer of at least 1, found 0"),
        ({"growth_interval": 1.5}, "growth_interval: expected an integer of at least 1"),
        ({"hysteresis": 0}, "hysteresis: expected an integer of at least 1, found 0"),
        ({"hysteresis": True}, "hysteresis: expected an integer of at least 1, found True"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_setting_without_sense_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(amp.AmpError) as caught:
        amp.DynamicLossScale(**wrong)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"initial": "x"}, {"growth_factor": None}, {"backoff_factor": [0.5]}], ids=str
)
def test_a_setting_of_another_type_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(amp.AmpError, match=next(iter(wrong))):
        amp.DynamicLossScale(**wrong)


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_another_length_than_the_losses_is_refused(count: int) -> None:
    with pytest.raises(amp.AmpError, match=f"one for each of num_losses=2, found {count}"):
        started(num_losses=2, loss_scale=["dynamic"] * count)


@pytest.mark.parametrize("opt_level", amp.OPT_LEVELS)
@pytest.mark.parametrize("scale", [None, 128.0, "dynamic"], ids=str)
def test_a_block_waits_for_the_device_at_most_once(
    opt_level: str, scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(150)])
    optimizers = [
        torch.optim.SGD(model[:70].parameters(), lr=0.1),
        torch.optim.SGD(model[70:].parameters(), lr=0.1),
    ]
    amp.initialize(model, optimizers, opt_level=opt_level, loss_scale=scale)
    expected = 0 if scale is None and opt_level not in LEVELS else 1
    for _ in range(2):
        loss = model(torch.randn(1, 2)).sum()
        with counted_waits(monkeypatch) as waits:
            with amp.scale_loss(loss * 2.0**-10, optimizers) as scaled:
                scaled.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert len(waits) == expected, waits


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_with_a_fused_optimizer_only_the_first_block_waits(
    opt_level: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    if kind is torch.optim.SGD:
        optimizer.param_groups[0]["momentum"] = 0.9
    amp.initialize(model, optimizer, opt_level=opt_level)
    for expected in (1, 0, 0, 0):  # torch makes the state in the first step
        loss = model(torch.randn(1, 2)).sum() * 2.0**-10
        with counted_waits(monkeypatch) as waits:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(waits) == expected, waits


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_delayed_window_waits_for_the_device_once(
    opt_level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = started(opt_level)
    with counted_waits(monkeypatch) as waits:
        for i in range(4):
            loss = model(torch.ones(1, 2)).sum() * 2.0**-10
            with amp.scale_loss(loss, optimizer, delay_unscale=i < 3) as scaled:
                scaled.backward()
        optimizer.step()
    assert len(waits) == 1, waits


# -- properties ------------------------------------------------------------------------------------

FACTORS = st.floats(1.001, 16.0)
SETTINGS = st.builds(
    amp.DynamicLossScale,
    initial=st.floats(2.0**-10, 2.0**20),
    growth_factor=FACTORS,
    backoff_factor=st.floats(0.01, 0.99),
    growth_interval=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
)
FATES = st.lists(st.booleans(), max_size=24)


@given(
    setting=SETTINGS,
    fates=FATES,
    bounds=st.tuples(st.floats(2.0**-8, 1.0), st.floats(1.0, 2.0**22)),
)
@settings(max_examples=40)
@pytest.mark.filterwarnings("ignore::amp_patch.AmpWarning")
def test_whatever_happens_the_scale_stays_in_its_bounds_and_moves_the_right_way(
    setting: amp.DynamicLossScale, fates: list[bool], bounds: tuple[float, float]
) -> None:
    amp.uninitialize()
    model, optimizer = started(
        loss_scale=setting, min_loss_scale=bounds[0], max_loss_scale=bounds[1]
    )
    before = amp.loss_scale()
    for overflows in fates:
        iterate(model, optimizer, overflows=overflows)
        after = amp.loss_scale()
        assert bounds[0] <= after <= bounds[1]
        assert (after <= before) if overflows else (after >= before)
        assert amp.step_was_skipped(optimizer) == overflows
        before = after
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    amp.uninitialize()


@given(setting=SETTINGS, fates=FATES, later=FATES)
@settings(max_examples=25)
@pytest.mark.filterwarnings("ignore::amp_patch.AmpWarning")
def test_a_state_taken_at_any_moment_goes_on_as_the_original_does(
    setting: amp.DynamicLossScale, fates: list[bool], later: list[bool]
) -> None:
    amp.uninitialize()
    pair = started(loss_scale=setting, min_loss_scale=2.0**-20, max_loss_scale=2.0**40)
    for overflows in fates:
        iterate(*pair, overflows=overflows)
    state = amp.state_dict()
    seen = []
    for overflows in later:
        iterate(*pair, overflows=overflows)
        seen.append(amp.loss_scale())
    amp.uninitialize()
    pair = started(loss_scale=setting, min_loss_scale=2.0**-20, max_loss_scale=2.0**40)
    amp.load_state_dict(state)
    assert amp.state_dict() == state
    again = []
    for overflows in later:
        iterate(*pair, overflows=overflows)
        again.append(amp.loss_scale())
    assert again == seen
    amp.uninitialize()


@given(scale=st.floats(2.0**-20, 2.0**20), factor=st.floats(-100.0, 100.0))
@settings(max_examples=40)
def test_the_unscaled_gradient_does_not_depend_on_the_scale(scale: float, factor: float) -> None:
    amp.uninitialize()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O0", loss_scale=scale, verbosity=0)
    with amp.scale_loss(F.linear(torch.ones(1, 1), model.weight).sum() * factor, optimizer) as one:
        one.backward()
    # A multiplication by the scale and one by its inverse, rounded three times in all.
    expected = torch.tensor(factor, dtype=torch.float32).item()
    assert model.weight.grad.item() == pytest.approx(expected, rel=4 * 2.0**-24, abs=2.0**-100)
    amp.uninitialize()


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=True),
    st.text(max_size=6),
    st.sampled_from(["dynamic", "True", "False", "128.0", "O1", "O2", "o1", "window", "half"]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8]),
    st.lists(st.integers(0, 2), max_size=2),
    st.just(object()),
)
ARGUMENTS = (
    "opt_level",
    "enabled",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
    "num_losses",
    "verbosity",
    "min_loss_scale",
    "max_loss_scale",
    "half_dtype",
    "keep_fp32",
    "keep_inputs",
    "overflow_drops",
    "skip_together",
    "sync_overflow",
)


@given(
    level=st.sampled_from(list(amp.OPT_LEVELS)),
    options=st.dictionaries(st.sampled_from(ARGUMENTS), SCALARS, min_size=1, max_size=3),
)
@settings(max_examples=400)
@pytest.mark.filterwarnings("ignore::amp_patch.AmpWarning")
def test_every_argument_of_initialize_works_or_is_refused_by_its_name(
    level: str, options: dict[str, Any]
) -> None:
    amp.uninitialize()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    refusal = None
    try:
        amp.initialize(model, optimizer, **{"opt_level": level, "verbosity": 0, **options})
    except amp.AmpError as error:
        refusal = str(error)
    else:
        loss = model(torch.randn(3, 2)).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    if refusal is not None:
        assert any(name in refusal for name in options), f"{options}: {refusal}"
    amp.uninitialize()
    for name, value in model.state_dict().items():
        if "running" not in name and "num" not in name:
            assert value.dtype is before[name].dtype
            torch.testing.assert_close(value, before[name], rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("name", ["models", "optimizers"])
@given(value=SCALARS)
@settings(max_examples=30)
def test_what_is_no_model_or_optimizer_is_refused_by_the_name_of_the_argument(
    name: str, value: Any
) -> None:
    model = nn.Linear(2, 2)
    if name == "optimizers" and (value is None or value == []):
        return
    arguments = (value,) if name == "models" else (model, value)
    if name == "models" and value == []:
        return
    with pytest.raises(amp.AmpError, match=name):
        amp.initialize(*arguments, opt_level="O1")
