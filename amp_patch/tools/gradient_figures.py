"""Figures about gradients: how far they are from others, and what of them float16 can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

LOWEST_EXPONENT = -64
HIGHEST_EXPONENT = 32

Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class GradientGap:
    """How the gradient of one layer differs from the one in FP32 on the same weights.

    `cosine` is 1 where both point the same way; `relative_error` is the length of the difference by
    the length of the FP32 gradient. Both are nan where there are values that are not finite.
    """

    layer: str
    cosine: float
    relative_error: float


@dataclass(frozen=True)
class RangeShare:
    """The share of gradient values, zeros left out, that float16 would lose at a loss scale."""

    scale: float
    flushed: float  # to zero
    overflowed: float  # to inf

    @property
    def lost(self) -> float:
        """Both together."""
        return self.flushed + self.overflowed


@dataclass(frozen=True)
class ExponentHistogram:
    """How many gradient values have which exponent: `counts[i]` are in [2^e, 2^(e+1)).

    `e` is `lowest + i`; smaller values are in the first, larger ones in the last. Zeros and values
    that are not finite are left out.
    """

    lowest: int
    counts: tuple[int, ...]


def layer_of(parameter: str) -> str:
    """The path of the module that holds a parameter; the parameter's own name in a bare module."""
    return parameter.rpartition(".")[0] or parameter


def gradient_gaps(found: Gradients, reference: Gradients) -> tuple[GradientGap, ...]:
    """The gap of each layer, in the order of `reference`. The arithmetic is done in float64."""
    layers: dict[str, list[str]] = {}
    for name in reference:
        layers.setdefault(layer_of(name), []).append(name)
    return tuple(
        _gap(
            layer,
            flat_gradient(found, names, reference),
            flat_gradient(reference, names, reference),
        )
        for layer, names in layers.items()
    )


def flat_gradient(gradients: Gradients, names: Iterable[str], like: Gradients) -> torch.Tensor:
    """Those of `names` as one float64 vector; zeros as in `like` where one is missing."""
    parts = [gradients.get(name, torch.zeros_like(like[name])) for name in names]
    return torch.cat([part.detach().double().flatten() for part in parts])


def _gap(layer: str, found: torch.Tensor, reference: torch.Tensor) -> GradientGap:
    length, reference_length = float(found.norm()), float(reference.norm())
    if not math.isfinite(length) or not math.isfinite(reference_length):
        return GradientGap(layer, math.nan, math.nan)
    difference = float((found - reference).norm())
    if reference_length == 0.0 or length == 0.0:
        is_same = length == reference_length
        error = 0.0 if is_same else difference / reference_length if reference_length else math.inf
        return GradientGap(layer, 1.0 if is_same else 0.0, error)
    cosine = float(found @ reference) / (length * reference_length)
    return GradientGap(layer, max(-1.0, min(1.0, cosine)), difference / reference_length)


def range_share(gradients: Iterable[torch.Tensor], scale: float) -> RangeShare:
    """What float16 would lose of `gradients` (float32) if the loss were multiplied by `scale`.

    By the rounding itself: values up to 2^-25 become zero and values from 65520 on inf.
    """
    values = flushed = overflowed = 0
    for gradient in gradients:
        true = gradient.detach().double()
        # From float64 to float32 first: where torch keeps the scaled gradient before it is half.
        rounded = (true * scale).to(torch.float32).to(torch.float16)
        present = true.isfinite() & (true != 0)
        values += int(present.sum())
        flushed += int((present & (rounded == 0)).sum())
        overflowed += int((present & ~rounded.isfinite()).sum())
    return RangeShare(scale, flushed / max(values, 1), overflowed / max(values, 1))


def exponent_histogram(gradients: Iterable[torch.Tensor]) -> ExponentHistogram:
    """Count the values of `gradients` by their exponent."""
    counts = torch.zeros(HIGHEST_EXPONENT - LOWEST_EXPONENT + 1, dtype=torch.int64)
    for gradient in gradients:
        values = gradient.detach().flatten().cpu()
        values = values[values.isfinite() & (values != 0)]
        # frexp gives a fraction in [0.5, 1), so that its exponent is one above log2's.
        exponents = torch.frexp(values).exponent.long() - 1
        places = exponents.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
        counts += torch.bincount(places, minlength=counts.numel())
    return ExponentHistogram(LOWEST_EXPONENT, tuple(counts.tolist()))
