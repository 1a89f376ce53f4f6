"""The sizes of a matrix product, from the arguments of the operation that computes it."""

from __future__ import annotations

import math
from typing import Any

import torch

_PRODUCTS = frozenset({"matmul", "mm", "bmm", "mv", "__matmul__"})
_ADDED_PRODUCTS = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})


def matrix_sizes(operation: str, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """(m, k, n) of `m x k` times `k x n`; None for what is no plain product of matrices.

    For convolutions (input channels, output channels) of one group, for recurrent layers (input
    size, hidden size): what the matrix units see in them.
    """
    name = operation.rpartition(".")[2]
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if name == "linear" and len(tensors) > 1:
        left, right = tensors[0], tensors[1]
        return _rows(left), left.shape[-1], right.shape[0] if right.dim() > 1 else 1
    if name in _ADDED_PRODUCTS and len(tensors) > 2:
        tensors = tensors[1:]
    elif name not in _PRODUCTS:
        return _other_sizes(name, tensors, values)
    if len(tensors) < 2 or tensors[0].dim() < 1:
        return None
    left, right = tensors[:2]
    m = left.shape[-2] if left.dim() > 1 else 1
    return m, left.shape[-1], right.shape[-1] if right.dim() > 1 else 1


def _rows(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _other_sizes(
    name: str, tensors: list[torch.Tensor], values: list[Any]
) -> tuple[int, ...] | None:
    if name.startswith("conv") and len(tensors) > 1 and tensors[1].dim() > 2:
        return tuple(tensors[1].shape[:2][::-1])
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        weights = [one for value in values if isinstance(value, (list, tuple)) for one in value]
        matrices = [one for one in weights if isinstance(one, torch.Tensor) and one.dim() == 2]
        if matrices:
            return tuple(dict.fromkeys(one.shape[-1] for one in matrices))
    return None
