"""The block around backward: scale the loss, then unscale and check the gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from amp_patch.casts.cache import CastCache
from amp_patch.errors import warn
from amp_patch.scaling.device_scale import DeviceScale, scale_on
from amp_patch.scaling.fused_step import skips_by_itself
from amp_patch.scaling.gradient_window import Checks, GradientWindow, Stage
from amp_patch.scaling.gradients import Scale, non_finite
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.optimizer_binding import OptimizerBinding
from amp_patch.scaling.overflow_check import OverflowCheck, make_checks
from amp_patch.scaling.overflow_report import OverflowReport, report_overflow
from amp_patch.scaling.scaler_groups import ScalerGroup
from amp_patch.weights.param_pairs import ParamPair


class ScaledLoss:
    """Context manager: gives `loss` scaled; leaves gradients of `bindings` unscaled and checked.

    All of `bindings` skip their next step together. If the body raises, their gradients are what
    they were, but for those that a scale of 1 leaves alone. `cache` is emptied before backward, so
    that each cast is freed with the part of the graph that used it, and again afterwards.
    Synchronises once, where a check is made; not where the optimizers skip by themselves.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        bindings: Sequence[OptimizerBinding],
        scaler: LossScaler,
        cache: CastCache,
        bystanders: Sequence[OptimizerBinding] = (),
        *,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._loss = loss
        self._is_from_gradients = scaler.is_in_loss
        self._bindings = bindings
        self._scaler = scaler
        self._cache = cache
        # Other optimizers whose parameters backward may reach. Their gradients are unscaled too.
        self._bystanders = tuple(bystanders)
        self._delayed: tuple[OptimizerBinding, ...] = ()  # of these, which stay scaled by their own
        self._delay_unscale = delay_unscale and not scaler.is_identity
        self._delay_overflow_check = delay_overflow_check
        self._on_device: DeviceScale | None = None
        self._is_idle = False  # nothing is to be done: backward adds to gradients as in plain torch
        self._scale: Scale = 1.0  # set on entry
        # What an optimizer has of parameters whose gradients another one of the block handles.
        self._shared: list[list[ParamPair]] = []

    def __enter__(self) -> torch.Tensor:
        self._cache.clear()
        self._delayed = _of_stage(self._bystanders, Stage.DELAYED)
        self._bystanders = self._reached(_of_stage(self._bystanders, Stage.READY))
        self._is_idle = not (self._delayed or self._bystanders or self._reached(self._bindings))
        if self._is_idle:
            for binding in self._bindings:
                binding.window.stage = Stage.BACKWARD  # lest another block be entered inside
            return self._loss
        claimed: set[int] = set()
        opened: list[OptimizerBinding] = []
        self._on_device = self._scale_on_device()
        self._scale = (self._on_device or self._scaler).scale
        try:
            for binding in self._delayed:
                binding.before_backward_beside(self._bindings)
                opened.append(binding)
            for binding in self._bindings:
                shared = binding.before_backward(self._scaler, claimed, self._scale)
                opened.append(binding)
                self._shared.append(shared)
                if len(self._bindings) > 1 or self._bystanders:
                    claimed.update(id(pair.master) for pair in binding.pairs())
            for binding in self._bystanders:
                shared = binding.before_backward(self._scaler, claimed, self._scale)
                opened.append(binding)
                binding.window.watch(shared)
            return self._loss if self._scaler.is_identity else _scaled(self._loss, self._scale)
        except BaseException:
            _abandon(opened)
            raise

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if self._is_idle:
                for binding in self._bindings:
                    binding.window.stage = Stage.READY
                return
            if error is not None:
                _abandon([*self._bindings, *self._delayed, *self._bystanders])
                return
            try:
                for binding in self._delayed:
                    binding.window.leave_beside(self._scale)
                for binding in self._bystanders:
                    self._unscale_bystander(binding.window)
                report = self._leave()
            except BaseException:
                _abandon(self._bindings)
                raise
            if report is not None:
                warn(str(report))
        finally:
            self._cache.clear()

    def _reached(self, bindings: Sequence[OptimizerBinding]) -> tuple[OptimizerBinding, ...]:
        """Those of `bindings` for which a block has something to do at this scale."""
        is_identity = self._scaler.is_identity
        return tuple(one for one in bindings if not (is_identity and one.is_left_alone))

    def _leave(self) -> OverflowReport | None:
        """Unscale and check, with one wait for the device. Returns what the user should know."""
        windows = [binding.window for binding in self._bindings]
        if self._delay_unscale:
            for window in windows:
                window.delay()
            return None
        verdicts = [window.unscale(self._scaler) for window in windows]
        self._judge_shared(verdicts)
        if self._scaler.is_identity:
            for window in windows:
                window.settle(keep=True)
            return None
        policy = self._bindings[0].policy
        check = OverflowCheck(
            self._scaler,
            verdicts,
            skip_together=policy.skip_together,
            sync_overflow=policy.sync_overflow,
        )
        earlier = [window.unchecked for window in windows]
        for i, window in enumerate(windows):
            window.unchecked = [*earlier[i], (check, i)]
        if self._is_left_for_later(check):
            for window in windows:
                window.settle(keep=True)
            return None
        scale = self._scaler.scale
        make_checks(one for window in windows for one, _ in window.unchecked)
        report = self._report(scale) if check.has_overflow else None
        for i, binding in enumerate(self._bindings):
            self._settle(binding, earlier[i], is_skipped=check.skips[i])
        return report

    def _settle(self, binding: OptimizerBinding, earlier: Checks, *, is_skipped: bool) -> None:
        window = binding.window
        can_drop = binding.policy.overflow_drops == "micro_batch"
        is_dropped = is_skipped and can_drop and window.is_separable
        if is_dropped:  # what earlier blocks left unchecked concerns the whole window
            window.unchecked = earlier
        window.will_skip()
        window.settle(keep=not is_dropped)
        if can_drop:
            binding.statistics.leave_micro_batch(keep=not is_dropped)

    def _judge_shared(self, verdicts: Sequence[list[torch.Tensor]]) -> None:
        """Let an optimizer hear of what another one of the block has found in shared gradients."""
        if self._scaler.is_identity or not any(self._shared):
            return
        rows = [row for binding in self._bindings for row in binding.window.fresh()]
        fresh = {id(pair.master): gradient for pair, gradient in rows}
        for shared, found in zip(self._shared, verdicts, strict=True):
            present = [fresh[id(pair.master)] for pair in shared if id(pair.master) in fresh]
            found.extend(non_finite(present))

    def _is_left_for_later(self, check: OverflowCheck) -> bool:
        """Whether the step will make the check, or ask the device to."""
        overflow = None if self._on_device is None else check.verdict()
        if self._on_device is not None and overflow is not None:
            group, loss = self._bindings[0].group, self._loss.detach()
            check.on_overflow = functools.partial(_note_late, group, self._scaler, loss)
            self._on_device.take(check, overflow)
        elif self._delay_overflow_check:
            check.on_overflow = self._diagnose
            self._loss = self._loss.detach()  # keep no graph until then
        return check.on_overflow is not None

    def _scale_on_device(self) -> DeviceScale | None:
        """The scale, if nobody needs to know now what will become of the steps."""
        can_wait = (
            not (self._delay_unscale or self._delay_overflow_check or self._scaler.is_identity)
            and self._bindings
            and self._bindings[0].policy.overflow_drops == "window"
            and all(
                one.window.stage is Stage.READY and skips_by_itself(one.optimizer)
                for one in self._bindings
            )
        )
        return scale_on(self._scaler, self._loss.device) if can_wait else None

    def _unscale_bystander(self, window: GradientWindow) -> None:
        """An overflow among its gradients matters when it steps, and is looked for then."""
        verdicts = window.unscale(self._scaler)
        window.settle(keep=True)
        if verdicts:
            own = LossScaler.static(1.0)  # no scale follows from it
            check = OverflowCheck(own, [verdicts], skip_together=True, sync_overflow=False)
            window.unchecked.append((check, 0))

    def _report(self, scale: float) -> OverflowReport | None:
        """A quiet line for what is normal; a diagnosis, once, where no smaller scale can help."""
        scaler, report = self._scaler, self._diagnose(scale)
        if scaler.is_dynamic and scale > scaler.min_scale and report.may_smaller_scale_help:
            self._bindings[0].group.log_overflow(scale)
            return None
        if scaler.is_reported:
            return None
        scaler.is_reported = True
        return report

    def _diagnose(self, scale: float) -> OverflowReport:
        """Look at the gradients, for whoever asks later: the step is skipped, so there is time."""
        scaler = self._scaler
        report = report_overflow(
            self._loss,
            scale,
            scaler,
            [row for binding in self._bindings for row in binding.named_gradients()],
            is_loss_scaled=self._is_from_gradients,
        )
        self._bindings[0].group.note_overflow(report)
        return report


def _of_stage(bindings: Sequence[OptimizerBinding], stage: Stage) -> tuple[OptimizerBinding, ...]:
    return tuple(one for one in bindings if one.window.stage is stage)


def _abandon(bindings: Sequence[OptimizerBinding]) -> None:
    for binding in bindings:
        binding.window.abandon()


def _scaled(loss: torch.Tensor, scale: Scale) -> torch.Tensor:
    wide = loss if loss.dtype is torch.float64 else loss.float()
    return wide * scale


def _note_late(group: ScalerGroup, scaler: LossScaler, loss: torch.Tensor, scale: float) -> None:
    """An overflow that was left to the device: its gradients are gone."""
    group.log_overflow(scale)
    group.note_overflow(report_overflow(loss, scale, scaler, ()))
