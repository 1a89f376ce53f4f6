"""When the loss scale grows and backs off: bounds, monotony, state."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from amp_patch.errors import AmpError
from amp_patch.scaling.loss_scaler import DynamicLossScale, LossScaler

OVERFLOWS = st.lists(st.booleans(), max_size=60)
EXPONENTS = st.integers(-24, 40)


def quick(
    scale: float = 2.0**16, interval: int = 3, low: float = 1.0, high: float = 2.0**24
) -> LossScaler:
    """A dynamic scaler that grows early enough for a test."""
    config = DynamicLossScale(initial=scale, growth_interval=interval)
    return LossScaler.dynamic(min_scale=low, max_scale=high, config=config)


def default() -> LossScaler:
    return LossScaler.dynamic(min_scale=1.0, max_scale=2.0**24)


def test_dynamic_scale_starts_at_two_to_the_sixteenth() -> None:
    assert default().scale == 65536.0


@pytest.mark.parametrize(
    ("low", "high", "start"),
    [(1.0, 2.0**10, 2.0**10), (2.0**20, 2.0**24, 2.0**20), (2.0**-8, 2.0**24, 2.0**16)],
    ids=["ceiling-below", "floor-above", "inside"],
)
def test_dynamic_scale_starts_inside_its_bounds(low: float, high: float, start: float) -> None:
    assert LossScaler.dynamic(min_scale=low, max_scale=high).scale == start


def test_scale_doubles_after_two_thousand_clean_updates_and_not_before() -> None:
    scaler = default()
    for _ in range(1999):
        assert scaler.update(overflow=False) is False
    assert scaler.scale == 2.0**16
    scaler.update(overflow=False)
    assert scaler.scale == 2.0**17
    assert scaler.state_dict()["unskipped"] == 0


def test_overflow_halves_at_once_and_asks_to_skip() -> None:
    scaler = default()
    assert scaler.update(overflow=True) is True
    assert scaler.scale == 2.0**15


def test_overflow_starts_the_count_of_clean_updates_anew() -> None:
    scaler = quick()
    scaler.update(overflow=False)
    scaler.update(overflow=False)
    scaler.update(overflow=True)
    scaler.update(overflow=False)
    scaler.update(overflow=False)
    assert scaler.scale == 2.0**15
    scaler.update(overflow=False)
    assert scaler.scale == 2.0**16


def test_scale_stops_at_its_ceiling() -> None:
    scaler = quick(scale=2.0**23, interval=1)
    for _ in range(3):
        scaler.update(overflow=False)
    assert scaler.scale == 2.0**24


def test_scale_stops_at_its_floor_and_says_so() -> None:
    scaler = quick(scale=2.0)
    assert not scaler.is_at_floor
    for _ in range(3):
        assert scaler.update(overflow=True) is True
    assert scaler.scale == 1.0
    assert scaler.is_at_floor


@pytest.mark.parametrize("scale", [1.0, 128.0, 0.5, 3.7])
def test_static_scale_stays_and_still_asks_to_skip(scale: float) -> None:
    scaler = LossScaler.static(scale)
    assert scaler.update(overflow=True) is True
    for _ in range(2001):
        assert scaler.update(overflow=False) is False
    assert scaler.scale == scale
    assert not scaler.is_dynamic
    assert not scaler.is_at_floor


def test_only_a_static_scale_of_one_is_the_identity() -> None:
    at_one = quick(scale=1.0)
    assert LossScaler.static(1.0).is_identity
    assert not LossScaler.static(2.0).is_identity
    assert not at_one.is_identity


def test_state_has_the_keys_of_checkpoints_in_the_field() -> None:
    scaler = default()
    scaler.update(overflow=True)
    scaler.update(overflow=False)
    assert scaler.state_dict() == {"loss_scale": 32768.0, "unskipped": 1}


def test_state_is_a_copy() -> None:
    scaler = default()
    state = scaler.state_dict()
    scaler.update(overflow=True)
    assert state == {"loss_scale": 65536.0, "unskipped": 0}


def test_loaded_scale_is_brought_inside_the_bounds() -> None:
    scaler = default()
    scaler.load_state_dict({"loss_scale": 2.0**30, "unskipped": 0})
    assert scaler.scale == 2.0**24
    scaler.load_state_dict({"loss_scale": 2.0**-30, "unskipped": 0})
    assert scaler.scale == 1.0


def test_static_scale_is_not_changed_by_a_checkpoint() -> None:
    scaler = LossScaler.static(128.0)
    scaler.load_state_dict({"loss_scale": 65536.0, "unskipped": 7})
    assert scaler.scale == 128.0


def test_count_beyond_the_interval_grows_at_the_next_clean_update() -> None:
    scaler = default()
    scaler.load_state_dict({"loss_scale": 1024.0, "unskipped": 10_000})
    scaler.update(overflow=False)
    assert scaler.scale == 2048.0


@given(EXPONENTS, EXPONENTS, st.integers(1, 5), OVERFLOWS)
def test_scale_never_leaves_its_bounds(
    one: int, other: int, interval: int, overflows: list[bool]
) -> None:
    low, high = sorted((2.0**one, 2.0**other))
    scaler = quick(low, interval, low, high)
    for overflow in overflows:
        scaler.update(overflow)
        assert low <= scaler.scale <= high


@given(st.integers(1, 5), OVERFLOWS)
def test_update_moves_the_scale_only_in_the_direction_of_its_verdict(
    interval: int, overflows: list[bool]
) -> None:
    scaler = quick(interval=interval)
    for overflow in overflows:
        before = scaler.scale
        assert scaler.update(overflow) is overflow
        assert scaler.scale in ((before, before / 2) if overflow else (before, before * 2))


@given(OVERFLOWS, st.integers(0, 60))
def test_one_more_overflow_never_leaves_a_larger_scale_behind_it(
    overflows: list[bool], position: int
) -> None:
    plain, other = quick(), quick()
    at = min(position, len(overflows))
    for overflow in overflows[:at]:
        plain.update(overflow)
        other.update(overflow)
    other.update(overflow=True)
    for overflow in overflows[at:]:
        plain.update(overflow)
        other.update(overflow)
        assert other.scale <= plain.scale


@given(OVERFLOWS, OVERFLOWS)
def test_run_that_was_saved_and_loaded_goes_on_as_if_it_had_not_been(
    before: list[bool], after: list[bool]
) -> None:
    one, other = quick(), quick(scale=4.0)
    for overflow in before:
        one.update(overflow)
    other.load_state_dict(one.state_dict())
    for overflow in after:
        one.update(overflow)
        other.update(overflow)
        assert one.state_dict() == other.state_dict()


@given(OVERFLOWS)
def test_scale_follows_a_count_kept_by_hand(overflows: list[bool]) -> None:
    scaler, exponent, clean = quick(interval=4), 16, 0
    for overflow in overflows:
        scaler.update(overflow)
        clean = 0 if overflow else clean + 1
        exponent = max(exponent - 1, 0) if overflow else exponent
        if clean == 4:
            exponent, clean = min(exponent + 1, 24), 0
        assert scaler.state_dict() == {"loss_scale": 2.0**exponent, "unskipped": clean}


def test_configuration_is_followed() -> None:
    config = DynamicLossScale(
        initial=1000.0, growth_factor=3.0, backoff_factor=0.1, growth_interval=2
    )
    scaler = LossScaler.dynamic(min_scale=1.0, max_scale=2.0**24, config=config)
    assert scaler.scale == 1000.0
    scaler.update(overflow=True)
    assert scaler.scale == 100.0
    scaler.update(overflow=False)
    scaler.update(overflow=False)
    assert scaler.scale == 300.0


def test_hysteresis_waits_for_that_many_overflows_in_a_row() -> None:
    config = DynamicLossScale(hysteresis=2)
    scaler = LossScaler.dynamic(min_scale=1.0, max_scale=2.0**24, config=config)
    scaler.update(overflow=True)
    scaler.update(overflow=False)
    assert scaler.update(overflow=True) is True
    assert scaler.scale == 2.0**16
    scaler.update(overflow=True)
    assert scaler.scale == 2.0**15


WRONG = {
    "initial": (0.0, -1.0, float("inf"), float("nan")),
    "growth_factor": (1.0, 0.5, float("inf"), float("nan")),
    "backoff_factor": (0.0, 1.0, 2.0, float("nan")),
    "growth_interval": (0, -1, 2.5, True),
    "hysteresis": (0, -1, 1.5, True),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_configuration_that_makes_no_sense_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(AmpError) as caught:
        DynamicLossScale(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"DynamicLossScale: {name}: expected a")
    assert str(caught.value).endswith(f"found {value!r}")


def test_all_that_is_wrong_with_a_configuration_is_in_one_error() -> None:
    with pytest.raises(AmpError) as caught:
        DynamicLossScale(initial=0.0, growth_factor=1.0, backoff_factor=1.0, growth_interval=0)
    for name in ("initial", "growth_factor", "backoff_factor", "growth_interval"):
        assert f"{name}: expected" in str(caught.value)
