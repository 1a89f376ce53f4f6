"""The only arithmetic done on gradients: unscale and check, copy, accumulate, in grouped calls.

Nothing here waits for the device: `unscale_` leaves its verdict in tensors, and `any_found` is the
one function that reads them.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch

Gradients = Sequence[torch.Tensor]
Scale = float | torch.Tensor  # 0-dim and float32, where only the device knows it
_Group = list[torch.Tensor]
_group_tensors_by_device_and_dtype = torch._C._group_tensors_by_device_and_dtype
_layout = operator.attrgetter("layout")
_PLAIN, _STRIDED = {torch.Tensor}, {torch.strided}


def unscale_(gradients: Gradients, scale: Scale) -> list[torch.Tensor]:
    """Divide dense or sparse `gradients` by `scale` in place; test each element for inf and NaN.

    Returns one 0-dim float32 tensor a device, 1.0 where a non-finite element was found. The test is
    elementwise: gradients whose *sum* leaves the range are not an overflow.
    """
    found: dict[torch.device, torch.Tensor] = {}
    inverse: dict[torch.device, torch.Tensor] = {}
    for (device, _), group in _grouped(_elements(gradients)).items():
        if device not in found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
            inverse[device] = _inverse(scale, device)
        _unscale_group_(group, found[device], inverse[device])
    return list(found.values())


def non_finite(gradients: Gradients) -> list[torch.Tensor]:
    """The verdicts of `unscale_` on `gradients` that are unscaled already."""
    return unscale_(gradients, 1.0)


def any_found(found: Iterable[torch.Tensor]) -> bool:
    """Whether any of the verdicts of `unscale_` says overflow. Synchronises once."""
    return any(each_found([list(found)]))  # None is false


def each_found(groups: Sequence[Sequence[torch.Tensor]]) -> list[bool | None]:
    """For each group of verdicts, whether any of them says overflow; None if nothing was tested.

    A negative verdict is one of no gradients. Synchronises once in all.
    """
    verdicts = [verdict for group in groups for verdict in group]
    if len(verdicts) < 2:
        values = [verdict.item() for verdict in verdicts]
    else:
        device = verdicts[0].device
        values = torch.stack([verdict.to(device) for verdict in verdicts]).tolist()
    flags = iter(values)
    largest = [max(itertools.islice(flags, len(group)), default=-1.0) for group in groups]
    return [None if value < 0 else value > 0 for value in largest]


def accumulate_(totals: Gradients, fresh: Gradients) -> list[torch.Tensor]:
    """Add `fresh` to `totals`, in place where both are dense. Returns the sums."""
    dense = [i for i, (a, b) in enumerate(zip(totals, fresh, strict=True)) if _are_dense(a, b)]
    sums = list(totals)
    for group, addends in by_dtype([totals[i] for i in dense], [fresh[i] for i in dense]):
        torch._foreach_add_(group, addends)
    for i in set(range(len(sums))) - set(dense):
        sums[i] = _sum(totals[i], fresh[i])
    return sums


def scale_(tensors: Gradients, factor: float) -> None:
    """Multiply `tensors` by `factor` in place."""
    for group in _grouped(_elements(tensors)).values():
        torch._foreach_mul_(group, factor)


def copy_(targets: Gradients, sources: Gradients) -> None:
    """Write `sources` into dense `targets`, converting dtypes. Grouped by device and dtype."""
    for group, values in by_dtype(targets, sources):
        torch._foreach_copy_(group, values)


def are_plain(tensors: Sequence[torch.Tensor | None]) -> TypeGuard[Gradients]:
    """Whether there are tensors, all dense and of torch's own class."""
    return set(map(type, tensors)) == _PLAIN and set(map(_layout, tensors)) == _STRIDED


def elements(gradient: torch.Tensor) -> torch.Tensor:
    """The tensor that has the elements: of a sparse gradient, or of this rank's shard."""
    if type(gradient) is not torch.Tensor and hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    return gradient if gradient.layout is torch.strided else gradient._values()


def _sum(total: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    if total.layout is not torch.strided and fresh.layout is torch.strided:
        return fresh + total  # torch adds a sparse tensor to a dense one, not the other way round
    if total.layout is torch.sparse_coo and total.dtype in (torch.float16, torch.bfloat16):
        return (total.float() + fresh.float()).to(total.dtype)  # torch 2.13 adds none in half
    return total + fresh


def _are_dense(*tensors: torch.Tensor) -> bool:
    return all(tensor.layout is torch.strided for tensor in tensors)


def by_dtype(first: Gradients, second: Gradients) -> Iterator[tuple[_Group, _Group]]:
    """Pairs of tensors in lists, one of each, for each combination of devices and dtypes."""
    if len(_grouped(first)) == 1 == len(_grouped(second)):
        yield list(first), list(second)
        return
    groups: dict[tuple[object, ...], tuple[_Group, _Group]] = defaultdict(lambda: ([], []))
    for one, other in zip(first, second, strict=True):
        ones, others = groups[one.device, one.dtype, other.device, other.dtype]
        ones.append(one)
        others.append(other)
    yield from groups.values()


def _grouped(tensors: Gradients) -> dict[tuple[torch.device, torch.dtype], _Group]:
    if not tensors:  # which torch refuses
        return {}
    groups: Any = _group_tensors_by_device_and_dtype([list(tensors)], False)
    return {kind: group for kind, ((group,), _) in groups.items()}


def _elements(tensors: Gradients) -> Gradients:
    return tensors if are_plain(tensors) else list(map(elements, tensors))


def _inverse(scale: Scale, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.reciprocal().to(device)
    # Filled there: a tensor made here and sent would be waited for.
    return torch.full((), 1.0 / scale, dtype=torch.float32, device=device)


def _unscale_group_(group: _Group, found: torch.Tensor, inverse: torch.Tensor) -> None:
    if hasattr(torch, "_amp_foreach_non_finite_check_and_unscale_") and not group[0].is_complex():
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse)
        return
    for gradient in group:  # the fused kernel is private to torch and knows no complex numbers
        found.copy_(torch.maximum(found, (~torch.isfinite(gradient)).any()))
        gradient.mul_(inverse.to(gradient.dtype))
