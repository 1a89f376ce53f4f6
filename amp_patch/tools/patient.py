"""What a doctor looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from amp_patch.casts.rules import OP_RULES, OpRule
from amp_patch.policy import Policy
from amp_patch.weights.exclusions import Exclusions


@dataclass(frozen=True)
class Patient:
    """What is looked at: a model, its optimizer and scheduler if any, and the level meant.

    `exclusions` are what the cast of the model leaves in FP32, `rules` those of its operations.
    """

    model: nn.Module
    optimizer: Any
    policy: Policy
    scheduler: Any = None
    exclusions: Exclusions = field(default_factory=Exclusions)
    rules: tuple[OpRule, ...] = OP_RULES

    def stays_float(self, path: str) -> bool:
        """Whether `keep_fp32` holds the module, parameter or buffer at this path in FP32."""
        return self.policy.casts_model and self.exclusions.excludes(path)

    @property
    def half(self) -> torch.dtype:
        """The half dtype of the level."""
        return self.policy.half_dtype

    @property
    def half_name(self) -> str:
        """Its name."""
        return str(self.half).removeprefix("torch.")
