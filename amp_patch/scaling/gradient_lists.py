"""The gradients of a list of parameters, with gaps where there is none."""

from __future__ import annotations

import operator

import torch

from amp_patch.errors import AmpError
from amp_patch.scaling import gradients
from amp_patch.weights.param_pairs import ParamPairs

Gradient = torch.Tensor | None
_gradient = operator.attrgetter("grad")


def gradients_of(tensors: list[torch.Tensor]) -> list[Gradient]:
    """The gradients of `tensors`."""
    return list(map(_gradient, tensors))


def taken(tensors: list[torch.Tensor]) -> list[Gradient]:
    """The gradients of `tensors`, which have none afterwards; an empty list if none had any."""
    found = gradients_of(tensors)
    if not _have_any(found):
        return []
    clear(tensors)
    return found


def _have_any(values: list[Gradient]) -> bool:
    """Whether there is a gradient in the list."""
    return any(value is not None for value in values)


def clear(tensors: list[torch.Tensor]) -> None:
    """Let `tensors` have no gradients."""
    for tensor in tensors:
        tensor.grad = None


def cloned(gradients: list[Gradient]) -> list[Gradient]:
    """Copies of what is there."""
    return [None if gradient is None else gradient.clone() for gradient in gradients]


def refuse_stray_gradients(caller: str, pairs: ParamPairs) -> None:
    """AmpError where half weights have gradients that never reached their masters."""
    if _have_any(gradients_of(pairs.mastered.models)):
        raise AmpError(
            f"{caller}: found gradients on half weights that no scale_loss block produced; they "
            "have not reached the FP32 master weights. Call backward inside `with amp.scale_loss("
            "loss, optimizer) as scaled_loss: scaled_loss.backward()`, or clear them with "
            "zero_grad()"
        )


def put(tensors: list[torch.Tensor], values: list[Gradient]) -> None:
    """Let `tensors` have `values` as gradients, unless that list is empty."""
    if values:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.grad = value


def to_masters(pairs: ParamPairs, scaled: list[Gradient]) -> list[Gradient]:
    """The gradients in FP32 where there is a master, copied in grouped calls; else as they are."""
    if not pairs.mastered:
        return scaled
    if pairs.are_alike and gradients.are_plain(scaled):
        fresh = list(map(torch.empty_like, pairs.masters))
        torch._foreach_copy_(fresh, list(scaled))
        return [*fresh]
    moved = list(scaled)
    targets, sources = [], []
    for i, (gradient, model, master) in enumerate(
        zip(scaled, pairs.models, pairs.masters, strict=True)
    ):
        if gradient is None or master is model:
            continue
        if gradient.layout is torch.strided:
            moved[i] = target = torch.empty_like(master)
            targets.append(target)
            sources.append(gradient)
        else:
            moved[i] = gradient.to(master.dtype)
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
