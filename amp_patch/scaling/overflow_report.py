"""Say where non-finite gradients are, and what would help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class NonFiniteGradient:
    """The inf and NaN elements in the gradient of one parameter."""

    parameter: str
    infs: int
    nans: int
    elements: int

    def __str__(self) -> str:
        return f"{self.parameter} ({self.infs} inf, {self.nans} nan of {self.elements})"


@dataclass(frozen=True, slots=True)
class OverflowReport:
    """What is known of one overflow.

    `loss_scale` is the one with which it happened; `skipped_in_a_row` counts it too.
    """

    loss_scale: float
    skipped_in_a_row: int
    is_scale_dynamic: bool
    is_loss_finite: bool
    gradients: tuple[NonFiniteGradient, ...]

    def __str__(self) -> str:
        named = ", ".join(str(one) for one in self.gradients[:_SHOWN])
        rest = len(self.gradients) - _SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        where = f"; first non-finite gradients: {named}{more}" if named else ""
        return f"{self._verdict()}{where}. {self._remedy()}"

    def _verdict(self) -> str:
        skips = f"{self.skipped_in_a_row} step(s) in a row skipped"
        if not self.is_loss_finite:
            return f"the loss itself is inf or NaN, before any scaling ({skips})"
        return f"gradients are inf or NaN at loss scale {self.loss_scale:g} ({skips})"

    def _remedy(self) -> str:
        if not self.is_loss_finite:
            return (
                "No loss scale helps: look for a division by zero, a logarithm of zero, a value "
                "above 65504 in the forward pass, bad data, or too high a learning rate; "
                "opt_level='O4' or 'O5' (bfloat16) has the range of FP32"
            )
        if not self.is_scale_dynamic:
            return "The loss scale is static: pass a lower loss_scale, or 'dynamic'"
        return (
            "The loss scale can go no lower: allow a lower one by min_loss_scale if the gradients "
            "are large, or use opt_level='O4' or 'O5' (bfloat16), which has the range of FP32; if "
            "they are non-finite in FP32 too, look at the backward pass named here"
        )


def report_overflow(
    loss: torch.Tensor,
    loss_scale: float,
    skipped_in_a_row: int,
    is_scale_dynamic: bool,
    named_gradients: Iterable[tuple[str, torch.Tensor]],
) -> OverflowReport:
    """Look at every gradient. Synchronises."""
    found = []
    for name, gradient in named_gradients:
        values = gradient.detach() if gradient.layout is torch.strided else gradient._values()
        infs, nans = int(values.isinf().sum()), int(values.isnan().sum())
        if infs or nans:
            found.append(NonFiniteGradient(name, infs, nans, values.numel()))
    is_loss_finite = bool(torch.isfinite(loss.detach()).all())
    return OverflowReport(
        loss_scale, skipped_in_a_row, is_scale_dynamic, is_loss_finite, tuple(found)
    )
