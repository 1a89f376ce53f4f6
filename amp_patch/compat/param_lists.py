"""Master parameters kept by hand, as apex.fp16_utils does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from amp_patch.compat.flat_tensors import flatten, unflatten
from amp_patch.errors import AmpError

Tensors = Sequence[torch.Tensor]

clip_grad_norm = nn.utils.clip_grad_norm_


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The trained parameters of `model`, and FP32 copies of them: one flat one if `flat_master`.

    >>> model = torch.nn.Linear(4, 2).half()
    >>> ours, masters = prep_param_lists(model)
    >>> [master.dtype for master in masters]
    [torch.float32, torch.float32]
    """
    parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    if flat_master and len({p.dtype for p in parameters}) > 1:
        raise AmpError(
            "prep_param_lists: flat_master=True expects parameters of one dtype, found several; "
            "leave flat_master out"
        )
    return parameters, prep_master(parameters, flat_master)


def prep_master(parameters: Tensors, flat_master: bool) -> list[torch.Tensor]:
    """FP32 copies of `parameters`, or one flat one."""
    if not flat_master:
        return [nn.Parameter(p.detach().clone().float()) for p in parameters]
    if not parameters:
        return []
    return [nn.Parameter(flatten([p.detach() for p in parameters]).float())]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Tensors, master_params: Tensors, flat_master: bool = False
) -> None:
    """Copy the gradients of a model to its masters, in FP32."""
    if flat_master:
        flat = flatten([_gradient(p) for p in model_params])
        master_params[0].grad = flat.to(master_params[0].dtype)
        return
    for parameter, master in zip(model_params, master_params, strict=True):
        master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Tensors, master_params: Tensors, flat_master: bool = False
) -> None:
    """Round the masters into the model."""
    values = master_params
    if flat_master:
        values = unflatten(master_params[0].detach(), model_params)
    for parameter, value in zip(model_params, values, strict=True):
        parameter.copy_(value)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
