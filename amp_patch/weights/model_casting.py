"""Cast a model: its weights and buffers, what goes into its forward and what comes out."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from amp_patch.casts.patcher import Patcher
from amp_patch.errors import AmpError, warn
from amp_patch.hooks import ModelHook
from amp_patch.policy import CASTABLE, HALF_DTYPES, Policy
from amp_patch.structures import map_tensors
from amp_patch.weights.checkpoints import FullPrecisionLoad, FullPrecisionSave
from amp_patch.weights.master_weights import MasterWeights


class _Owned(NamedTuple):
    path: str
    tensor: torch.Tensor
    module: nn.Module

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)


class CastInputs(ModelHook):
    """A forward pre-hook that casts the floating tensors among the arguments."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(self.cast, args), map_tensors(self.cast, kwargs)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.dtype in CASTABLE else tensor


class CastOutputs(ModelHook):
    """A forward hook that casts the floating tensors in the result."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        return map_tensors(self.cast, result)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.dtype in CASTABLE else tensor


def check_castable(model: nn.Module, policy: Policy, masters: MasterWeights) -> None:
    """Raise AmpError where `model`, restored by `masters`, cannot run under `policy`."""
    for path, tensor, _ in _owned(model):
        if is_lazy(tensor):
            raise AmpError(
                f"models: expected materialised parameters, found the lazy {path!r} in "
                f"{type(model).__name__}; run one forward pass before initialize"
            )
        dtype = masters.original_dtype(tensor)
        if policy.patch_torch_functions and not policy.casts_model and dtype in HALF_DTYPES:
            raise AmpError(
                f"models: {policy.opt_level} expects FP32 weights, found {path!r} in {dtype}; "
                "call model.float() before initialize, or use 'O2' or 'O3'"
            )
    if policy.casts_model and isinstance(model, torch.jit.ScriptModule):
        raise AmpError(
            f"models: {policy.opt_level} expects a module that takes hooks, found the scripted "
            f"{type(model).__name__}; initialize before torch.jit.script, or use 'O1' or 'O4'"
        )


def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    policy: Policy,
    masters: MasterWeights,
    optimized: Container[int],
    patcher: Patcher,
) -> None:
    """Cast the weights and buffers of `model` to `dtype` in place; hook its inputs and state dict.

    BatchNorm keeps FP32 weights and statistics if the policy says so. Parameters whose id is in
    `optimized`, and buffers, keep their FP32 value in `masters` if the policy has master weights.
    The undo of each step goes to `patcher` before the step is made.
    """
    chosen = [
        owned
        for owned in _owned(model)
        if owned.tensor.dtype in CASTABLE
        and not (policy.keep_batchnorm_fp32 and isinstance(owned.module, _BatchNorm))
    ]
    if any(owned.is_parameter and owned.tensor.dtype in HALF_DTYPES for owned in chosen):
        warn(
            f"{type(model).__name__} has half weights already: its master weights and checkpoints "
            "start from rounded values; pass the FP32 model to initialize"
        )
    patcher.on_restore(masters.undo_of(owned.tensor for owned in chosen))
    for owned in chosen:
        has_master = not owned.is_parameter or id(owned.tensor) in optimized
        masters.cast_(owned.tensor, dtype, keep_master=policy.master_weights and has_master)
    for module in {id(owned.module): owned.module for owned in chosen}.values():
        _hook_state_dict(module, masters, patcher)
    inputs = model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
    patcher.on_restore(inputs.remove)


def cast_outputs(model: nn.Module, dtype: torch.dtype, patcher: Patcher) -> None:
    """Cast what the forward of `model` returns to `dtype`."""
    outputs = model.register_forward_hook(CastOutputs(dtype))
    patcher.on_restore(outputs.remove)


def _hook_state_dict(module: Any, masters: MasterWeights, patcher: Patcher) -> None:
    save = module.register_state_dict_post_hook(FullPrecisionSave(module, masters))
    patcher.on_restore(save.remove)
    load = module.register_load_state_dict_pre_hook(FullPrecisionLoad(module, masters))
    patcher.on_restore(load.remove)


def _owned(model: nn.Module) -> Iterator[_Owned]:
    """Every parameter and buffer of `model`, once each, with the module that holds it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield _Owned(f"{prefix}.{name}" if prefix else name, tensor, module)
