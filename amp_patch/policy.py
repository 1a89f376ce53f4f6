"""What an opt level means."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from amp_patch.errors import AmpError
from amp_patch.parsing import Scale, parse_bool, parse_dtype, parse_number, parse_scale

OverflowDrops = Literal["window", "micro_batch"]

HALF_DTYPES = (torch.float16, torch.bfloat16)
CASTABLE = frozenset({torch.float32, *HALF_DTYPES})
"""The dtypes that take part in casts. float64, complex and integer tensors never do."""
DEFAULT_MIN_LOSS_SCALE = 1.0
DEFAULT_MAX_LOSS_SCALE = 2.0**24


@dataclass(frozen=True, slots=True)
class Policy:
    """How precision is mixed for the models and optimizers of one `initialize` call.

    The fields carry the names of `initialize`'s keywords. `OPT_LEVELS` holds one `Policy` a level;
    `resolve_policy` applies the overrides of a call to it. A `Policy` cannot be built in a
    combination that contradicts itself: all contradictions are reported in one `AmpError`.

        >>> OPT_LEVELS["O2"].master_weights, OPT_LEVELS["O2"].loss_scale
        (True, 'dynamic')
    """

    opt_level: str
    half_dtype: torch.dtype
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool = True
    master_weights: bool = False
    loss_scale: Scale = 1.0
    cast_model_outputs: torch.dtype | None = None
    min_loss_scale: float = DEFAULT_MIN_LOSS_SCALE
    max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE
    overflow_drops: OverflowDrops = "window"
    skip_together: bool = True
    sync_overflow: bool = True

    def __post_init__(self) -> None:
        conflicts = self._conflicts()
        if conflicts:
            raise AmpError(f"opt_level={self.opt_level!r}: " + "; ".join(conflicts))

    @property
    def casts_model(self) -> bool:
        """Whether weights and inputs of the model are cast."""
        return self.cast_model_type is not None

    def _conflicts(self) -> list[str]:
        """What contradicts itself in the combination, a sentence each."""
        found = []
        if self.half_dtype not in HALF_DTYPES:
            found.append(f"half_dtype={self.half_dtype} is no half dtype")
        if self.casts_model and self.cast_model_type is not self.half_dtype:
            found.append(
                f"cast_model_type={self.cast_model_type} is not half_dtype={self.half_dtype}"
            )
        if self.master_weights and not self.casts_model:
            found.append(
                "master_weights=True needs half weights, and here the weights stay FP32 and are "
                "their own masters; drop master_weights or use 'O2' or 'O5'"
            )
        if not self.keep_batchnorm_fp32 and not self.casts_model:
            found.append(
                "keep_batchnorm_fp32=False needs a model that is cast, and here BatchNorm stays "
                "FP32 with the rest of it; drop keep_batchnorm_fp32 or use 'O2' or 'O3'"
            )
        if self.overflow_drops not in get_args(OverflowDrops):
            found.append(
                f"overflow_drops: expected 'window' or 'micro_batch', found {self.overflow_drops!r}"
            )
        if self.min_loss_scale > self.max_loss_scale:
            found.append(
                f"min_loss_scale={self.min_loss_scale:g} is above "
                f"max_loss_scale={self.max_loss_scale:g}"
            )
        return found


OPT_LEVELS: dict[str, Policy] = {
    "O0": Policy("O0", torch.float16),
    "O1": Policy("O1", torch.float16, patch_torch_functions=True, loss_scale="dynamic"),
    "O2": Policy(
        "O2",
        torch.float16,
        cast_model_type=torch.float16,
        master_weights=True,
        loss_scale="dynamic",
        cast_model_outputs=torch.float32,
    ),
    "O3": Policy(
        "O3",
        torch.float16,
        cast_model_type=torch.float16,
        keep_batchnorm_fp32=False,
        cast_model_outputs=torch.float32,
    ),
    "O4": Policy("O4", torch.bfloat16, patch_torch_functions=True),
    "O5": Policy(
        "O5",
        torch.bfloat16,
        cast_model_type=torch.bfloat16,
        master_weights=True,
        cast_model_outputs=torch.float32,
    ),
}
"""The opt levels by name. To change one for a call, pass keywords to `initialize`."""


_UNCAST: dict[str, Any] = {
    "cast_model_type": None,
    "keep_batchnorm_fp32": True,
    "master_weights": False,
    "cast_model_outputs": None,
}


def resolve_policy(
    opt_level: object,
    *,
    half_dtype: object = None,
    cast_model_type: object = None,
    patch_torch_functions: object = None,
    keep_batchnorm_fp32: object = None,
    master_weights: object = None,
    loss_scale: object = None,
    cast_model_outputs: object = None,
    min_loss_scale: object = None,
    max_loss_scale: object = None,
    overflow_drops: object = None,
    skip_together: object = None,
    sync_overflow: object = None,
) -> Policy:
    """The `Policy` of `opt_level` with the given properties in place of the level's own.

    None leaves a property to the level, as do the strings that a command line makes of nothing
    ("None", ""). A property that depends on another follows it: bfloat16 has the range of float32,
    so its loss scale is 1.0 unless asked otherwise, and weights that are not cast need no masters.
    Raises AmpError for a value that is not understood and for combinations that contradict.
    """
    level = OPT_LEVELS[parse_opt_level(opt_level)]
    overrides = _dtype_overrides(level, half_dtype, cast_model_type)
    given = {
        "patch_torch_functions": parse_bool("patch_torch_functions", patch_torch_functions),
        "keep_batchnorm_fp32": parse_bool("keep_batchnorm_fp32", keep_batchnorm_fp32),
        "master_weights": parse_bool("master_weights", master_weights),
        "loss_scale": parse_scale("loss_scale", loss_scale),
        "cast_model_outputs": parse_dtype("cast_model_outputs", cast_model_outputs),
        "min_loss_scale": parse_number("min_loss_scale", min_loss_scale),
        "max_loss_scale": parse_number("max_loss_scale", max_loss_scale),
        "overflow_drops": overflow_drops,
        "skip_together": parse_bool("skip_together", skip_together),
        "sync_overflow": parse_bool("sync_overflow", sync_overflow),
    }
    overrides.update({name: value for name, value in given.items() if value is not None})
    if "max_loss_scale" in overrides and given["min_loss_scale"] is None:
        overrides["min_loss_scale"] = min(level.min_loss_scale, overrides["max_loss_scale"])
    return replace(level, **overrides)


def _dtype_overrides(level: Policy, half_dtype: object, cast_model_type: object) -> dict[str, Any]:
    """What the dtypes of a call change in `level`, with the properties that follow them."""
    half = parse_dtype("half_dtype", half_dtype)
    model_type, is_model_cast_off = _parse_model_type(cast_model_type)
    if half is not None and half not in HALF_DTYPES:
        raise AmpError(
            f"half_dtype: expected torch.float16 or torch.bfloat16, found {half}; "
            "for FP32 use opt_level='O0'"
        )
    if half is not None and model_type is not None and half is not model_type:
        raise AmpError(
            f"opt_level={level.opt_level!r}: half_dtype={half} and cast_model_type={model_type} "
            "contradict each other; pass one of them"
        )
    if model_type is not None and not level.casts_model:
        raise AmpError(
            f"opt_level={level.opt_level!r}: cast_model_type={model_type} contradicts the level, "
            "which leaves the weights in FP32; drop it, or use 'O2', 'O3' or 'O5' (with "
            "patch_torch_functions=True for casts around operations as well)"
        )
    overrides: dict[str, Any] = {"half_dtype": half or model_type or level.half_dtype}
    if level.casts_model:
        overrides["cast_model_type"] = overrides["half_dtype"]
    if level.casts_model and is_model_cast_off:
        overrides.update(_UNCAST)
    if overrides["half_dtype"] is not level.half_dtype:
        is_scaled = overrides["half_dtype"] is torch.float16 and level.opt_level in ("O4", "O5")
        overrides["loss_scale"] = "dynamic" if is_scaled else 1.0
    return overrides


def parse_opt_level(value: object) -> str:
    """One of the names in `OPT_LEVELS`. Near misses ("01", "o1", 1) are named in the error."""
    if isinstance(value, str) and value in OPT_LEVELS:
        return value
    wanted = str(value).strip().upper()
    wanted = f"O{wanted[-1]}" if wanted[-1:].isdigit() and wanted[:-1] in ("", "0", "O") else wanted
    near = difflib.get_close_matches(wanted, OPT_LEVELS, n=1, cutoff=0.9)
    hint = f"did you mean {near[0]!r}?" if near else "the letter O and a digit are meant"
    raise AmpError(f"opt_level: expected one of {', '.join(OPT_LEVELS)}, found {value!r}; {hint}")


def _parse_model_type(value: object) -> tuple[torch.dtype | None, bool]:
    """The dtype asked for, and whether the cast of the model was switched off (False or FP32)."""
    if value is False or (isinstance(value, str) and value.strip().lower() == "false"):
        return None, True
    dtype = parse_dtype("cast_model_type", value)
    if dtype is torch.float32:
        return None, True
    return dtype, False
