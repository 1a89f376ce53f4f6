"""Refuse models that cannot be brought under a policy, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amp_patch.errors import AmpError
from amp_patch.policy import HALF_DTYPES, Policy
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.model_casting import forward_arguments, owned_tensors

# By name: importing some of these takes a second, and there may be none of them in this torch.
_WRAPPERS = {
    "DataParallel": "wrap what initialize returns",
    "DistributedDataParallel": "wrap what initialize returns",
    "FullyShardedDataParallel": "use fully_shard before initialize, at 'O1' or 'O4'",
    "OptimizedModule": "call torch.compile on what initialize returns",
}


def check_model(model: nn.Module, policy: Policy, masters: MasterWeights) -> None:
    """Raise AmpError where `model`, restored by `masters`, cannot run under `policy`."""
    if not (policy.casts_model or policy.patch_torch_functions):
        return
    _refuse_wrapper(model)
    for part in model.modules() if policy.casts_model else ():
        if not isinstance(part, nn.DataParallel):
            _refuse_wrapper(part)
    scripted = [one for one in model.modules() if isinstance(one, torch.jit.ScriptModule)]
    if policy.casts_model and scripted:
        raise AmpError(
            f"models: {policy.opt_level} expects modules that take hooks, found the scripted "
            f"{type(scripted[0]).__name__}; initialize before torch.jit.script, or use 'O1' or 'O4'"
        )
    for path, tensor, _ in owned_tensors(model):
        _check_tensor(model, path, tensor, policy, masters)


def _check_tensor(
    model: nn.Module, path: str, tensor: torch.Tensor, policy: Policy, masters: MasterWeights
) -> None:
    name = type(model).__name__
    if is_lazy(tensor):
        raise AmpError(
            f"models: expected materialised parameters, found the lazy {path!r} in {name}; run one "
            "forward pass before initialize"
        )
    dtype = masters.original_dtype(tensor)
    if not policy.casts_model and dtype in HALF_DTYPES:
        raise AmpError(
            f"models: {policy.opt_level} expects FP32 weights, found {path!r} in {dtype}; call "
            "model.float() before initialize, or use 'O2' or 'O3'"
        )
    if policy.casts_model and any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise AmpError(
            f"models: {policy.opt_level} casts whole weights, found the sharded {path!r} in {name}"
            "; use 'O1' or 'O4', or the MixedPrecisionPolicy of fully_shard"
        )


def _refuse_wrapper(model: nn.Module) -> None:
    for base in type(model).__mro__:
        if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
            raise AmpError(
                f"models: expected the plain model, found it wrapped in {base.__name__}; "
                f"{_WRAPPERS[base.__name__]}"
            )


def check_parameters(models: Sequence[nn.Module], parameters: Iterable[torch.Tensor]) -> None:
    """Raise AmpError where an optimizer holds a flat buffer in place of the model's parameters."""
    own = {id(parameter) for model in models for parameter in model.parameters()}
    others = [parameter for parameter in parameters if id(parameter) not in own]
    storages = {_storage(parameter): tuple(parameter.shape) for parameter in others}
    storages.pop(0, None)
    for model in models:
        for path, parameter in model.named_parameters() if storages else ():
            if _storage(parameter) in storages:
                raise AmpError(
                    f"optimizers: expected the parameters of the model, found one of shape "
                    f"{storages[_storage(parameter)]} that shares its memory with {path!r} (a flat "
                    "buffer of views?); pass model.parameters() to the optimizer"
                )


def _storage(tensor: torch.Tensor) -> int:
    """Where the elements lie; 0 where that says nothing."""
    if type(tensor) is not nn.Parameter or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def check_input_names(models: Sequence[nn.Module], names: frozenset[str]) -> None:
    """Raise AmpError for a name in `keep_inputs` that no forward takes."""
    known = {name for model in models for name in forward_arguments(model)} if names else set()
    unknown = sorted(names - known)
    if unknown and models:
        raise AmpError(
            f"keep_inputs: expected names of arguments of forward ({', '.join(sorted(known))}), "
            f"found {unknown[0]!r}"
        )
