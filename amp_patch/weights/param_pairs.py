"""What a parameter of a model and its FP32 master know of each other."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
