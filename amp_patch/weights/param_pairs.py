"""What a parameter of a model and its FP32 master know of each other."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import torch

from amp_patch.scaling import gradients


class CastTensor:
    """What is remembered of one tensor of a model that was cast, without holding it."""

    __slots__ = ("__weakref__", "holders", "master", "master_version", "original_dtype", "version")

    def __init__(
        self, master: torch.Tensor | None, original_dtype: torch.dtype, version: int
    ) -> None:
        self.master = master
        self.original_dtype = original_dtype
        self.holders = 1  # how many models hold the tensor
        self.version = version  # of the model's tensor when it last agreed with the master
        self.master_version = 0 if master is None else master._version

    def mark_agreed(self, tensor: torch.Tensor) -> None:
        """Model and master say the same now."""
        self.version = tensor._version
        if self.master is not None:
            self.master_version = self.master._version

    @torch.no_grad()
    def refresh(self, tensor: torch.Tensor) -> None:
        """Take over into the master what was written into `tensor` since they last agreed."""
        if self.master is None or tensor._version == self.version:
            return
        was_written = self.master.to(tensor.dtype) != tensor
        self.master.copy_(torch.where(was_written, tensor.float(), self.master))
        self.mark_agreed(tensor)

    @torch.no_grad()
    def follow(self, tensor: torch.Tensor) -> None:
        """Round into `tensor` what was written into the master, or else refresh that."""
        if self.master is None:
            return
        if self.master._version != self.master_version:
            tensor.copy_(self.master)
            self.mark_agreed(tensor)
        else:
            self.refresh(tensor)


class ParamPair(NamedTuple):
    """A parameter of the model and the one that the optimizer updates; one and the same if
    there is no master.
    """

    model: torch.Tensor
    master: torch.Tensor
    cast: CastTensor | None = None

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates an FP32 copy."""
        return self.master is not self.model


class ParamPairs(tuple[ParamPair, ...]):  # noqa: SLOT001 (what is cached needs a dict)
    """The pairs of an optimizer, and lists of what they hold.

    Kept as long as the optimizer has the same parameters, so that what is done to thousands of
    small tensors in each step needs few loops in Python.
    """

    @classmethod
    def of(cls, pairs: Iterable[ParamPair]) -> ParamPairs:
        """`pairs`, if they are such already; else such pairs."""
        return pairs if isinstance(pairs, ParamPairs) else cls(pairs)

    @cached_property
    def models(self) -> list[torch.Tensor]:
        """The parameters of the model."""
        return [pair.model for pair in self]

    @cached_property
    def masters(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates."""
        return [pair.master for pair in self]

    @cached_property
    def mastered(self) -> ParamPairs:
        """Those that have a master."""
        return ParamPairs(pair for pair in self if pair.has_master)

    def refresh(self) -> None:
        """Take over into the masters what was written into the model since they last agreed."""
        for model, _, cast in self._casts:
            if model._version != cast.version:
                cast.refresh(model)

    def copy_to_model(self) -> None:
        """Round the masters into the model. One grouped call for each device and dtype."""
        with torch.no_grad():
            for targets, sources in self._rounded:
                torch._foreach_copy_(targets, sources)
        for model, master, cast in self._casts:
            cast.version, cast.master_version = model._version, master._version

    @cached_property
    def are_alike(self) -> bool:
        """Whether all have a master, and one device and dtype, as was so at first."""
        return len(self.mastered) == len(self) and len(self._rounded) == 1

    @cached_property
    def _casts(self) -> list[tuple[torch.Tensor, torch.Tensor, CastTensor]]:
        return [(model, master, cast) for model, master, cast in self if cast is not None]

    @cached_property
    def _rounded(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        # By what they were at first: where that is no longer so, torch still copies one by one.
        return list(gradients.by_dtype(self.mastered.models, self.mastered.masters))


NO_PAIRS = ParamPairs()
