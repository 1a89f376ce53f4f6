"""Bind one optimizer: masters in its parameter groups, and a step that can be skipped."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.errors import AmpError
from amp_patch.policy import Policy
from amp_patch.scaling import gradients
from amp_patch.scaling.fused_step import skips_by_itself, step_unless
from amp_patch.scaling.gradient_lists import clear, refuse_stray_gradients
from amp_patch.scaling.gradient_window import Checks, GradientWindow, Stage
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.optimizer_state import ClosureOverflowError, snapshot
from amp_patch.scaling.paired_groups import PairedGroups
from amp_patch.scaling.ranks import ParallelWrappers
from amp_patch.scaling.scaler_groups import ScalerGroup
from amp_patch.scaling.step_outcome import StepOutcome
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.param_pairs import NO_PAIRS, ParamPair, ParamPairs
from amp_patch.weights.running_statistics import ModelParts, RunningStatistics, StepStatistics


class OptimizerBinding:
    """The state of one optimizer, kept beside it.

    Lives as long as the `step` that it puts on the optimizer: nothing else holds it strongly. On
    the optimizer itself only `step`, `zero_grad` and `add_param_group` are replaced; the parameter
    groups stay the same objects and hold the masters, where there are any.
    """

    def __init__(
        self,
        optimizer: Any,
        policy: Policy,
        group: ScalerGroup,
        masters: MasterWeights,
        context: CastContext,
        models: Sequence[ModelParts],
        wrappers: ParallelWrappers,
        statistics: Iterable[RunningStatistics],
        adopt: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        self.policy = policy
        self.group = group
        self.models = tuple(models)
        self.statistics = StepStatistics([one.statistics for one in models], statistics)
        self.window = GradientWindow()
        self.outcome = StepOutcome()
        self.thread = threading.get_ident()  # in which it trains
        self._optimizer = weakref.ref(optimizer)
        self._masters = masters
        self._context = context
        self._wrappers = wrappers
        self._adopt = adopt  # told of parameters that are new
        self._patcher = Patcher()
        self._groups = PairedGroups(optimizer, masters, makes_masters=policy.master_weights)
        self._is_bound = True
        try:
            self._bind(optimizer)
        except BaseException:
            self.release()
            raise

    @property
    def optimizer(self) -> Any:
        """The optimizer, or None once it is gone."""
        return self._optimizer()

    def release(self) -> None:
        """Give the optimizer back as it was: its methods, parameters, gradients and state."""
        self._is_bound = False
        self.window.close_early()
        self._patcher.restore()

    def holds_any(self, tensors: Container[int]) -> bool:
        """Whether the optimizer updates one of `tensors` (ids of tensors of a model)."""
        return any(id(pair.model) in tensors for pair in self.pairs())

    def holds_only(self, tensors: Container[int]) -> bool:
        """Whether all that the optimizer updates is among `tensors`."""
        return all(id(pair.model) in tensors for pair in self.pairs())

    def pairs(self) -> ParamPairs:
        """The parameters as they are in the groups now: a user may have edited these."""
        return self._groups.pairs()

    @property
    def is_left_alone(self) -> bool:
        """Whether a block at a scale of 1 has nothing to do: no masters, no loss that is scaled."""
        is_ready = self.window.stage is Stage.READY and not self.outcome.may_hold_skipped
        return is_ready and self.group.is_identity and not self._groups.have_masters

    def before_backward(
        self, scaler: LossScaler, claimed: Container[int], scale: gradients.Scale
    ) -> list[ParamPair]:
        """Enter a scale_loss block, whose loss is multiplied by `scale`.

        `claimed` has the ids of parameters that another optimizer of the block handles already:
        returns what this one shares with it.
        """
        pairs = self.pairs()
        shared: list[ParamPair] = []
        if claimed:
            shared = [pair for pair in pairs if id(pair.master) in claimed]
            pairs = ParamPairs(pair for pair in pairs if id(pair.master) not in claimed)
        self.outcome.drop_skipped(pairs)
        self.window.begin(pairs, scaler, self._wrappers.of(pairs.models), scale)
        return shared

    def before_backward_beside(self, others: Iterable[OptimizerBinding]) -> None:
        """Enter a block of `others` inside a window with delay_unscale.

        AmpError if these hold one of its parameters: its gradient could not be told from theirs.
        """
        pairs = self.pairs()
        own = {id(pair.model) for pair in pairs}
        if any(other.holds_any(own) for other in others):
            raise AmpError(
                "scale_loss: found a parameter whose gradient is still multiplied by the loss "
                "scale of another optimizer that holds it too (delay_unscale=True); expected both "
                "optimizers in every block of the window"
            )
        self.window.begin_beside(pairs)

    def _bind(self, optimizer: Any) -> None:
        self._patcher.on_restore(self._groups.unpair)
        for group in optimizer.param_groups:
            self._groups.pair(group["params"])
        for name, replacement in _METHODS.items():
            if hasattr(optimizer, name):  # wrappers that are no torch Optimizer lack some
                self._replace_method(optimizer, name, replacement)

    def _replace_method(self, optimizer: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(optimizer, name)

        @functools.wraps(
            getattr(original, "__func__", original)
        )  # keeps the mark by which schedulers know the step
        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_bound:
                return original(*args, **kwargs)
            return replacement(self, original, *args, **kwargs)

        # A bound method, since schedulers take `step.__func__` and refuse or bypass anything else.
        self._patcher.replace(optimizer, name, types.MethodType(method, optimizer))

    def run_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step without casts, its masters rounded into the model afterwards."""
        pairs = self.pairs() if self._groups.have_masters else NO_PAIRS
        if pairs:
            refuse_stray_gradients("step", pairs)
            pairs.refresh()
        self.window.begin_anew()
        casts = self._context.suspend()
        try:
            return original(*args, **kwargs)
        finally:
            self._context.restore(casts)
            if pairs:
                pairs.copy_to_model()
                clear(pairs.mastered.masters)
            self.statistics.forget()
            self._context.cache.clear()

    def run_step_unless(
        self, checks: Checks, overflow: torch.Tensor, original: Callable[..., Any], *args: Any
    ) -> Any:
        """A step that the kernel skips if `overflow`, on a device, says so."""
        self.statistics.restore(overflow)
        result = self.run_step(step_unless, overflow, self.optimizer, original, *args)
        self.outcome.leave_open(checks)
        return result

    def run_closure_step(
        self, original: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A step with a closure. An overflow in any call of the closure undoes the whole step."""
        wrapped = functools.partial(self._run_closure, closure)
        if self.group.is_identity:
            return self.run_step(original, wrapped, *args, **kwargs)
        restore = snapshot(self.optimizer)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except ClosureOverflowError as overflow:
                restore()
                self.skip_step()
                return overflow.loss

        return self.run_step(attempt, wrapped, *args, **kwargs)

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        """The closure sees the weights of now, and has casts."""
        self.pairs().copy_to_model()
        with self._context.resumed():
            loss = closure()
        self.refuse_scaled_gradients()
        if self.window.take_overflow():
            raise ClosureOverflowError(loss)
        self.window.begin_anew()
        return loss

    def skip_step(self) -> None:
        """Leave no trace: drop the gradients, and put running statistics back."""
        self.outcome.note(skipped=True)
        clear(self.pairs().models)
        clear(self.pairs().masters)
        self.statistics.restore()
        optimizer = self.optimizer
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            # Lest torch's schedulers warn of the order of calls.
            optimizer._opt_called = True  # noqa: SLF001
        self._context.cache.clear()

    def named_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The gradients of the open block, or those left by earlier ones, with their paths."""
        models = [model for model in (part.model() for part in self.models) if model is not None]
        paths = {id(p): path for model in models for path, p in model.named_parameters()}
        found = self.window.fresh() or [
            (pair, pair.master.grad) for pair in self.pairs() if pair.master.grad is not None
        ]
        return [(paths.get(id(pair.model), "a parameter"), one) for pair, one in found]

    def zero(self) -> None:
        """The user cleared the masters' gradients: clear the model's, and what was set aside."""
        if self.window.has_overflow:  # the user leaves the step out
            self.statistics.restore()
        self.window.zero()
        self.outcome.forget_gradients()
        if self._groups.have_masters:
            clear(self.pairs().mastered.models)
        self._context.cache.clear()

    def add(self, group: dict[str, Any]) -> None:
        """Pair the parameters of a group that was just added, and cast what came with them."""
        self._adopt(group["params"])
        self._groups.pair(group["params"])

    def refuse_scaled_gradients(self) -> None:
        if self.window.stage is Stage.READY:
            return
        raise AmpError(
            "step: found gradients that are still multiplied by the loss scale; expected the last "
            "scale_loss block before a step to be left, and to be without delay_unscale=True"
        )


def _step(
    binding: OptimizerBinding, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    binding.refuse_scaled_gradients()
    binding.outcome.note(skipped=False)
    if args and callable(args[0]):
        return binding.run_closure_step(original, *args, **kwargs)
    if callable(kwargs.get("closure")):
        closure = kwargs.pop("closure")
        return binding.run_closure_step(original, closure, *args, **kwargs)
    if binding.window.unchecked and not kwargs and skips_by_itself(binding.optimizer):
        taken = binding.window.take_verdict()
        if taken is not None:
            return binding.run_step_unless(*taken, original, *args)
    if binding.window.take_overflow():
        binding.skip_step()
        return None
    return binding.run_step(original, *args, **kwargs)


def _zero_grad(
    binding: OptimizerBinding, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    result = original(*args, **kwargs)
    binding.zero()
    return result


def _add_param_group(
    binding: OptimizerBinding, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    result = original(*args, **kwargs)
    binding.add(binding.optimizer.param_groups[-1])
    return result


_METHODS = {"step": _step, "zero_grad": _zero_grad, "add_param_group": _add_param_group}
