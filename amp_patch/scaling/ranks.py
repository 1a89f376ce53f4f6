"""Agree between the ranks of `torch.distributed` on whether gradients overflowed."""

from __future__ import annotations

import torch
import torch.distributed as dist


def rank() -> int:
    """The rank of this process; 0 where there is only one."""
    return dist.get_rank() if _is_distributed() else 0


def agreed(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Verdicts that are the same on all ranks: 1 where any rank found 1. A collective call.

    Every rank must make it, with as many verdicts, as every rank runs the same loop.
    """
    if not _is_distributed() or dist.get_world_size() < 2:
        return found
    for verdict in found:
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    return found


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
