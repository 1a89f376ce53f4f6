"""State dicts of a cast model: they hold the FP32 values, and loading one sets them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from amp_patch.hooks import ModelHook
from amp_patch.weights.master_weights import MasterWeights


class _StateHook(ModelHook):
    """A hook for the parameters and buffers that one module holds directly."""

    def __init__(self, module: nn.Module, masters: MasterWeights) -> None:
        self.masters = masters
        self.tensors = [weakref.ref(tensor) for _, tensor in _own_tensors(module)]

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        alive = [
            tensor for tensor in (reference() for reference in self.tensors) if tensor is not None
        ]
        twin = object.__new__(type(self))
        twin.masters = self.masters.copied_for(alive, memo)
        twin.tensors = [weakref.ref(memo[id(tensor)]) for tensor in alive if id(tensor) in memo]
        return twin


class FullPrecisionSave(_StateHook):
    """Puts the FP32 value of every cast tensor into the state dict: its master, exact, if any."""

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name, tensor in _own_tensors(module):
            value = state_dict.get(prefix + name)
            full = None if value is None else self.masters.full_value(tensor)
            if full is not None:
                keeps_variables = value is tensor
                state_dict[prefix + name] = full if keeps_variables else full.detach()


class FullPrecisionLoad(_StateHook):
    """Writes the values of a state dict into the masters, before torch rounds them."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, tensor in _own_tensors(module):
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor):
                self.masters.set_master_(tensor, value)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(
        module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    )
