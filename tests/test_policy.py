"""What each opt level means, and which overrides are legal."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from amp_patch.errors import AmpError
from amp_patch.policy import (
    DEFAULT_MAX_LOSS_SCALE,
    DEFAULT_MIN_LOSS_SCALE,
    OPT_LEVELS,
    Policy,
    parse_opt_level,
    resolve_policy,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

# The table of the README of apex, with the two levels that the fork for AMD devices added.
LEVELS = {
    #      half  model  patch  bn    masters scale      outputs
    "O0": (FP16, None, False, True, False, 1.0, None),
    "O1": (FP16, None, True, True, False, "dynamic", None),
    "O2": (FP16, FP16, False, True, True, "dynamic", FP32),
    "O3": (FP16, FP16, False, False, False, 1.0, FP32),
    "O4": (BF16, None, True, True, False, 1.0, None),
    "O5": (BF16, BF16, False, True, True, 1.0, FP32),
}
COLUMNS = (
    "half_dtype",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
)
CASTING_LEVELS = ("O2", "O3", "O5")


def overrides_of(policy: Policy) -> dict[str, Any]:
    """The keywords that ask for each property of `policy` by name."""
    found = dataclasses.asdict(policy)
    del found["opt_level"]
    found["cast_model_type"] = found["cast_model_type"] or False  # None leaves it to the level
    return found


def test_levels_are_the_six_in_order() -> None:
    assert list(OPT_LEVELS) == list(LEVELS)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_level_means_what_the_table_says(opt_level: str) -> None:
    policy = resolve_policy(opt_level)
    assert tuple(getattr(policy, name) for name in COLUMNS) == LEVELS[opt_level]
    assert policy == OPT_LEVELS[opt_level]
    assert (policy.min_loss_scale, policy.max_loss_scale) == (1.0, 2.0**24)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_policy_is_frozen(opt_level: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OPT_LEVELS[opt_level].loss_scale = 1.0  # type: ignore[misc]


def test_policy_refuses_new_attributes() -> None:
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        OPT_LEVELS["O1"].loss_scaling = 1.0  # type: ignore[attr-defined]


def test_statement_about_a_policy_follows_its_fields() -> None:
    assert [level for level in LEVELS if OPT_LEVELS[level].casts_model] == list(CASTING_LEVELS)


LEGAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "O0-static-scale": ("O0", {"loss_scale": 128.0}, {"loss_scale": 128.0}),
    "O0-with-casts": ("O0", {"patch_torch_functions": True}, {"patch_torch_functions": True}),
    "O0-model-cast-off": ("O0", {"cast_model_type": False}, {"cast_model_type": None}),
    "O1-static-scale": ("O1", {"loss_scale": 128}, {"loss_scale": 128.0}),
    "O1-no-masters": ("O1", {"master_weights": False}, {"master_weights": False}),
    "O1-batchnorm": ("O1", {"keep_batchnorm_fp32": True}, {"keep_batchnorm_fp32": True}),
    "O1-half-outputs": ("O1", {"cast_model_outputs": FP16}, {"cast_model_outputs": FP16}),
    "O1-model-in-fp32": ("O1", {"cast_model_type": FP32}, {"cast_model_type": None}),
    "O1-in-bfloat16": ("O1", {"half_dtype": BF16}, {"half_dtype": BF16, "loss_scale": 1.0}),
    "O1-in-bfloat16-scaled": (
        "O1",
        {"half_dtype": BF16, "loss_scale": "dynamic"},
        {"half_dtype": BF16, "loss_scale": "dynamic"},
    ),
    "O2-all-half": ("O2", {"keep_batchnorm_fp32": False}, {"keep_batchnorm_fp32": False}),
    "O2-no-masters": ("O2", {"master_weights": False}, {"master_weights": False}),
    "O2-with-casts": ("O2", {"patch_torch_functions": True}, {"patch_torch_functions": True}),
    "O2-half-outputs": ("O2", {"cast_model_outputs": FP16}, {"cast_model_outputs": FP16}),
    "O2-in-bfloat16": (
        "O2",
        {"cast_model_type": BF16},
        {"cast_model_type": BF16, "half_dtype": BF16, "loss_scale": 1.0},
    ),
    "O2-model-cast-off": (
        "O2",
        {"cast_model_type": False},
        {"cast_model_type": None, "master_weights": False, "cast_model_outputs": None},
    ),
    "O3-batchnorm": ("O3", {"keep_batchnorm_fp32": True}, {"keep_batchnorm_fp32": True}),
    "O3-masters": ("O3", {"master_weights": True}, {"master_weights": True}),
    "O3-dynamic": ("O3", {"loss_scale": "dynamic"}, {"loss_scale": "dynamic"}),
    "O3-model-cast-off": (
        "O3",
        {"cast_model_type": FP32},
        {"cast_model_type": None, "keep_batchnorm_fp32": True, "cast_model_outputs": None},
    ),
    "O4-in-float16": ("O4", {"half_dtype": FP16}, {"half_dtype": FP16, "loss_scale": "dynamic"}),
    "O5-in-float16": (
        "O5",
        {"half_dtype": FP16},
        {"cast_model_type": FP16, "half_dtype": FP16, "loss_scale": "dynamic"},
    ),
    "bounds": (
        "O1",
        {"min_loss_scale": 2.0, "max_loss_scale": 4.0},
        {"min_loss_scale": 2.0, "max_loss_scale": 4.0},
    ),
    "floor-below-one-on-request": ("O1", {"min_loss_scale": 2**-8}, {"min_loss_scale": 2**-8}),
    "ceiling-below-the-floor-by-default": (
        "O1",
        {"max_loss_scale": 0.5},
        {"min_loss_scale": 0.5, "max_loss_scale": 0.5},
    ),
}


@pytest.mark.parametrize(("opt_level", "given_", "changed"), LEGAL.values(), ids=LEGAL.keys())
def test_legal_override_changes_what_it_names_and_what_hangs_on_it(
    opt_level: str, given_: dict[str, Any], changed: dict[str, Any]
) -> None:
    policy = resolve_policy(opt_level, **given_)
    assert policy == dataclasses.replace(OPT_LEVELS[opt_level], **changed)


ILLEGAL: dict[str, tuple[str, dict[str, Any], str]] = {
    "O0-cast-model": ("O0", {"cast_model_type": FP16}, "cast_model_type=torch.float16 contradicts"),
    "O1-cast-model": ("O1", {"cast_model_type": FP16}, "drop it, or use 'O2', 'O3' or 'O5'"),
    "O4-cast-model": ("O4", {"cast_model_type": BF16}, "leaves the weights in FP32"),
    "O0-masters": ("O0", {"master_weights": True}, "master_weights=True needs half weights"),
    "O1-masters": ("O1", {"master_weights": True}, "drop master_weights or use 'O2' or 'O5'"),
    "O4-masters": ("O4", {"master_weights": True}, "their own masters"),
    "O0-batchnorm": ("O0", {"keep_batchnorm_fp32": False}, "needs a model that is cast"),
    "O1-batchnorm": ("O1", {"keep_batchnorm_fp32": False}, "drop keep_batchnorm_fp32 or use 'O2'"),
    "O2-uncast-masters": (
        "O2",
        {"cast_model_type": False, "master_weights": True},
        "master_weights=True needs half weights",
    ),
    "O2-two-halves": (
        "O2",
        {"cast_model_type": FP16, "half_dtype": BF16},
        "half_dtype=torch.bfloat16 and cast_model_type=torch.float16 contradict each other",
    ),
    "O1-half-is-fp32": ("O1", {"half_dtype": FP32}, "half_dtype: expected torch.float16 or"),
    "bounds": (
        "O1",
        {"min_loss_scale": 8, "max_loss_scale": 4},
        "min_loss_scale=8 is above max_loss_scale=4",
    ),
}


@pytest.mark.parametrize(("opt_level", "given_", "words"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_override_is_refused_in_words(
    opt_level: str, given_: dict[str, Any], words: str
) -> None:
    with pytest.raises(AmpError) as caught:
        resolve_policy(opt_level, **given_)
    assert words in str(caught.value)


def test_all_contradictions_are_in_one_error() -> None:
    with pytest.raises(AmpError) as caught:
        resolve_policy(
            "O1",
            master_weights=True,
            keep_batchnorm_fp32=False,
            min_loss_scale=8,
            max_loss_scale=4,
        )
    message = str(caught.value)
    assert message.startswith("opt_level='O1': ")
    for name in ("master_weights=True", "keep_batchnorm_fp32=False", "min_loss_scale=8"):
        assert name in message


def test_contradiction_is_refused_when_a_policy_is_built_by_hand() -> None:
    with pytest.raises(AmpError, match=r"half_dtype=torch\.float64 is no half dtype"):
        Policy("mine", torch.float64)
    with pytest.raises(AmpError, match=r"cast_model_type=torch\.float16 is not half_dtype"):
        Policy("mine", BF16, cast_model_type=FP16)


BOOLEANS = (None, True, False)


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("model_type", [None, False, FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("half", [None, FP16, BF16], ids=str)
def test_every_combination_is_resolved_or_refused_by_the_rules(
    opt_level: str, model_type: Any, half: Any
) -> None:
    level_half, level_type, *_ = LEVELS[opt_level]
    asks_for_cast = model_type in (FP16, BF16)
    is_cast = level_type is not None and model_type is not False and model_type is not FP32
    for patch, batchnorm, masters in itertools.product(BOOLEANS, repeat=3):
        is_legal = not (
            (asks_for_cast and level_type is None)
            or (asks_for_cast and half is not None and half is not model_type)
            or (masters is True and not is_cast)
            or (batchnorm is False and not is_cast)
        )
        keywords = {
            "cast_model_type": model_type,
            "half_dtype": half,
            "patch_torch_functions": patch,
            "keep_batchnorm_fp32": batchnorm,
            "master_weights": masters,
        }
        if not is_legal:
            with pytest.raises(AmpError, match=f"opt_level='{opt_level}'"):
                resolve_policy(opt_level, **keywords)
            continue
        policy = resolve_policy(opt_level, **keywords)
        assert policy.half_dtype is (half or (model_type if asks_for_cast else level_half))
        assert policy.cast_model_type is (policy.half_dtype if is_cast else None)
        assert policy.patch_torch_functions is (LEVELS[opt_level][2] if patch is None else patch)
        assert not (policy.master_weights and not is_cast)


PROPERTIES = {
    "half_dtype": st.sampled_from([None, "bfloat16", FP16]),
    "cast_model_type": st.sampled_from([None, False, FP16, "torch.bfloat16", "float32"]),
    "patch_torch_functions": st.sampled_from(BOOLEANS),
    "keep_batchnorm_fp32": st.sampled_from(BOOLEANS),
    "master_weights": st.sampled_from(BOOLEANS),
    "loss_scale": st.one_of(st.none(), st.just("dynamic"), st.floats(2**-20, 2**20)),
    "cast_model_outputs": st.sampled_from([None, FP16, BF16, FP32]),
    "min_loss_scale": st.one_of(st.none(), st.floats(2**-10, 2**10)),
    "max_loss_scale": st.one_of(st.none(), st.floats(2**-10, 2**30)),
}


@given(st.sampled_from(list(LEVELS)), st.fixed_dictionaries({}, optional=PROPERTIES))
def test_resolving_what_was_resolved_changes_nothing(opt_level: str, given_: Any) -> None:
    try:
        policy = resolve_policy(opt_level, **given_)
    except AmpError:
        return
    assert resolve_policy(policy.opt_level, **overrides_of(policy)) == policy
    assert 0 < policy.min_loss_scale <= policy.max_loss_scale < math.inf


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=6),
    st.binary(max_size=3),
    st.sampled_from(["dynamic", "O1", "True", "nan", "inf", "-1", "1e999", "float64", " none "]),
    st.sampled_from([torch.float64, torch.int32, torch.float16, torch.complex64]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=1), st.integers(), max_size=1),
    st.sampled_from([object(), torch.ones(2), torch.tensor(2.0), torch.empty(1, device="meta")]),
)


@pytest.mark.parametrize("name", ["opt_level", *PROPERTIES])
@given(junk=JUNK, opt_level=st.sampled_from(list(LEVELS)))
def test_any_value_works_or_is_refused_by_name(name: str, junk: object, opt_level: str) -> None:
    keywords = {"opt_level": opt_level, name: junk}
    try:
        policy = resolve_policy(keywords.pop("opt_level"), **keywords)
    except AmpError as error:
        assert name in str(error)  # noqa: PT017 (most values work)
    else:
        assert isinstance(policy, Policy)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("01", "O1"),
        ("o1", "O1"),
        ("1", "O1"),
        (1, "O1"),
        (" O2 ", "O2"),
        ("o5", "O5"),
        ("O2\n", "O2"),
        ("00", "O0"),
    ],
    ids=repr,
)
def test_near_miss_of_a_level_is_named(typed: object, meant: str) -> None:
    with pytest.raises(AmpError) as caught:
        parse_opt_level(typed)
    assert str(caught.value) == (
        f"opt_level: expected one of O0, O1, O2, O3, O4, O5, found {typed!r}; "
        f"did you mean {meant!r}?"
    )


@pytest.mark.parametrize("typed", ["O6", "", "mixed", None, 7, "O11", ["O1"], b"O1"], ids=repr)
def test_level_that_is_none_of_them_gets_no_guess(typed: object) -> None:
    with pytest.raises(AmpError) as caught:
        parse_opt_level(typed)
    assert f"found {typed!r}; the letter O and a digit are meant" in str(caught.value)


def test_default_bounds_are_above_zero() -> None:
    assert 0 < DEFAULT_MIN_LOSS_SCALE < DEFAULT_MAX_LOSS_SCALE == 2.0**24
