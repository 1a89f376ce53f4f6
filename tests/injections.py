"""The fault that most tests need: an overflow that neither the forward nor the loss shows."""

from __future__ import annotations

import math

import torch
from networks import with_gradient_times


def overflowing(value: torch.Tensor, fault: float = math.inf) -> torch.Tensor:
    """`value` itself, whose gradient is multiplied by `fault` in the backward pass."""
    return with_gradient_times(value, fault)
