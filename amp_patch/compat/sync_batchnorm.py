"""BatchNorm over the batches of all ranks, on any device, with the keywords of apex."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from amp_patch.errors import AmpError


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group, with a gradient. Collective both ways."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum_over_ranks(own: torch.Tensor, group: Any) -> torch.Tensor:
    total: torch.Tensor = _SumOverRanks.apply(own, group)  # type: ignore[no-untyped-call]
    return total


class SyncBatchNorm(_BatchNorm):
    """What `torch.nn.SyncBatchNorm` computes, on a CPU too, and with the last options of apex.

    No subclass of that, which DistributedDataParallel refuses on a CPU. With `channel_last` the
    channels are the last dimension of the input. With `fuse_relu` a ReLU follows; `z` is added
    before it. Statistics are taken in FP32 (float64 stays).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002
        z: torch.Tensor | None = None,
    ) -> torch.Tensor:
        source = input.movedim(-1, 1) if self.channel_last else input
        result = self._normalized(source)
        if self.channel_last:
            result = result.movedim(1, -1)
        if z is not None:
            result = result + z
        return F.relu(result) if self.fuse_relu else result

    def _check_non_zero_input_channels(self, input: torch.Tensor) -> None:  # noqa: A002
        if not input.size(1):
            raise AmpError("SyncBatchNorm: expected one channel or more, found none")

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise AmpError(f"SyncBatchNorm: expected 2 dimensions or more, found {input.dim()}")

    def _normalized(self, source: torch.Tensor) -> torch.Tensor:
        is_distributed = dist.is_available() and dist.is_initialized()
        if not self.training or not is_distributed or source.device.type != "cpu":
            return nn.SyncBatchNorm.forward(cast("Any", self), source)
        self._check_input_dim(source)
        mean, variance, count = self._statistics(source)
        self._track(mean, variance, count)
        shape = [1, -1] + [1] * (source.dim() - 2)
        wide = source.to(mean.dtype)
        result = (wide - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(source.dtype)

    def _statistics(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Mean, biased variance and number of values a channel, over all ranks."""
        wide = source if source.dtype is torch.float64 else source.float()
        group = self.process_group or dist.group.WORLD
        dims = [dim for dim in range(source.dim()) if dim != 1]
        own = torch.full((1,), source.numel() // source.size(1), dtype=wide.dtype)
        sums = _sum_over_ranks(torch.cat([own, wide.sum(dims)]), group)
        count = sums[0].detach()
        mean = sums[1:] / count
        centred = wide - mean.view([1, -1] + [1] * (source.dim() - 2))
        variance = _sum_over_ranks(centred.square().sum(dims), group) / count
        return mean, variance, int(count.item())

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        if not self.track_running_stats:
            return
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked.add_(1)
        weight = self.momentum
        if weight is None:
            weight = 1.0 / float(self.num_batches_tracked.item())
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """`module` with every BatchNorm in it replaced by a `SyncBatchNorm` of the same state.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    >>> type(convert_syncbn_model(model)[1]).__name__
    'SyncBatchNorm'
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm):
        return _converted(module, process_group, channel_last=channel_last)
    for name, child in module.named_children():
        setattr(module, name, convert_syncbn_model(child, process_group, channel_last))
    return module


def create_syncbn_process_group(group_size: int) -> Any:
    """The group of `group_size` neighbouring ranks that this rank is in; None for all of them."""
    world = dist.get_world_size()
    if group_size in (0, world):
        return None
    if group_size < 0 or world % group_size:
        raise AmpError(
            f"create_syncbn_process_group: expected a size that divides the {world} ranks, found "
            f"{group_size!r}"
        )
    own = None
    for first in range(0, world, group_size):  # every rank makes every group
        ranks = range(first, first + group_size)
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    return own


def _converted(module: Any, process_group: Any, *, channel_last: bool) -> SyncBatchNorm:
    converted = SyncBatchNorm(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        process_group,
        channel_last,
    )
    converted.train(module.training)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(converted, name, getattr(module, name))  # the same tensors: optimizers hold them
    return converted
