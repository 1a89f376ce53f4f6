"""Make a model half by hand, as apex.fp16_utils does: BatchNorm stays in FP32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_patch.structures import map_tensors


class tofp16(nn.Module):  # noqa: N801 (its name in scripts)
    """Casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return input.half()


class FP16Model(nn.Module):
    """A model in float16 that casts its inputs; BatchNorm stays in FP32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:
        return self.network(*map_tensors(_half, inputs))


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 (its name in scripts)
    """Put every BatchNorm with weights in `module` into FP32. Returns `module`."""
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.affine:
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """`network` in float16 with FP32 BatchNorm, behind a cast of its input.

    >>> model = network_to_half(torch.nn.Linear(4, 2))
    >>> model(torch.ones(1, 4)).dtype
    torch.float16
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Put the floating tensors that `module` holds directly into `dtype`, in place."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put `network` into `dtype`, BatchNorm with weights excepted. Returns `network`.

    >>> convert_network(torch.nn.Linear(4, 2), torch.float16).weight.dtype
    torch.float16
    """
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
