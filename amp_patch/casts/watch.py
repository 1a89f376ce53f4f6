"""Notice what users do to weights that nothing of torch tells of.

Writing through `weight.data` moves no version counter, and fused optimizers move none either.
Still unseen: an alias taken before and written later (a kept `d = weight.data`, a flat buffer,
numpy). `amp_patch.clear_cache()` is for those.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_patch.casts.patcher import Patcher


class Watcher(Protocol):
    """Who is told."""

    def on_data_taken(self, parameter: torch.Tensor) -> None:
        """`parameter.data` is read, and may be written to."""

    def on_data_set(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`value` is assigned to `parameter.data`. Returns what to assign."""

    def on_swap(self, tensor: torch.Tensor) -> None:
        """`tensor` is about to become another by `torch.utils.swap_tensors`."""

    def on_step(self) -> None:
        """An optimizer of this process has stepped, one of amp's or not."""

    def on_zero_grad(self, module: nn.Module) -> None:
        """The gradients of `module` were cleared through the module."""


def watch_weights(patcher: Patcher, watcher: Watcher) -> None:
    """Tell `watcher`, until `patcher` restores."""
    plain: Any = torch.Tensor.data
    swap: Any = torch.utils.swap_tensors
    zero_grad = nn.Module.zero_grad

    def read(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            watcher.on_data_taken(tensor)
        return plain.__get__(tensor)

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            value = watcher.on_data_set(tensor, value)
        plain.__set__(tensor, value)

    @functools.wraps(swap)
    def tell_and_swap(first: torch.Tensor, second: torch.Tensor) -> None:
        watcher.on_swap(first)
        watcher.on_swap(second)
        swap(first, second)

    def stepped(*_: Any) -> None:
        watcher.on_step()

    @functools.wraps(zero_grad)
    def zero_grad_and_tell(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        zero_grad(module, *args, **kwargs)
        watcher.on_zero_grad(module)

    patcher.replace(torch.Tensor, "data", property(read, write, doc=plain.__doc__))
    patcher.replace(torch.utils, "swap_tensors", tell_and_swap)
    patcher.replace(nn.Module, "zero_grad", zero_grad_and_tell)
    patcher.on_restore(register_optimizer_step_post_hook(stepped).remove)
