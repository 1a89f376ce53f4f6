"""All that this process has switched on, and how to undo it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.watch import watch_weights
from amp_patch.casts.wrappers import install_casts
from amp_patch.errors import AmpError, warn
from amp_patch.policy import Policy
from amp_patch.scaling.optimizer_binding import ModelParts, OptimizerBinding
from amp_patch.scaling.scaler_groups import ScalerGroup, ScalerGroups
from amp_patch.weights.exclusions import Exclusions, Selector, find_exclusions
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.model_binding import ModelBinding
from amp_patch.weights.model_casting import forward_arguments
from amp_patch.weights.model_checks import check_model

logger = logging.getLogger("amp_patch")


@dataclass(frozen=True)
class Setup:
    """How one `initialize` call wants its models and optimizers.

    `keep_fp32` selects what of the models is not cast, `keep_inputs` names arguments of their
    forward that are not.
    """

    policy: Policy
    num_losses: int = 1
    keep_fp32: tuple[Selector, ...] = ()
    keep_inputs: frozenset[str] = frozenset()
    is_verbose: bool = True


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
        self._casts = Patcher()
        self._are_casts_installed = False
        self._models: Any = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._bindings: weakref.WeakValueDictionary[int, OptimizerBinding] = (
            weakref.WeakValueDictionary()
        )
        self._left_alone: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def add(self, models: Sequence[nn.Module], optimizers: Sequence[Any], setup: Setup) -> None:
        """Bring `models` and `optimizers` under the policy of `setup`.

        Objects that are under it already stay as they are; those under another one are released
        from that first. If anything fails, nothing of this call is left behind.
        """
        for model in models:
            check_model(model, setup.policy, self._masters)
        _check_arguments(models, setup.keep_inputs)
        exclusions = find_exclusions("keep_fp32", models, setup.keep_fp32)
        group = ScalerGroup(setup.policy, setup.num_losses, setup.is_verbose)
        if self._is_unchanged(models, optimizers, setup, exclusions):
            return
        self._release(models, optimizers)
        try:
            self._add(models, optimizers, setup, exclusions, group)
        except BaseException:
            self._release(models, optimizers)
            self._adjust_casts()
            raise
        if setup.is_verbose:
            logger.info(
                "%s: %d model(s), %d optimizer(s), %s, loss scale %s",
                setup.policy.opt_level,
                len(models),
                len(optimizers),
                setup.policy.half_dtype,
                setup.policy.loss_scale,
            )

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

    def full_precision(self, model: nn.Module, caller: str) -> Any:
        """A context manager in which `model` holds its FP32 values."""
        binding = self._models.get(model)
        if binding is None:
            raise AmpError(
                f"{caller}: expected a model that went through amp.initialize, found a "
                f"{type(model).__name__} that did not (a copy, or a part of one?)"
            )
        return binding.full_precision(self._masters, self.context)

    def _add(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        setup: Setup,
        exclusions: Sequence[Exclusions],
        group: ScalerGroup,
    ) -> None:
        held = [_parameter_ids(optimizer) for optimizer in optimizers]
        parts: list[ModelParts] = []
        for model, excluded in zip(models, exclusions, strict=True):
            binding = ModelBinding(setup.policy, group, excluded, setup.keep_inputs)
            self._models[model] = binding
            optimized = set().union(*held)
            binding.bind(
                model, self._masters, optimized, self.context, may_skip=not group.is_identity
            )
            parts.append(ModelParts(weakref.ref(model), binding.statistics))
        for optimizer, ids in zip(optimizers, held, strict=True):
            own = [
                part
                for part, model in zip(parts, models, strict=True)
                if any(id(parameter) in ids for parameter in model.parameters())
            ]
            self._bindings[id(optimizer)] = OptimizerBinding(
                optimizer, setup.policy, group, self._masters, self.context, own
            )
            _warn_of_vanishing_eps(optimizer)
        self.scalers.add(group)
        if setup.policy.patch_torch_functions:
            self.context.half_dtype = setup.policy.half_dtype
        self._adjust_casts()

    def _is_unchanged(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        setup: Setup,
        exclusions: Sequence[Exclusions],
    ) -> bool:
        bound_models = [self._models.get(model) for model in models]
        known = bound_models + [self._bindings.get(id(optimizer)) for optimizer in optimizers]
        if not known or any(
            one is None or one.policy != setup.policy or len(one.group.scalers) != setup.num_losses
            for one in known
        ):
            return False
        return all(
            binding.exclusions == excluded and binding.kept_inputs == setup.keep_inputs
            for binding, excluded in zip(bound_models, exclusions, strict=True)
        )

    def _release(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Undo what earlier calls did to these objects, and to optimizers of these models."""
        known = [model for model in models if model in self._models]
        tensors = {id(tensor) for model in known for tensor in model.parameters()}
        for key, binding in list(self._bindings.items()):
            is_given = any(binding.optimizer is optimizer for optimizer in optimizers)
            if is_given or binding.holds_any(tensors):
                binding.release()
                del self._bindings[key]
        for model in known:
            self._models.pop(model).release()

    def _adjust_casts(self) -> None:
        """Install casts if some live object wants them, and scope every model; else remove all."""
        models = list(self._models.items())
        policies = [binding.policy for _, binding in models]
        policies += [binding.policy for binding in self._bindings.values()]
        is_wanted = any(policy.patch_torch_functions for policy in policies)
        if is_wanted and not self._are_casts_installed:
            self._casts.on_restore(self._forget_casts)
            self._are_casts_installed = True
            install_casts(self._casts, self.context)
            watch_weights(self._casts, self.context.cache)
            _leave_fast_path(self._casts)
        elif not is_wanted and self._are_casts_installed:
            self._casts.restore()
        for model, binding in models:
            binding.scope(model, self.context, is_wanted=is_wanted)

    def _forget_casts(self) -> None:
        self._are_casts_installed = False
        self.context.half_dtype = None
        self.context.cache.clear()


class SessionSlot:
    """Where the session of this process is kept."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def open(self) -> Session:
        """The current session, made if there is none."""
        if self.session is None:
            self.session = Session()
        return self.session

    def require(self, caller: str) -> Session:
        """The current session, or AmpError."""
        if self.session is None:
            raise AmpError(f"{caller}: expected an earlier call of amp.initialize, found none")
        return self.session

    def close(self) -> None:
        """Close the current session, if any."""
        session, self.session = self.session, None
        if session is not None:
            session.close()


slot = SessionSlot()


def _parameter_ids(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _check_arguments(models: Sequence[nn.Module], names: frozenset[str]) -> None:
    known = {name for model in models for name in forward_arguments(model)} if names else set()
    unknown = sorted(names - known)
    if unknown and models:
        raise AmpError(
            f"keep_inputs: expected names of arguments of forward ({', '.join(sorted(known))}), "
            f"found {unknown[0]!r}"
        )


def _warn_of_vanishing_eps(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or not eps > 0:
            continue
        if any(
            parameter.dtype is torch.float16 and torch.tensor(eps, dtype=torch.float16) == 0
            for parameter in group["params"]
        ):
            warn(
                f"eps={eps:g} of {type(optimizer).__name__} is 0 in float16, and its update "
                "divides by zero; pass eps=1e-4 or so, or use 'O2', whose optimizer works in FP32"
            )
            return


def _leave_fast_path(patcher: Patcher) -> None:
    """Attention in eval mode has a fused path that calls no function with a cast."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    patcher.on_restore(lambda: torch.backends.mha.set_fastpath_enabled(was_enabled))
    torch.backends.mha.set_fastpath_enabled(False)
