"""DistributedDataParallel with the keywords of apex, over torch's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from amp_patch.compat.flat_tensors import flatten, unflatten
from amp_patch.errors import AmpError

_ELEMENT_BYTES = 4
_MEGABYTE = 2**20
# torch 2.13 gave the keyword a new name, and warns of the old one.
_SYNC_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's `DistributedDataParallel`, which takes what scripts pass to that of apex.

    `message_size` is a number of elements, `delay_allreduce=True` allows parameters that get no
    gradient. `gradient_average=False` sums over the ranks, `gradient_predivide_factor` divides by
    that before the sum and by the rest after it, `allreduce_always_fp32` sums in FP32. What only
    steers streams and buffers of the old package is accepted, and has no effect.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise AmpError(
                "DistributedDataParallel: shared_param was retired long ago; leave it out, and "
                "pass delay_allreduce=True if parameters are shared"
            )
        super().__init__(
            module,
            bucket_cap_mb=max(1, message_size * _ELEMENT_BYTES // _MEGABYTE),
            **_SYNC_NO_BUFFERS,
            find_unused_parameters=bool(delay_allreduce),
        )
        average = _average_hook(
            allreduce_always_fp32, gradient_average, float(gradient_predivide_factor)
        )
        if average is not None:
            self.register_comm_hook(None, average)

    def disable_allreduce(self) -> None:
        """Leave gradients to this rank from the next forward on, as inside torch's `no_sync`."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Average them again."""
        self.require_backward_grad_sync = True


class Reducer:
    """Averages the gradients of a module, or of a list of tensors, over the ranks when told to.

    The values of a module are first made those of rank 0.
    """

    def __init__(self, module_or_grads_list: nn.Module | list[torch.Tensor]) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if isinstance(module_or_grads_list, nn.Module) else module_or_grads_list
        if self.module is not None:
            values = [parameter.data for parameter in self.module.parameters()]
            flat_dist_call(values, dist.broadcast, (0,))

    def reduce(self) -> None:
        """Average. A collective call."""
        present = self.grads
        if self.module is not None:
            present = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(present, dist.all_reduce)


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[torch.Tensor], call: Callable[..., Any], extra_args: Any = None
) -> None:
    """Give `tensors` to a collective `call` as one flat tensor a dtype; `all_reduce` averages."""
    for group in _by_type(tensors):
        flat = flatten(group)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        for tensor, value in zip(group, unflatten(flat, group), strict=True):
            tensor.copy_(value)


def _by_type(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    yield from groups.values()


def _average_hook(
    in_float: bool, divides: bool, predivide: float
) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]] | None:
    """A communication hook for what torch's own average is not; None where it is."""
    if not in_float and divides and predivide == 1.0:
        return None

    def average(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        wide = buffer.float() if in_float else buffer
        rest = dist.get_world_size() / predivide if divides else 1.0
        work = dist.all_reduce(wide / predivide if divides else wide, async_op=True)
        averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(
            functools.partial(_divide_into, buffer, rest)
        )
        return averaged

    # torch compares these with the types themselves, and takes no names of types.
    average.__annotations__.update(
        {"bucket": vars(dist)["GradBucket"], "return": torch.futures.Future[torch.Tensor]}
    )
    return average


def _divide_into(
    buffer: torch.Tensor, divisor: float, future: torch.futures.Future[Any]
) -> torch.Tensor:
    total: Any = future.value()
    total = total[0] if isinstance(total, (list, tuple)) else total
    return buffer.copy_(total / divisor)
