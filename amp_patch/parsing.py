"""Read the values that scripts and command lines pass: "dynamic", "True", "128.0", "float16"."""

from __future__ import annotations

import math
from typing import Literal

import torch

from amp_patch.errors import AmpError
from amp_patch.scaling.loss_scaler import DynamicLossScale

OneScale = float | Literal["dynamic"] | DynamicLossScale
Scale = OneScale | tuple[OneScale, ...]  # a tuple has one for each loss

_DTYPES = {
    f"{prefix}{name}": dtype
    for prefix in ("", "torch.")
    for name, dtype in {
        "float16": torch.float16,
        "half": torch.float16,
        "fp16": torch.float16,
        "bfloat16": torch.bfloat16,
        "bf16": torch.bfloat16,
        "float32": torch.float32,
        "float": torch.float32,
        "fp32": torch.float32,
    }.items()
}
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_bool(name: str, value: object) -> bool | None:
    """True, False or None, also from strings such as "True"."""
    if value is None or isinstance(value, bool):
        return value
    if _is_blank(value):
        return None
    if isinstance(value, str) and value.strip().lower() in _BOOLEANS:
        return _BOOLEANS[value.strip().lower()]
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise AmpError(f"{name}: expected True, False or None, found {value!r}")


def parse_dtype(name: str, value: object) -> torch.dtype | None:
    """A floating dtype of at most 32 bits or None, also from strings such as "float16"."""
    if value is None or _is_blank(value):
        return None
    found = _DTYPES.get(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(found, torch.dtype) and found in _DTYPES.values():
        return found
    raise AmpError(
        f"{name}: expected torch.float16, torch.bfloat16, torch.float32 or None, found {value!r}"
    )


def parse_number(name: str, value: object) -> float | None:
    """A finite number above zero or None, also from a string."""
    if value is None or _is_blank(value):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not 0 < number < math.inf:
        raise AmpError(f"{name}: expected a finite number above zero, found {value!r}")
    return number


def parse_scale(name: str, value: object) -> Scale | None:
    """A finite number above zero, "dynamic", a `DynamicLossScale`, a list of these, or None."""
    if isinstance(value, DynamicLossScale):
        return value
    if isinstance(value, (list, tuple)) and value:
        return tuple(_parse_one_scale(f"{name}[{i}]", one) for i, one in enumerate(value))
    if isinstance(value, str) and value.strip().lower() == "dynamic":
        return "dynamic"
    try:
        return parse_number(name, value)
    except AmpError:
        raise AmpError(
            f"{name}: expected 'dynamic', a finite number above zero, a DynamicLossScale or a list "
            f"of these, one for each loss, found {value!r}"
        ) from None


def _parse_one_scale(name: str, value: object) -> OneScale:
    scale = parse_scale(name, value)
    if scale is None or isinstance(scale, tuple):
        raise AmpError(
            f"{name}: expected 'dynamic', a number or a DynamicLossScale, found {value!r}"
        )
    return scale


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("", "none")
