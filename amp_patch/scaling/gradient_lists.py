"""The gradients of a list of parameters, with gaps where there is none."""

from __future__ import annotations

import torch

from amp_patch.scaling import gradients
from amp_patch.weights.param_pairs import ParamPair

Gradient = torch.Tensor | None


def taken(tensors: list[torch.Tensor]) -> list[Gradient]:
    """The gradients of `tensors`, which have none afterwards; an empty list if none had any."""
    found = [tensor.grad for tensor in tensors]
    if all(gradient is None for gradient in found):
        return []
    for tensor in tensors:
        tensor.grad = None
    return found


def cloned(gradients: list[Gradient]) -> list[Gradient]:
    """Copies of what is there."""
    return [None if gradient is None else gradient.clone() for gradient in gradients]


def put(tensors: list[torch.Tensor], values: list[Gradient]) -> None:
    """Set the gradients of `tensors` to what `taken` gave."""
    for tensor, gradient in zip(tensors, values, strict=False):  # `values` may be empty
        tensor.grad = gradient


def to_masters(pairs: list[ParamPair], scaled: list[Gradient]) -> list[Gradient]:
    """The gradients in FP32 where there is a master, copied in grouped calls; else as they are."""
    if not any(pair.has_master for pair in pairs):
        return scaled
    moved = list(scaled)
    targets, sources = [], []
    for i, ((model, master, _), gradient) in enumerate(zip(pairs, scaled, strict=True)):
        if gradient is None or master is model:
            continue
        if gradient.layout is torch.strided:
            target = torch.empty_like(gradient, dtype=master.dtype)
            targets.append(target)
            sources.append(gradient)
        else:
            target = gradient.to(master.dtype)
        moved[i] = target
    gradients.copy_(targets, sources)
    return moved


def added(totals: list[Gradient], fresh: list[Gradient]) -> list[Gradient]:
    """The sums, in place of `totals` where there are any."""
    sums: list[Gradient] = []
    both: list[int] = []
    addends: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, (total, gradient) in enumerate(zip(totals, fresh, strict=True)):
        if total is not None and gradient is not None:
            both.append(i)
            addends.append((total, gradient))
        sums.append(gradient if total is None else total)
    results = gradients.accumulate_([one for one, _ in addends], [other for _, other in addends])
    for i, total in zip(both, results, strict=True):
        sums[i] = total
    return sums
