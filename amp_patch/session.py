"""All that this process has switched on, and how to undo it."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch.call_setup import Setup
from amp_patch.casts.context import CastContext
from amp_patch.casts.installation import Installation
from amp_patch.casts.rules import OP_RULES, OpRule
from amp_patch.errors import AmpError, warn
from amp_patch.policy import OPT_LEVELS, Policy
from amp_patch.scaling.optimizer_binding import OptimizerBinding
from amp_patch.scaling.optimizer_state import warn_of_vanishing_eps
from amp_patch.scaling.ranks import ParallelWrappers
from amp_patch.scaling.scaler_groups import ScalerGroup, ScalerGroups
from amp_patch.weight_watch import WeightWatch
from amp_patch.weights.checkpoints import FollowMasters
from amp_patch.weights.exclusions import Exclusions, find_exclusions
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.model_binding import ModelBinding, holds_any
from amp_patch.weights.model_casting import owned_tensors
from amp_patch.weights.model_checks import check_input_names, check_model, check_parameters
from amp_patch.weights.running_statistics import ModelParts, RunningStatistics

_Bindings = weakref.WeakValueDictionary[int, OptimizerBinding]  # by the id of the optimizer
_Bound = tuple[Any, Policy, ScalerGroup]  # an optimizer, and what it is under


class Session:
    """Models and optimizers under their policies, the casts they share, and the undo of it all.

    Usable by itself; the functions of the package act on the session in `slot`. Models and
    optimizers are held weakly. One without any object is idle: everything in it is a no-op, which
    is what `enabled=False` gives.
    """

    def __init__(self) -> None:
        self.context = CastContext()
        self.scalers = ScalerGroups()
        self._masters = MasterWeights()
        self._wrappers = ParallelWrappers(
            self._masters.broadcast_, functools.partial(FollowMasters.of_all, self._masters)
        )
        self.casts = Installation(self.context)
        self._rules = OP_RULES
        self._models: Any = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._bindings: _Bindings = weakref.WeakValueDictionary()
        self._statistics: weakref.WeakSet[RunningStatistics] = weakref.WeakSet()
        self._watch = WeightWatch(self.context, self._masters, self._bindings)
        self._left_alone: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def add(self, models: Sequence[nn.Module], optimizers: Sequence[Any], setup: Setup) -> None:
        """Bring `models` and `optimizers` under the policy of `setup`.

        Objects that are under it already stay as they are; those under another one are released
        from that first. If anything fails, nothing of this call is left behind.
        """
        for model in models:
            check_model(model, setup.policy, self._masters)
        check_input_names(models, setup.keep_inputs)
        check_parameters(models, itertools.chain(*map(_parameters_of, optimizers)))
        exclusions = find_exclusions("keep_fp32", models, setup.keep_fp32)
        group = ScalerGroup(setup.policy, setup.num_losses, setup.is_verbose)
        if self._is_unchanged(models, optimizers, setup, exclusions):
            return
        for optimizer in optimizers:
            warn_of_vanishing_eps(optimizer, setup.policy)
        earlier, rules = self._release(models, optimizers, setup.policy), self._rules
        values = [
            (tensor, tensor.data) for model in models for _, tensor, _ in owned_tensors(model)
        ]
        bound = [
            (model, ModelBinding(setup.policy, group, excluded, setup.keep_inputs))
            for model, excluded in zip(models, exclusions, strict=True)
        ]
        try:
            if setup.policy.patch_torch_functions:
                self._use_rules(setup.rules)
            beside = _beside(earlier[1], optimizers, setup.policy)
            self._bind(bound, [*beside, *((one, setup.policy, group) for one in optimizers)])
        except BaseException:
            self._release(models, optimizers, setup.policy)
            self._use_rules(rules)
            for tensor, value in values:  # exact also where there was no master
                if tensor.data_ptr() != value.data_ptr():
                    tensor.data = value
            self._bind(*earlier)
            raise
        self.scalers.add(group)
        group.log_start(len(models), len(optimizers))

    def leave_alone(self, optimizers: Iterable[Any]) -> None:
        """Let `scale_loss` and the others do nothing for `optimizers`, instead of refusing them."""
        for optimizer in optimizers:
            self._left_alone[optimizer] = True

    def close(self) -> None:
        """Put everything back. A second call does nothing."""
        for optimizer_binding in list(self._bindings.values()):
            optimizer_binding.release()
        for model_binding in list(self._models.values()):
            model_binding.release()
        self._bindings.clear()
        self._models.clear()
        self._left_alone.clear()
        self.scalers.clear()
        self._rules = OP_RULES
        self._wrappers.forget()
        self._adjust_casts()

    @property
    def is_idle(self) -> bool:
        """Whether nothing was ever added, as after `enabled=False`."""
        return self.scalers.is_empty

    def binding_of(self, optimizer: Any, caller: str) -> OptimizerBinding | None:
        """The binding of `optimizer`; None if amp leaves it alone. AmpError if it is unknown."""
        binding = self._bindings.get(id(optimizer))
        if binding is not None and binding.optimizer is optimizer:
            return binding
        if self.is_idle or optimizer in self._left_alone:
            return None
        raise AmpError(
            f"{caller}: expected an optimizer that went through amp.initialize, found a "
            f"{type(optimizer).__name__} that did not (a copy or a new one?); pass it to initialize"
        )

    def bindings_beside(self, bindings: Sequence[OptimizerBinding]) -> list[OptimizerBinding]:
        """The other optimizers that train in this thread."""
        thread = threading.get_ident()
        for binding in bindings:
            binding.thread = thread
        if len(self._bindings) == len(bindings):
            return []
        others = [one for one in list(self._bindings.values()) if one not in bindings]
        return [one for one in others if one.thread == thread]

    def full_precision(self, model: nn.Module, caller: str) -> Any:
        """A context manager in which `model` holds its FP32 values."""
        binding = self._models.get(model)
        if binding is None:
            raise AmpError(
                f"{caller}: expected a model that went through amp.initialize, found a "
                f"{type(model).__name__} that did not (a copy, or a part of one?)"
            )
        return binding.full_precision(self._masters, self.context)

    def renew_casts(self) -> None:
        """Cast as the registrations of the user say by now."""
        if self.casts.is_there:
            self._remove_casts()
            self._adjust_casts()

    def _bind(
        self,
        models: Sequence[tuple[nn.Module, ModelBinding]],
        optimizers: Sequence[_Bound],
    ) -> None:
        held = [set(map(id, _parameters_of(optimizer))) for optimizer, _, _ in optimizers]
        optimized = set().union(*held)
        parts: list[ModelParts] = []
        for model, binding in models:
            self._models[model] = binding
            may_skip = not binding.group.is_identity
            binding.bind(model, self._masters, optimized, self.context, may_skip=may_skip)
            parts.append(ModelParts(weakref.ref(model), binding.statistics))
            self._statistics.add(binding.statistics)
        for (optimizer, policy, group), ids in zip(optimizers, held, strict=True):
            own = [
                part
                for part, (model, _) in zip(parts, models, strict=True)
                if holds_any(model, ids) or not holds_any(model, optimized)  # a frozen model
            ]
            shared = (self._masters, self.context, own, self._wrappers, self._statistics)
            self._bindings[id(optimizer)] = OptimizerBinding(
                optimizer, policy, group, *shared, self._adopt
            )
        self._wrappers.watch(model for model, _ in models)
        self._adjust_casts()

    def _adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Cast what has come with `parameters` into a model."""
        ids = set(map(id, parameters))
        for model, binding in list(self._models.items()):
            if holds_any(model, ids):
                binding.extend(model, self._masters)

    def _is_unchanged(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        setup: Setup,
        exclusions: Sequence[Exclusions],
    ) -> bool:
        bound_models = [self._models.get(model) for model in models]
        known = bound_models + [self._bindings.get(id(optimizer)) for optimizer in optimizers]
        if setup.policy.patch_torch_functions and setup.rules != self._rules:
            return False
        if not known or any(
            one is None or one.policy != setup.policy or len(one.group.scalers) != setup.num_losses
            for one in known
        ):
            return False
        return all(
            binding.exclusions == excluded and binding.kept_inputs == setup.keep_inputs
            for binding, excluded in zip(bound_models, exclusions, strict=True)
        )

    def _at_odds(self, models: Sequence[nn.Module], policy: Policy) -> list[nn.Module]:
        """Models under another policy that share tensors with `models`: parts, or wholes."""
        tensors = {id(tensor) for model in models for tensor in model.parameters()}
        return [
            other
            for other, binding in list(self._models.items())
            if binding.policy != policy
            and not any(other is model for model in models)
            and any(id(tensor) in tensors for tensor in other.parameters())
        ]

    def _release(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], policy: Policy
    ) -> tuple[list[tuple[nn.Module, ModelBinding]], list[_Bound]]:
        """Undo what earlier calls did to these objects, and to optimizers of these models.

        Returns what `_bind` takes to do it again.
        """
        known = [model for model in models if model in self._models]
        known += self._at_odds(models, policy)
        tensors = {id(tensor) for model in known for tensor in model.parameters()}
        released: list[_Bound] = []
        for key, binding in list(self._bindings.items()):
            is_given = any(binding.optimizer is optimizer for optimizer in optimizers)
            if is_given or binding.holds_any(tensors):
                released.append((binding.optimizer, binding.policy, binding.group))
                binding.release()
                del self._bindings[key]
        earlier: list[tuple[nn.Module, ModelBinding]] = []
        for model in known:
            bound = self._models.pop(model)
            bound.release()
            earlier.append((model, bound.renewed()))
        return earlier, released

    def _adjust_casts(self) -> None:
        """Install casts if some live object wants them, and scope every model; else remove all."""
        models = list(self._models.items())
        bindings = [*self._bindings.values(), *(binding for _, binding in models)]
        policies = [binding.policy for binding in bindings]
        half_dtypes = [policy.half_dtype for policy in policies if policy.patch_torch_functions]
        if half_dtypes and not self.casts.is_there:
            self._watch.keep(False)  # to be put on top again
            self.casts.install(self._rules)
        elif not half_dtypes and self.casts.is_there:
            self._remove_casts()
        if half_dtypes:
            self.context.half_dtype = half_dtypes[-1]  # of the newest model
        self._watch.keep(any(policy != OPT_LEVELS["O0"] for policy in policies))
        for model, binding in models:
            self.casts.reach_into(model)
            binding.scope(model, self.context, are_casts_installed=bool(half_dtypes))

    def _use_rules(self, rules: tuple[OpRule, ...]) -> None:
        """Let `rules` hold from the next installation on, which is for the whole process."""
        if rules == self._rules:
            return
        if any(binding.policy.patch_torch_functions for binding in self._models.values()):
            warn(
                "initialize: the cast rules of this call replace those of an earlier one, since "
                "casts around operations hold for the whole process; pass the same cast_rules"
            )
        self._rules = rules
        self._remove_casts()

    def _remove_casts(self) -> None:
        self._watch.keep(False)  # it was put on top
        self.casts.remove()


def _beside(released: Sequence[_Bound], optimizers: Iterable[Any], policy: Policy) -> list[_Bound]:
    """Those of `released` that go on: under the same policy, with other parameters."""
    given = set(map(id, itertools.chain(*map(_parameters_of, optimizers))))
    return [
        one
        for one in released
        if one[1] == policy and given.isdisjoint(map(id, _parameters_of(one[0])))
    ]


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
