"""State dicts of a cast model hold the FP32 values, and loading one sets them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from amp_patch.errors import AmpError
from amp_patch.hooks import ModelHook
from amp_patch.weights.master_weights import MasterWeights


class _MasterHook(ModelHook):
    """A hook that has to do with the masters of `tensors`. A copy has copies of those masters."""

    def __init__(self, tensors: Iterable[torch.Tensor], masters: MasterWeights) -> None:
        self.masters = masters
        self.tensors = [weakref.ref(tensor) for tensor in tensors]

    @classmethod
    def of(cls, module: nn.Module, masters: MasterWeights) -> Self:
        """The hook for the parameters and buffers that `module` holds directly."""
        return cls((tensor for _, tensor in held_tensors(module)), masters)

    def alive(self) -> list[torch.Tensor]:
        """Those of the tensors that still exist."""
        return [one for one in (reference() for reference in self.tensors) if one is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        alive = self.alive()
        masters = self.masters.copied_for(alive, memo)
        return type(self)([memo[id(one)] for one in alive if id(one) in memo], masters)


class FullPrecisionSave(_MasterHook):
    """Puts the FP32 value of every cast tensor into the state dict: its master, exact, if any."""

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name, tensor in held_tensors(module):
            value = state_dict.get(prefix + name)
            full = None if value is None else self.masters.full_value(tensor)
            if full is None or tensor.dtype is full.dtype:  # in `full_precision`: it is the value
                continue
            keeps_variables = value is tensor
            state_dict[prefix + name] = full if keeps_variables else full.detach()


class FullPrecisionLoad(_MasterHook):
    """Writes the values of a state dict into the masters, before torch rounds them."""

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise AmpError(
                "load_state_dict: assign=True would put FP32 tensors in place of the half weights "
                "of a cast model; leave assign out, or load before initialize"
            )
        for name, tensor in held_tensors(module):
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor):
                self.masters.set_master_(tensor, value)


class FollowMasters(_MasterHook):
    """A forward pre-hook: what was written into a master since the last step reaches the model.

    Optimizers that move weights outside `step`, and averages kept by writing into the tensors of a
    state dict, write into masters.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], masters: MasterWeights) -> None:
        super().__init__(tensors, masters)
        self.follow = masters.follower(self.alive())

    @classmethod
    def of_all(cls, masters: MasterWeights, module: nn.Module) -> Self:
        """The hook for all parameters and buffers in `module`."""
        return cls(itertools.chain(module.parameters(), module.buffers()), masters)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.follow()


def held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that `module` holds directly, by name."""
    return itertools.chain(
        module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    )
