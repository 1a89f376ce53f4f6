"""Say where non-finite gradients are, and what would help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_patch.scaling.gradients import elements
from amp_patch.scaling.loss_scaler import LossScaler

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class NonFiniteGradient:
    """The inf and NaN elements in the gradient of one parameter.

    `largest` is the largest magnitude among its finite elements, unscaled; 0.0 if there are none.
    """

    parameter: str
    infs: int
    nans: int
    elements: int
    largest: float

    def __str__(self) -> str:
        return f"{self.parameter} ({self.infs} inf, {self.nans} nan of {self.elements})"


@dataclass(frozen=True, slots=True)
class OverflowReport:
    """What is known of one overflow.

    `loss_scale` is the one with which it happened; `skipped_in_a_row` counts it too. A smaller
    scale may help unless the loss was inf or NaN before it was scaled: what a backward pass makes
    of a finite loss is proportional to the scale, up to the inf that it ran into. At its floor a
    dynamic scale backs off no further.
    """

    loss_scale: float
    skipped_in_a_row: int
    is_scale_dynamic: bool
    is_loss_finite: bool
    may_smaller_scale_help: bool
    is_scale_at_floor: bool
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
        if not self.is_scale_at_floor:
            return "The loss scale backs off by itself: normal at the start, and now and then later"
        return (
            "The loss scale can go no lower: allow a lower one by min_loss_scale if the gradients "
            "are large, or use opt_level='O4' or 'O5' (bfloat16), which has the range of FP32; if "
            "they are non-finite in FP32 too, look at the backward pass named here"
        )


def report_overflow(
    loss: torch.Tensor,
    loss_scale: float,
    scaler: LossScaler,
    named_gradients: Iterable[tuple[str, torch.Tensor]],
    *,
    is_loss_scaled: bool = False,
) -> OverflowReport:
    """Look at every gradient. Waits for each device twice.

    `is_loss_scaled` says that the loss was computed from gradients which a scale had multiplied, so
    that a smaller one can help where the loss is not finite.
    """
    is_loss_finite = bool(torch.isfinite(loss.detach()).all())
    return OverflowReport(
        loss_scale,
        scaler.skipped_in_a_row,
        scaler.is_dynamic,
        is_loss_finite,
        is_loss_finite or is_loss_scaled,
        scaler.is_dynamic and loss_scale <= scaler.min_scale,
        tuple(_non_finite(named_gradients)),
    )


def _non_finite(named_gradients: Iterable[tuple[str, torch.Tensor]]) -> list[NonFiniteGradient]:
    named = [(name, elements(gradient.detach())) for name, gradient in named_gradients]
    named = [(name, one) for name, one in named if one.numel()]
    counts = _read([torch.stack([one.isinf().sum(), one.isnan().sum()]) for _, one in named])
    bad = [(*row, *count) for row, count in zip(named, counts, strict=True) if any(count)]
    largest = _read([_largest_finite(one) for _, one, _, _ in bad])
    return [
        NonFiniteGradient(name, int(infs), int(nans), one.numel(), float(most))
        for (name, one, infs, nans), most in zip(bad, largest, strict=True)
    ]


def _largest_finite(values: torch.Tensor) -> torch.Tensor:
    return values.abs().nan_to_num(0.0, 0.0, 0.0).amax()


def _read(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The values of `tensors`, of one shape, with one wait for each device."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        places[tensor.device, tensor.dtype].append(i)
    found: list[Any] = [None] * len(tensors)
    for group in places.values():
        values = torch.stack([tensors[i] for i in group]).tolist()
        for i, value in zip(group, values, strict=True):
            found[i] = value
    return found
