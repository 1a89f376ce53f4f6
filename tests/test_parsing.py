"""Reading the values that scripts and command lines pass."""

from __future__ import annotations

import math

import pytest
import torch

from amp_patch.errors import AmpError
from amp_patch.parsing import parse_bool, parse_dtype, parse_number, parse_scale

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("true", True),
        (" TRUE ", True),
        ("1", True),
        ("yes", True),
        (1, True),
        ("False", False),
        ("0", False),
        ("no", False),
        (0, False),
        ("None", None),
        ("", None),
        (None, None),
    ],
    ids=repr,
)
def test_boolean_is_read_from_a_command_line(text: object, value: bool | None) -> None:
    assert parse_bool("enabled", text) is value


@pytest.mark.parametrize("text", ["maybe", "2", 2, 1.0, -1, [], "truee"], ids=repr)
def test_what_is_no_boolean_is_refused(text: object) -> None:
    with pytest.raises(AmpError) as caught:
        parse_bool("master_weights", text)
    assert str(caught.value) == f"master_weights: expected True, False or None, found {text!r}"


@pytest.mark.parametrize("prefix", ["", "torch.", " Torch."], ids=["bare", "qualified", "untidy"])
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("float16", FP16),
        ("half", FP16),
        ("fp16", FP16),
        ("bfloat16", BF16),
        ("bf16", BF16),
        ("float32", FP32),
        ("float", FP32),
        ("fp32", FP32),
    ],
)
def test_dtype_is_read_from_a_command_line(prefix: str, text: str, dtype: torch.dtype) -> None:
    assert parse_dtype("half_dtype", prefix + text) is dtype


@pytest.mark.parametrize("value", [torch.float64, torch.int8, "double", "int", 16, True], ids=repr)
def test_what_is_no_dtype_for_mixing_is_refused(value: object) -> None:
    with pytest.raises(AmpError) as caught:
        parse_dtype("cast_model_outputs", value)
    assert str(caught.value) == (
        "cast_model_outputs: expected torch.float16, torch.bfloat16, torch.float32 or None, "
        f"found {value!r}"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [("128.0", 128.0), ("128", 128.0), ("1e3", 1000.0), (" 2 ", 2.0), (3, 3.0), ("None", None)],
    ids=repr,
)
def test_number_is_read_from_a_command_line(text: object, number: float | None) -> None:
    assert parse_number("min_loss_scale", text) == number


@pytest.mark.parametrize(
    "value", [0, -1, math.inf, math.nan, "nan", "x", True, [1.0], 10**400, 1j], ids=repr
)
def test_what_is_no_number_above_zero_is_refused(value: object) -> None:
    with pytest.raises(AmpError) as caught:
        parse_number("max_loss_scale", value)
    assert str(caught.value) == (
        f"max_loss_scale: expected a finite number above zero, found {value!r}"
    )


@pytest.mark.parametrize("text", ["dynamic", "Dynamic", " dynamic "])
def test_dynamic_scale_is_read_from_a_command_line(text: str) -> None:
    assert parse_scale("loss_scale", text) == "dynamic"


def test_scale_that_is_no_scale_is_refused() -> None:
    with pytest.raises(AmpError) as caught:
        parse_scale("loss_scale", "dynamo")
    assert str(caught.value) == (
        "loss_scale: expected 'dynamic', a finite number above zero, a DynamicLossScale or a list "
        "of these, one for each loss, found 'dynamo'"
    )


def test_scale_that_is_refused_hides_no_second_error_behind_it() -> None:
    with pytest.raises(AmpError) as caught:
        parse_scale("loss_scale", "dynamo")
    assert caught.value.__suppress_context__
