"""Bind one optimizer: masters in its parameter groups, and a step that can be skipped."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.errors import AmpError
from amp_patch.policy import CASTABLE, Policy
from amp_patch.scaling.gradient_window import GradientWindow, Stage, stray_gradient_message
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scaler_groups import ScalerGroup
from amp_patch.weights.master_weights import MasterWeights, ParamPair


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
    ) -> None:
        self.policy = policy
        self.group = group
        self.window = GradientWindow()
        self.step_was_skipped = False
        self._optimizer = weakref.ref(optimizer)
        self._masters = masters
        self._context = context
        self._patcher = Patcher()
        self._mastered: dict[int, ParamPair] = {}  # by the id of the master
        self._known: tuple[list[torch.Tensor], list[ParamPair]] = ([], [])
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
        self._patcher.restore()

    def holds_any(self, tensors: Container[int]) -> bool:
        """Whether the optimizer updates one of `tensors` (ids of tensors of a model)."""
        return any(id(pair.model) in tensors for pair in self.pairs())

    def pairs(self) -> list[ParamPair]:
        """The parameters as they are in the groups now: a user may have edited these."""
        optimizer, mastered = self.optimizer, self._mastered
        if optimizer is None:
            return []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known, pairs = self._known
        if len(parameters) != len(known) or not all(map(operator.is_, parameters, known)):
            pairs = [mastered.get(id(p)) or ParamPair(p, p) for p in parameters]
            self._known = (parameters, pairs)
        return pairs

    def before_backward(self, scaler: LossScaler, claimed: Container[int]) -> None:
        """Enter a scale_loss block.

        `claimed` has the ids of parameters that another optimizer of the block handles already.
        At a scale that is always 1, parameters without a master are left alone.
        """
        if scaler.is_identity and not self._mastered:
            pairs: list[ParamPair] = []
        else:
            pairs = self.pairs()
        if scaler.is_identity:
            pairs = [pair for pair in pairs if pair.has_master]
        if claimed:
            pairs = [pair for pair in pairs if id(pair.master) not in claimed]
        self.window.begin(pairs, scaler)

    def _bind(self, optimizer: Any) -> None:
        self._patcher.on_restore(self._unpair)
        for group in optimizer.param_groups:
            self._pair(optimizer, group["params"])
        self._replace_method(optimizer, "step", _step)
        self._replace_method(optimizer, "zero_grad", _zero_grad)
        if hasattr(optimizer, "add_param_group"):
            self._replace_method(optimizer, "add_param_group", _add_param_group)

    def _replace_method(self, optimizer: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(optimizer, name)

        @functools.wraps(original)  # keeps the mark by which schedulers know the step
        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_bound:
                return original(*args, **kwargs)
            return replacement(self, original, *args, **kwargs)

        # A bound method, since schedulers take `step.__func__` and refuse or bypass anything else.
        self._patcher.replace(optimizer, name, types.MethodType(method, optimizer))

    def _pair(self, optimizer: Any, parameters: list[torch.Tensor]) -> None:
        """Put the masters into a group's `parameters`, in place, with the state that is theirs."""
        for i, parameter in enumerate(parameters):
            if self.policy.master_weights:
                self._masters.ensure_master(parameter)
            pair = self._masters.pair(parameter)
            if pair.has_master:
                self._mastered[id(pair.master)] = pair
                parameters[i] = pair.master
            if self._masters.has_cast(parameter):
                _move_state(optimizer, pair.model, pair.master, pair.master.dtype)

    def _unpair(self) -> None:
        optimizer = self.optimizer
        for pair in self.pairs():
            if self._masters.has_cast(pair.model):
                dtype = self._masters.original_dtype(pair.model)
                _move_state(optimizer, pair.master, pair.model, dtype)
        for group in [] if optimizer is None else optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                pair = self._mastered.get(id(parameter), ParamPair(parameter, parameter))
                group["params"][i] = pair.model

    def run_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step without casts, its masters rounded into the model afterwards."""
        pairs = self.pairs() if self._mastered else []
        self._refuse_stray_gradients(pairs)
        self._masters.refresh(pairs)
        casts = self._context.suspend()
        try:
            return original(*args, **kwargs)
        finally:
            self._context.restore(casts)
            if pairs:
                self._masters.copy_to_model(pairs)
            for pair in pairs:
                if pair.has_master:
                    pair.master.grad = None
            self._context.cache.clear()

    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """A closure within a step: sees the weights of now, has casts, and drops an overflow."""
        self._masters.copy_to_model(self.pairs())
        with self._context.resumed():
            loss = closure()
        self.refuse_scaled_gradients()
        if self.window.take_overflow():
            self.skip_step()
        return loss

    def skip_step(self) -> None:
        """Drop the gradients, so that nothing non-finite survives the step that is left out."""
        self.step_was_skipped = True
        for pair in self.pairs():
            pair.model.grad = pair.master.grad = None
        optimizer = self.optimizer
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            # Lest torch's schedulers warn of the order of calls.
            optimizer._opt_called = True  # noqa: SLF001
        self._context.cache.clear()

    def zero(self) -> None:
        """The user cleared the masters' gradients: clear the model's, and what was set aside."""
        self.window.zero()
        for pair in self.pairs() if self._mastered else ():
            if pair.has_master:
                pair.model.grad = None
        self._context.cache.clear()

    def add(self, group: dict[str, Any]) -> None:
        """Pair the parameters of a group that was just added."""
        self._pair(self.optimizer, group["params"])

    def refuse_scaled_gradients(self) -> None:
        if self.window.stage is Stage.READY:
            return
        raise AmpError(
            "step: found gradients that are still multiplied by the loss scale; expected the last "
            "scale_loss block before a step to be left, and to be without delay_unscale=True"
        )

    def _refuse_stray_gradients(self, pairs: Sequence[ParamPair]) -> None:
        if any(pair.has_master and pair.model.grad is not None for pair in pairs):
            raise AmpError(stray_gradient_message("step"))


def _step(
    binding: OptimizerBinding, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    binding.refuse_scaled_gradients()
    binding.step_was_skipped = False
    closure = args[0] if args else kwargs.get("closure")
    if not callable(closure):
        if binding.window.take_overflow():
            binding.skip_step()
            return None
        return binding.run_step(original, *args, **kwargs)
    wrapped = functools.partial(binding.run_closure, closure)
    if args:
        return binding.run_step(original, wrapped, *args[1:], **kwargs)
    return binding.run_step(original, **{**kwargs, "closure": wrapped})


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


def _move_state(
    optimizer: Any, source: torch.Tensor, target: torch.Tensor, dtype: torch.dtype
) -> None:
    """Hand the optimizer's state of `source` to `target`, in `dtype` as torch keeps it."""
    state = getattr(optimizer, "state", None)
    if not state or source not in state:
        return
    moved = state.pop(source)
    for name, value in moved.items():
        is_cast = isinstance(value, torch.Tensor) and value.dtype in CASTABLE and name != "step"
        if is_cast and dtype in CASTABLE:  # torch leaves step counts in FP32 too
            moved[name] = value.to(dtype)
    state[target] = moved
