"""Notice writes to weights that no counter of torch shows, so that no stale cast is used.

Writing through `weight.data` moves no version counter, and fused optimizers move none either.
Still unseen: an alias taken before and written later (a kept `d = weight.data`, a flat buffer,
numpy). `amp_patch.clear_cache()` is for those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_patch.casts.cache import CastCache
from amp_patch.casts.patcher import Patcher


def watch_weights(patcher: Patcher, cache: CastCache) -> None:
    """Drop casts when `.data` of their weight is taken or set, and when an optimizer stepped."""
    plain: Any = torch.Tensor.data

    def read(tensor: torch.Tensor) -> Any:
        cache.discard(tensor)
        return plain.__get__(tensor)

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        cache.discard(tensor)
        plain.__set__(tensor, value)

    def clear(*_: Any) -> None:
        cache.clear()

    patcher.replace(torch.Tensor, "data", property(read, write, doc=plain.__doc__))
    patcher.on_restore(register_optimizer_step_post_hook(clear).remove)
