"""Bind one model: its casts, its scope, and the undo of both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.scopes import scope_model
from amp_patch.policy import Policy
from amp_patch.weights.exclusions import Exclusions
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.model_casting import (
    CastSwitch,
    cast_entry_and_exit,
    cast_outputs,
    cast_weights,
    follow_masters,
    keep_in_float,
)
from amp_patch.weights.running_statistics import RunningStatistics


class ModelBinding:
    """What was done to one model. Holds nothing of the model itself."""

    def __init__(
        self, policy: Policy, group: Any, exclusions: Exclusions, kept_inputs: frozenset[str]
    ) -> None:
        self.policy = policy
        self.group = group
        self.exclusions = exclusions
        self.kept_inputs = kept_inputs
        self.statistics = RunningStatistics()
        self._may_skip = False
        self._switch = CastSwitch()
        self._patcher = Patcher()
        self._scope = Patcher()
        self._take_out: Callable[[], None] | None = None  # while the FP32 values are in the model
        self._cast: list[weakref.ref[torch.Tensor]] = []
        self._known: Any = WeakIdKeyDictionary(ref_type=weakref.ref)  # modules; as a set

    def bind(
        self,
        model: nn.Module,
        masters: MasterWeights,
        optimized: Container[int],
        context: CastContext,
        *,
        may_skip: bool,
    ) -> None:
        """Cast and hook `model` as the policy says.

        `may_skip` says whether a step can be skipped, so that running statistics need guarding.
        """
        dtype = self.policy.cast_model_type
        self._known.update(dict.fromkeys(model.modules(), True))
        if dtype is not None:
            tensors = cast_weights(
                model, dtype, self.policy, self.exclusions, masters, optimized, self._patcher
            )
            self._cast = [weakref.ref(tensor) for tensor in tensors]
            cast_entry_and_exit(
                model, dtype, self.exclusions, self.kept_inputs, self._switch, self._patcher
            )
            if self.policy.master_weights:
                follow_masters(model, tensors, masters, self._patcher)
        if self.policy.cast_model_outputs is not None:
            cast_outputs(
                model, self.policy.cast_model_outputs, self._switch, self._patcher, context
            )
        self._may_skip = may_skip
        if may_skip:
            self.statistics.guard(model, model.modules(), self._patcher)

    def extend(self, model: nn.Module, masters: MasterWeights) -> None:
        """Do to layers and parameters that have come into `model` since what `bind` did."""
        dtype = self.policy.cast_model_type
        fresh = [module for module in model.modules() if module not in self._known]
        if dtype is not None:
            trained = {id(one) for one in model.parameters() if one.requires_grad}
            tensors = cast_weights(
                model,
                dtype,
                self.policy,
                self.exclusions,
                masters,
                trained,
                self._patcher,
                self._known,
            )
            self._cast += [weakref.ref(tensor) for tensor in tensors]
            paths = {id(module): path for path, module in model.named_modules()}
            excluded = [one for one in fresh if paths[id(one)] in self.exclusions.modules]
            keep_in_float(excluded, dtype, self._switch, self._patcher)
            if self.policy.master_weights and tensors:
                follow_masters(model, tensors, masters, self._patcher)
        if self._may_skip:
            self.statistics.guard(model, fresh, self._patcher)
        self._known.update(dict.fromkeys(fresh, True))

    def renewed(self) -> ModelBinding:
        """A binding that says the same and is not bound yet."""
        return ModelBinding(self.policy, self.group, self.exclusions, self.kept_inputs)

    def scope(self, model: nn.Module, context: CastContext, *, are_casts_installed: bool) -> None:
        """Make the forward of `model` a scope, where there are casts or the model is cast."""
        self._scope.restore()
        if are_casts_installed or self.policy.casts_model:
            half_dtype = self.policy.half_dtype if self.policy.patch_torch_functions else None
            is_cast = self.policy.casts_model or half_dtype is not None
            scope_model(model, context, half_dtype, self._scope, is_cast=is_cast)

    def release(self) -> None:
        """Give the model back as it was."""
        self._end_full_precision()
        self._scope.restore()
        self._patcher.restore()

    @contextmanager
    def full_precision(self, masters: MasterWeights, context: CastContext) -> Iterator[None]:
        """Inside, the model holds its FP32 values and casts nothing."""
        tensors = [one for one in (reference() for reference in self._cast) if one is not None]
        is_outermost = self._take_out is None
        if is_outermost:
            self._switch.is_on = False
            self._take_out = masters.widen_(tensors)
        try:
            with context.suspended():
                yield
        finally:
            if is_outermost:
                self._end_full_precision()
            context.cache.clear()

    def _end_full_precision(self) -> None:
        take_out, self._take_out = self._take_out, None
        if take_out is not None:
            take_out()
            self._switch.is_on = True


def holds_any(model: nn.Module, ids: Container[int]) -> bool:
    """Whether one of the parameters with these `ids` is of `model`."""
    return any(id(parameter) in ids for parameter in model.parameters())
