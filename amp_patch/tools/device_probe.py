"""Measure which dtype is fast on a device, in a twentieth of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BUDGET = 0.05  # seconds in all
_SIDE = 256  # of the matrices: large enough to be arithmetic, small enough for a slow dtype
_WARM_UP = 1


@dataclass(frozen=True)
class DtypeSpeed:
    """How long a matrix product takes in a half dtype beside FP32; above 1 is slower."""

    dtype: torch.dtype
    ratio: float


def measure_dtypes(
    device: torch.device, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
) -> dict[torch.dtype, DtypeSpeed]:
    """The speed of products of matrices, forward and transposed, as a layer needs them.

    Takes about 50 ms, more where one single product takes longer than its share of that.
    """
    share = BUDGET / (len(dtypes) + 1)
    reference = _seconds(_product(device, torch.float32), share)
    return {
        dtype: DtypeSpeed(dtype, _seconds(_product(device, dtype), share) / reference)
        for dtype in dtypes
    }


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    matrix = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)

    def product() -> torch.Tensor:
        return matrix @ matrix.t()

    return product


def _seconds(function: Callable[[], torch.Tensor], share: float) -> float:
    """The shortest of as many calls as fit into the share, at least one."""
    for _ in range(_WARM_UP):
        function()[0, 0].item()
    shortest = float("inf")
    ends = time.perf_counter() + share
    while shortest == float("inf") or time.perf_counter() < ends:
        started = time.perf_counter()
        function()[0, 0].item()  # which waits for the device
        shortest = min(shortest, time.perf_counter() - started)
    return shortest
