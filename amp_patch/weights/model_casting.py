"""Cast a model: its weights and buffers, what goes into its forward and what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.errors import warn
from amp_patch.hooks import ModelHook
from amp_patch.policy import CASTABLE, HALF_DTYPES, Policy
from amp_patch.structures import map_tensors
from amp_patch.weights.checkpoints import (
    FollowMasters,
    FullPrecisionLoad,
    FullPrecisionSave,
    held_tensors,
)
from amp_patch.weights.exclusions import Exclusions
from amp_patch.weights.master_weights import MasterWeights


class OwnedTensor(NamedTuple):
    """A parameter or buffer of a model, with its path and the module that holds it."""

    path: str
    tensor: torch.Tensor
    module: nn.Module

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter."""
        return isinstance(self.tensor, nn.Parameter)


class CastSwitch:
    """Whether the hooks of a model cast: not while its FP32 weights are put into it."""

    def __init__(self) -> None:
        self.is_on = True


class CastInputs(ModelHook):
    """A forward pre-hook that casts the floating tensors among the arguments."""

    def __init__(
        self, dtype: torch.dtype, switch: CastSwitch, kept: Container[int | str] = frozenset()
    ) -> None:
        self.dtype = dtype
        self.switch = switch
        self.kept = kept  # positions and names of arguments that are left alone

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self.switch.is_on:
            return None
        if not self.kept:
            return map_tensors(self.cast, args), map_tensors(self.cast, kwargs)
        return (
            tuple(self._cast_unless_kept(i, value) for i, value in enumerate(args)),
            {name: self._cast_unless_kept(name, value) for name, value in kwargs.items()},
        )

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in half, if it takes part in casts."""
        return tensor.to(self.dtype) if tensor.dtype in CASTABLE else tensor

    def _cast_unless_kept(self, name: int | str, value: Any) -> Any:
        return value if name in self.kept else map_tensors(self.cast, value)


class CastOutputs(ModelHook):
    """A forward hook that casts the floating tensors in the result.

    With a `context`, only where the forward is that of an outermost model: inside another one the
    result goes on in half.
    """

    def __init__(
        self, dtype: torch.dtype, switch: CastSwitch, context: CastContext | None = None
    ) -> None:
        self.dtype = dtype
        self.switch = switch
        self.context = context

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        if not self.switch.is_on:
            return result
        if self.context is not None and self.context.is_inside_another(module):
            return result
        return map_tensors(self.cast, result)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in the output's dtype, if it takes part in casts."""
        return tensor.to(self.dtype) if tensor.dtype in CASTABLE else tensor


def cast_weights(
    model: nn.Module,
    dtype: torch.dtype,
    policy: Policy,
    exclusions: Exclusions,
    masters: MasterWeights,
    optimized: Container[int],
    patcher: Patcher,
    known: Container[nn.Module] = (),
) -> list[torch.Tensor]:
    """Cast the weights and buffers of `model` to `dtype` in place, and hook its state dict.

    If some of its modules are `known` from an earlier call, only what has come since.

    BatchNorm keeps FP32 weights and statistics if the policy says so. Parameters whose id is in
    `optimized`, and buffers, keep their FP32 value in `masters` if the policy has master weights.
    The undo of each step goes to `patcher` before the step is made. Returns what was cast.
    """
    chosen = [
        owned
        for owned in owned_tensors(model)
        if owned.tensor.dtype in CASTABLE
        and not (policy.keep_batchnorm_fp32 and _keeps_statistics(owned.module))
        and not exclusions.excludes(owned.path)
    ]
    fresh = [one for one in chosen if not masters.has_cast(one.tensor)]
    chosen = fresh if known else chosen
    _warn_of_losses(model, fresh, dtype)
    if policy.master_weights and any(
        id(one.tensor) in optimized and masters.is_rounded(one.tensor) for one in fresh
    ):
        warn(
            f"{type(model).__name__} was cast by an earlier initialize that gave its weights no "
            "master: they are rounded, and masters start from the rounded values; pass model and "
            "optimizer to initialize together"
        )
    patcher.on_restore(masters.undo_of(owned.tensor for owned in chosen))
    for owned in chosen:
        has_master = not owned.is_parameter or id(owned.tensor) in optimized
        masters.cast_(owned.tensor, dtype, keep_master=policy.master_weights and has_master)
    cast = {id(owned.tensor) for owned in chosen}
    for module in model.modules():  # also the second holder of a shared tensor
        if module not in known and any(id(tensor) in cast for _, tensor in held_tensors(module)):
            _hook_state_dict(module, masters, patcher)
    return [owned.tensor for owned in chosen]


def cast_entry_and_exit(
    model: nn.Module,
    dtype: torch.dtype,
    exclusions: Exclusions,
    kept_inputs: Container[str],
    switch: CastSwitch,
    patcher: Patcher,
) -> None:
    """Cast the inputs of `model` to `dtype`, and those of excluded modules to FP32 and back.

    A model that is excluded as a whole gets its inputs in FP32, never rounded.
    """
    kept = _positions_and_names(model, kept_inputs)
    entry = torch.float32 if exclusions.excludes("") else dtype
    _hook_inputs(model, CastInputs(entry, switch, kept), patcher)
    excluded = [model.get_submodule(path) for path in exclusions.modules - {""}]
    keep_in_float(excluded, dtype, switch, patcher)


def keep_in_float(
    modules: Iterable[nn.Module], dtype: torch.dtype, switch: CastSwitch, patcher: Patcher
) -> None:
    """Cast the inputs of excluded `modules` to FP32, and what they return to `dtype`."""
    for module in modules:
        _hook_inputs(module, CastInputs(torch.float32, switch), patcher)
        cast_outputs(module, dtype, switch, patcher)


def cast_outputs(
    model: nn.Module,
    dtype: torch.dtype,
    switch: CastSwitch,
    patcher: Patcher,
    context: CastContext | None = None,
) -> None:
    """Cast what the forward of `model` returns to `dtype`."""
    outputs = model.register_forward_hook(CastOutputs(dtype, switch, context))
    patcher.on_restore(outputs.remove)


def follow_masters(
    model: nn.Module, tensors: list[torch.Tensor], masters: MasterWeights, patcher: Patcher
) -> None:
    """Let every forward of `model` see what was written into its masters."""
    hook = model.register_forward_pre_hook(FollowMasters(tensors, masters), prepend=True)
    patcher.on_restore(hook.remove)


def owned_tensors(model: nn.Module) -> Iterator[OwnedTensor]:
    """Every parameter and buffer of `model`, once each."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in held_tensors(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield OwnedTensor(f"{prefix}.{name}" if prefix else name, tensor, module)


def _keeps_statistics(module: nn.Module) -> bool:
    """BatchNorm, affine or not, and InstanceNorm if it tracks statistics."""
    return isinstance(module, _BatchNorm) or (
        isinstance(module, _NormBase) and module.track_running_stats
    )


def _hook_inputs(module: nn.Module, hook: CastInputs, patcher: Patcher) -> None:
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    patcher.on_restore(handle.remove)


def _hook_state_dict(module: Any, masters: MasterWeights, patcher: Patcher) -> None:
    save = module.register_state_dict_post_hook(FullPrecisionSave.of(module, masters))
    patcher.on_restore(save.remove)
    load = module.register_load_state_dict_pre_hook(FullPrecisionLoad.of(module, masters))
    patcher.on_restore(load.remove)


def _positions_and_names(model: nn.Module, names: Container[str]) -> frozenset[int | str]:
    found: set[int | str] = set()
    for position, name in enumerate(forward_arguments(model)):
        if name in names:
            found.update((position, name))
    return frozenset(found)


def forward_arguments(model: nn.Module) -> list[str]:
    """The names of the arguments of the forward of `model`, in order."""
    return list(inspect.signature(model.forward).parameters)


def _warn_of_losses(model: nn.Module, chosen: list[OwnedTensor], dtype: torch.dtype) -> None:
    name = type(model).__name__
    if any(owned.is_parameter and owned.tensor.dtype in HALF_DTYPES for owned in chosen):
        warn(
            f"{name} has half weights already: its master weights and checkpoints start from "
            "rounded values; pass the FP32 model to initialize"
        )
    largest = torch.finfo(dtype).max
    lost = [
        owned.path
        for owned in chosen
        if not owned.is_parameter
        and not owned.tensor.is_meta  # which has no values yet
        and bool(((owned.tensor.abs() > largest) & owned.tensor.isfinite()).any())
    ]
    if lost:
        warn(
            f"{name}: the buffers {', '.join(lost)} hold values above {largest:g} and become inf "
            f"in {dtype}; keep them in FP32 by keep_fp32={lost!r}"
        )
