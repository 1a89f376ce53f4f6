"""What a doctor looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amp_patch.policy import Policy


@dataclass(frozen=True)
class Patient:
    """What is looked at: a model, its optimizer and scheduler if any, and the level meant."""

    model: nn.Module
    optimizer: Any
    policy: Policy
    scheduler: Any = None

    @property
    def half(self) -> torch.dtype:
        """The half dtype of the level."""
        return self.policy.half_dtype

    @property
    def half_name(self) -> str:
        """Its name."""
        return str(self.half).removeprefix("torch.")
