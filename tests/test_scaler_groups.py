"""The scalers of each call, numbered through, and their state by name."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from amp_patch.errors import AmpError, AmpWarning
from amp_patch.policy import OPT_LEVELS, resolve_policy
from amp_patch.scaling.scaler_groups import ScalerGroup, ScalerGroups


def make_group(num_losses: int = 1, **overrides: Any) -> ScalerGroup:
    return ScalerGroup(resolve_policy("O1", **overrides), num_losses, is_verbose=True)


def make_groups(*groups: ScalerGroup) -> ScalerGroups:
    found = ScalerGroups()
    for group in groups:
        found.add(group)
    return found


@pytest.mark.parametrize("opt_level", OPT_LEVELS)
def test_group_has_a_scaler_a_loss_as_the_policy_says(opt_level: str) -> None:
    policy = OPT_LEVELS[opt_level]
    group = ScalerGroup(policy, 3, is_verbose=True)
    assert len(group.scalers) == 3
    for scaler in group.scalers:
        assert scaler.is_dynamic is (policy.loss_scale == "dynamic")
        assert scaler.scale == (65536.0 if policy.loss_scale == "dynamic" else policy.loss_scale)


def test_bounds_of_the_policy_reach_the_scaler() -> None:
    scaler = make_group(min_loss_scale=4.0, max_loss_scale=8.0).scaler(0)
    assert (scaler.min_scale, scaler.scale, scaler.max_scale) == (4.0, 8.0, 8.0)


def test_static_scale_is_honoured_outside_the_bounds_of_dynamic_ones() -> None:
    assert make_group(loss_scale=2.0**30).scaler(0).scale == 2.0**30


def test_losses_of_a_group_have_scales_of_their_own() -> None:
    group = make_group(2)
    group.scaler(1).update(overflow=True)
    assert [scaler.scale for scaler in group.scalers] == [65536.0, 32768.0]


@pytest.mark.parametrize("loss_id", [-1, 2, 7, "0", 0.0, None], ids=repr)
def test_unknown_loss_is_refused_with_the_range_and_the_remedy(loss_id: Any) -> None:
    with pytest.raises(AmpError) as caught:
        make_group(2).scaler(loss_id)
    assert str(caught.value) == (
        f"loss_id: expected 0 to 1, found {loss_id!r}; pass num_losses to initialize"
    )


def test_groups_are_empty_until_one_is_added_and_after_clear() -> None:
    groups = ScalerGroups()
    assert groups.is_empty
    group = make_group()
    groups.add(group)
    assert not groups.is_empty
    groups.clear()
    assert groups.is_empty
    assert groups.state_dict() == {}


def test_newest_group_is_numbered_first() -> None:
    old, new = make_group(2), make_group()
    groups = make_groups(old, new)
    assert groups.scaler(0) is new.scaler(0)
    assert groups.scaler(1) is old.scaler(0)
    assert groups.scaler(2) is old.scaler(1)


def test_group_that_died_is_not_numbered() -> None:
    old, new = make_group(), make_group(2)
    groups = make_groups(old, new)
    del new
    gc.collect()
    assert groups.scaler(0) is old.scaler(0)
    assert list(groups.state_dict()) == ["loss_scaler0"]


def test_error_where_every_group_died_says_so() -> None:
    group = make_group()
    groups = make_groups(group)
    del group
    gc.collect()
    with pytest.raises(AmpError) as caught:
        groups.scaler(0)
    assert "0 to -1" not in str(caught.value)


def test_group_in_a_cycle_that_nobody_holds_is_not_numbered() -> None:
    old, new = make_group(), make_group()
    new.cycle = new  # type: ignore[attr-defined]
    groups = make_groups(old, new)
    del new
    assert list(groups.state_dict()) == ["loss_scaler0"]
    assert groups.scaler(0) is old.scaler(0)


def test_state_is_plain_numbers_by_name() -> None:
    group = make_group(2)
    group.scaler(1).update(overflow=True)
    assert make_groups(group).state_dict() == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 32768.0, "unskipped": 0},
    }


def test_state_is_loaded_by_name() -> None:
    group = make_group(2)
    make_groups(group).load_state_dict(
        {
            "loss_scaler1": {"loss_scale": 4.0, "unskipped": 1},
            "loss_scaler0": {"loss_scale": 2.0, "unskipped": 5},
        }
    )
    assert [scaler.state_dict() for scaler in group.scalers] == [
        {"loss_scale": 2.0, "unskipped": 5},
        {"loss_scale": 4.0, "unskipped": 1},
    ]


def test_numbers_kept_as_tensors_are_loaded() -> None:
    group = make_group()
    entry = {"loss_scale": torch.tensor(8.0), "unskipped": torch.tensor(3)}
    make_groups(group).load_state_dict({"loss_scaler0": entry})
    assert group.scaler(0).state_dict() == {"loss_scale": 8.0, "unskipped": 3}


def test_names_on_one_side_only_are_reported_and_the_rest_is_loaded() -> None:
    group = make_group(2)
    state = {
        "loss_scaler0": {"loss_scale": 2.0, "unskipped": 0},
        "loss_scaler7": {"loss_scale": 4.0, "unskipped": 0},
        3: None,
    }
    with pytest.warns(AmpWarning) as caught:
        make_groups(group).load_state_dict(state)
    (warning,) = caught
    assert warning.filename == __file__
    assert "missing ['loss_scaler1'], not used ['3', 'loss_scaler7']" in str(warning.message)
    assert [scaler.scale for scaler in group.scalers] == [2.0, 65536.0]


def test_warning_turned_into_an_error_loads_nothing() -> None:
    group = make_group(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AmpWarning):
            make_groups(group).load_state_dict({"loss_scaler0": {"loss_scale": 2, "unskipped": 0}})
    assert group.scaler(0).scale == 65536.0


MALFORMED: dict[str, Any] = {
    "none": None,
    "number": 65536.0,
    "list": [65536.0, 0],
    "text": "65536",
    "empty": {},
    "no-count": {"loss_scale": 2.0},
    "no-scale": {"unskipped": 2},
    "zero-scale": {"loss_scale": 0.0, "unskipped": 0},
    "negative-scale": {"loss_scale": -2.0, "unskipped": 0},
    "infinite-scale": {"loss_scale": math.inf, "unskipped": 0},
    "nan-scale": {"loss_scale": math.nan, "unskipped": 0},
    "negative-count": {"loss_scale": 2.0, "unskipped": -1},
    "infinite-count": {"loss_scale": 2.0, "unskipped": math.inf},
    "nan-count": {"loss_scale": 2.0, "unskipped": math.nan},
    "huge-scale": {"loss_scale": 10**400, "unskipped": 0},
    "text-scale": {"loss_scale": "large", "unskipped": 0},
    "vector-scale": {"loss_scale": torch.ones(2), "unskipped": 0},
}


@pytest.mark.parametrize("entry", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_entry_is_refused_and_nothing_is_loaded(entry: Any) -> None:
    group = make_group(2)
    state = {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 5}, "loss_scaler1": entry}
    with pytest.raises(AmpError) as caught:
        make_groups(group).load_state_dict(state)
    assert "load_state_dict: 'loss_scaler1': expected {'loss_scale': a number" in str(caught.value)
    assert f"found {entry!r}; nothing was loaded" in str(caught.value)
    assert group.scaler(0).scale == 65536.0


VALUES = st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=3), st.booleans())
ENTRIES = st.one_of(
    VALUES,
    st.lists(VALUES, max_size=2),
    st.dictionaries(st.sampled_from(["loss_scale", "unskipped", "x"]), VALUES, max_size=3),
)


@given(st.fixed_dictionaries({"loss_scaler0": ENTRIES, "loss_scaler1": ENTRIES}))
def test_any_state_is_loaded_or_refused_as_a_whole(state: dict[str, Any]) -> None:
    group = make_group(2)
    groups = make_groups(group)
    before = groups.state_dict()
    try:
        groups.load_state_dict(state)
    except AmpError:
        assert groups.state_dict() == before
    assert all(1.0 <= scaler.scale <= 2.0**24 for scaler in group.scalers)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30))
def test_state_makes_the_round_trip(updates: list[tuple[int, bool]]) -> None:
    first, second = make_group(3), make_group(3)
    for loss_id, overflow in updates:
        first.scaler(loss_id).update(overflow)
    state = make_groups(first).state_dict()
    groups = make_groups(second)
    groups.load_state_dict(state)
    assert groups.state_dict() == state
