"""All that this process has switched on, and how to undo it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.scopes import scope_model
from amp_patch.casts.watch import watch_weights
from amp_patch.casts.wrappers import install_casts
from amp_patch.errors import AmpError, warn
from amp_patch.policy import Policy
from amp_patch.scaling.optimizer_binding import OptimizerBinding
from amp_patch.scaling.scaler_groups import ScalerGroup, ScalerGroups
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.model_casting import cast_model, cast_outputs, check_castable

logger = logging.getLogger("amp_patch")


class _ModelRecord:
    """What was done to one model. Holds nothing of the model itself."""

    def __init__(self, policy: Policy, group: ScalerGroup) -> None:
        self.policy = policy
        self.group = group
        self.patcher = Patcher()
        self.scope = Patcher()

    def release(self) -> None:
        self.scope.restore()
        self.patcher.restore()


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

    def add(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        policy: Policy,
        num_losses: int,
        verbosity: int = 1,
    ) -> None:
        """Bring `models` and `optimizers` under `policy`.

        Objects that are under it already stay as they are; those under another one are released
        from that first. If anything fails, nothing of this call is left behind.
        """
        for model in models:
            check_castable(model, policy, self._masters)
        if self._is_unchanged(models, optimizers, policy, num_losses):
            return
        self._release(models, optimizers)
        try:
            self._add(models, optimizers, policy, ScalerGroup(policy, num_losses, verbosity > 0))
        except BaseException:
            self._release(models, optimizers)
            self._adjust_casts()
            raise
        if verbosity > 0:
            logger.info(
                "%s: %d model(s), %d optimizer(s), %s, loss scale %s",
                policy.opt_level,
                len(models),
                len(optimizers),
                policy.half_dtype,
                policy.loss_scale,
            )

    def leave_alone(self, optimizers: Sequence[Any]) -> None:
        """Let `scale_loss` and the others do nothing for `optimizers`, instead of refusing them."""
        for optimizer in optimizers:
            self._left_alone[optimizer] = True

    def close(self) -> None:
        """Put everything back. A second call does nothing."""
        for binding in list(self._bindings.values()):
            binding.release()
        for record in list(self._models.values()):
            record.release()
        self._bindings.clear()
        self._models.clear()
        self._left_alone.clear()
        self.scalers.clear()
        self._adjust_casts()

    def _add(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        policy: Policy,
        group: ScalerGroup,
    ) -> None:
        optimized = {
            id(parameter)
            for optimizer in optimizers
            for parameters in optimizer.param_groups
            for parameter in parameters["params"]
        }
        for model in models:
            record = _ModelRecord(policy, group)
            self._models[model] = record
            # The casts of a model that is gone would keep its weights alive.
            finalizer = weakref.finalize(model, self.context.cache.clear)
            finalizer.atexit = False
            record.patcher.on_restore(finalizer.detach)
            if policy.cast_model_type is not None:
                cast_model(
                    model, policy.cast_model_type, policy, self._masters, optimized, record.patcher
                )
            if policy.cast_model_outputs is not None:
                cast_outputs(model, policy.cast_model_outputs, record.patcher)
        for optimizer in optimizers:
            binding = OptimizerBinding(optimizer, policy, group, self._masters, self.context)
            self._bindings[id(optimizer)] = binding
            _warn_of_vanishing_eps(optimizer)
        self.scalers.add(group)
        if policy.patch_torch_functions:
            self.context.half_dtype = policy.half_dtype
        self._adjust_casts()

    def _is_unchanged(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        policy: Policy,
        num_losses: int,
    ) -> bool:
        known = [self._models.get(model) for model in models]
        known += [self._bindings.get(id(optimizer)) for optimizer in optimizers]
        return bool(known) and all(
            one is not None and one.policy == policy and len(one.group.scalers) == num_losses
            for one in known
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
        records = list(self._models.items())
        policies = [record.policy for _, record in records]
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
        for model, record in records:
            record.scope.restore()
            if is_wanted:
                policy = record.policy
                half_dtype = policy.half_dtype if policy.patch_torch_functions else None
                scope_model(model, self.context, half_dtype, record.scope)

    def _forget_casts(self) -> None:
        self._are_casts_installed = False
        self.context.half_dtype = None
        self.context.cache.clear()

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
