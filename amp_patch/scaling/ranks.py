"""Agree between the ranks of `torch.distributed`: on overflows, on masters, on who has averaged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

_NOTHING_TESTED = -1.0  # below every verdict of the finite test, so that the maximum is one


def rank() -> int:
    """The rank of this process; 0 where there is only one."""
    return dist.get_rank() if _is_distributed() else 0


def agreed(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Verdicts that are the same on all ranks: the largest that any rank has in each group.

    A group without a verdict, as of an optimizer that got no gradients here, gets a negative one.
    A collective call, one for all groups: every rank must make it, with as many groups, as every
    rank runs the same loop. Does not wait for the device.
    """
    if not groups or not _is_distributed() or dist.get_world_size() < 2:
        return [list(group) for group in groups]
    device = _device([verdict for group in groups for verdict in group])
    largest = torch.stack([_largest(group, device) for group in groups])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [[verdict] for verdict in largest.unbind()]


@torch.no_grad()
def broadcast_(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Give `tensors` on all ranks of `group` the values of its first rank. A collective call."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        dist.broadcast(tensor.detach(), source, group)


class Wrapper(Protocol):
    """What amp reads of a `DistributedDataParallel`."""

    gradient_as_bucket_view: bool
    require_backward_grad_sync: bool
    require_forward_param_sync: bool


class ParallelWrappers:
    """Every `DistributedDataParallel` and `DataParallel` made after `watch`. Holds them weakly.

    torch tells of a wrapper when it takes its module, which is before it compares the ranks.
    `on_distribute` is told of the module and the group of ranks; `hook_for` makes the hook that
    runs before a module is copied to the devices.
    """

    def __init__(
        self,
        on_distribute: Callable[[nn.Module, Any], None],
        hook_for: Callable[[nn.Module], Callable[[nn.Module, Any], None]],
    ) -> None:
        self._on_distribute = on_distribute
        self._hook_for = hook_for
        self._known: list[weakref.ref[DistributedDataParallel]] = []
        self._handles: list[Any] = []

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Take note of wrappers from now on, and of those that are parts of `models` already."""
        if not self._handles:
            self._handles.append(register_module_module_registration_hook(self._note))
        parts = (part for model in models for part in model.modules())
        self._known += [
            weakref.ref(one) for one in parts if isinstance(one, DistributedDataParallel)
        ]

    def forget(self) -> None:
        """Take note no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._known = []

    def of(self, parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
        """The wrappers that average one of `parameters`."""
        alive = [wrapper for wrapper in (one() for one in self._known) if wrapper is not None]
        if not alive:
            return []
        ids = set(map(id, parameters))
        return [one for one in alive if any(id(own) in ids for own in one.parameters())]

    def _note(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        if name != "module":
            return
        if isinstance(parent, DataParallel):
            self._handles.append(parent.register_forward_pre_hook(self._hook_for(module)))
        elif isinstance(parent, DistributedDataParallel):
            self._known = [one for one in self._known if one() is not None]
            self._known.append(weakref.ref(parent))
            if dist.get_world_size(parent.process_group) > 1:
                self._on_distribute(module, parent.process_group)


def _largest(group: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not group:
        return torch.tensor(_NOTHING_TESTED, device=device)
    return torch.stack([verdict.to(device) for verdict in group]).amax()


def _device(verdicts: Sequence[torch.Tensor]) -> torch.device:
    """A device on which the ranks can talk: that of a verdict, if it is one."""
    talking = [one.partition(":")[0] for one in dist.get_backend_config().split(",")]
    for verdict in verdicts:
        if verdict.device.type in talking:
            return verdict.device
    return torch.device("cpu" if "cpu" in talking else talking[0])


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
