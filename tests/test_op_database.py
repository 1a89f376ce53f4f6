"""torch's own operation database: what passes in FP32 passes in any mix of half and FP32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from op_samples import OPERATIONS, VARIANTS, MixedCall, mixed_calls, passes

import amp_patch as amp

LEVELS = {torch.float16: "O1", torch.bfloat16: "O4"}
SAMPLES = 5  # an operation; all of them, 18,762, take some minutes and pass as well
PARTS = 4
# Names that begin so give memory as it was found.
UNDEFINED = ("empty", "new_empty")
VALUE_HANGS_ON_ROUNDING = {
    "linalg_pinv_singular": "its sample is a product, in half, that is no longer of deficient rank",
    "native_layer_norm": "0 of a row with one element is the difference of two numbers near 1e3",
}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _forgets_warnings() -> Iterator[None]:
    """Python leaves a record in each module that has warned, also if nobody sees the warning."""
    owners = (torch, torch.functional, torch.nn.functional)
    had = ["__warningregistry__" in vars(owner) for owner in owners]
    yield
    for owner, has_one in zip(owners, had, strict=True):
        if not has_one:
            vars(owner).pop("__warningregistry__", None)


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def _calls(
    variant: str, half_dtype: torch.dtype, part: int = 0, parts: int = 1
) -> Iterator[MixedCall]:
    for info in OPERATIONS[part::parts]:
        with amp.disable_casts():
            calls = list(mixed_calls(info, variant, half_dtype, SAMPLES))
        yield from calls


def _failures(calls: Iterator[MixedCall]) -> tuple[int, list[str]]:
    """How many of `calls` pass in FP32, and what is wrong with which of them under casts."""
    tried, failures = 0, []
    for call in calls:
        with amp.disable_casts():
            if not passes(call.in_float):
                continue
            expected = call.in_float()
        tried += 1
        try:
            result = call.as_it_comes()
        except Exception as error:  # noqa: BLE001 (any error of any operation is a failure)
            failures.append(f"{call.label} raises {error!r}")
            continue
        name = call.label.partition(",")[0]
        if name in VALUE_HANGS_ON_ROUNDING or name.startswith(UNDEFINED):
            continue
        with amp.disable_casts():
            difference = call.disagreement(result, expected)
        if difference is not None:
            failures.append(f"{call.label}: {difference}")
    return tried, failures


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("half_dtype", LEVELS, ids=LEVELS.get)
def test_every_function_runs_on_mixed_tensors_and_agrees_with_fp32(
    model: torch.nn.Module, half_dtype: torch.dtype, part: int
) -> None:
    amp.initialize(model, opt_level=LEVELS[half_dtype], verbosity=0)
    tried, failures = _failures(_calls("function", half_dtype, part, PARTS))
    assert tried > 500
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "function"])
@pytest.mark.parametrize("half_dtype", LEVELS, ids=LEVELS.get)
def test_every_other_spelling_runs_on_mixed_tensors_and_agrees_with_fp32(
    model: torch.nn.Module, half_dtype: torch.dtype, variant: str
) -> None:
    amp.initialize(model, opt_level=LEVELS[half_dtype], verbosity=0)
    tried, failures = _failures(_calls(variant, half_dtype))
    assert tried > 20
    assert not failures, "\n".join(failures)


def test_counts_of_operations_that_raise_on_mixed_float16(model: torch.nn.Module) -> None:
    groups = [list(mixed_calls(info, "function", torch.float16, SAMPLES)) for info in OPERATIONS]
    groups = [[call for call in group if passes(call.in_float)] for group in groups]
    plain = _count_raising(groups)
    with torch.autocast("cpu", torch.float16):
        autocast = _count_raising(groups)
    amp.initialize(model, opt_level="O1", verbosity=0)
    ours = _count_raising(groups)
    tried = sum(map(bool, groups))
    print(f"operations that raise, of {tried}: plain {plain}, autocast {autocast}, amp {ours}")
    assert ours == 0
    assert plain > autocast > ours


def _count_raising(groups: list[list[MixedCall]]) -> int:
    return sum(not all(passes(call.as_it_comes) for call in group) for group in groups)
