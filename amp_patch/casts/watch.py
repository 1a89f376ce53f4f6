"""Notice writes to weights that no counter of torch shows.

Writing through `weight.data` moves no version counter, and fused optimizers move none either.
Still unseen: an alias taken before and written later (a kept `d = weight.data`, a flat buffer,
numpy). `amp_patch.clear_cache()` is for those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_patch.casts.patcher import Patcher


def watch_weights(
    patcher: Patcher, on_data: Callable[[torch.Tensor], object], on_step: Callable[[], object]
) -> None:
    """Call `on_data` with a parameter whose `.data` is taken or set, `on_step` after any step."""
    plain: Any = torch.Tensor.data

    def read(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter):
            on_data(tensor)
        return plain.__get__(tensor)

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(tensor, torch.nn.Parameter):
            on_data(tensor)
        plain.__set__(tensor, value)

    def stepped(*_: Any) -> None:
        on_step()

    patcher.replace(torch.Tensor, "data", property(read, write, doc=plain.__doc__))
    patcher.on_restore(register_optimizer_step_post_hook(stepped).remove)
