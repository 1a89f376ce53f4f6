"""The block around backward: scale the loss, then unscale and check the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from amp_patch.casts.cache import CastCache
from amp_patch.errors import warn
from amp_patch.scaling.gradients import each_found
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.optimizer_binding import OptimizerBinding
from amp_patch.scaling.overflow_report import report_overflow
from amp_patch.scaling.ranks import agreed


class ScaledLoss:
    """Context manager: gives `loss` scaled; leaves gradients of `bindings` unscaled and checked.

    All of `bindings` skip their next step together. If the body raises, their gradients are what
    they were. `cache` is empty afterwards. Synchronises once, where a check is made.
    """

    __slots__ = (
        "_bindings",
        "_cache",
        "_delay_overflow_check",
        "_delay_unscale",
        "_loss",
        "_scaler",
    )

    def __init__(
        self,
        loss: torch.Tensor,
        bindings: Sequence[OptimizerBinding],
        scaler: LossScaler,
        cache: CastCache,
        *,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._loss = loss
        self._bindings = bindings
        self._scaler = scaler
        self._cache = cache
        self._delay_unscale = delay_unscale and not scaler.is_identity
        self._delay_overflow_check = delay_overflow_check

    def __enter__(self) -> torch.Tensor:
        claimed: set[int] = set()
        opened: list[OptimizerBinding] = []
        try:
            for binding in self._bindings:
                binding.before_backward(self._scaler, claimed)
                opened.append(binding)
                if len(self._bindings) > 1:
                    claimed.update(id(pair.master) for pair in binding.pairs())
            return _scaled(self._loss, self._scaler)
        except BaseException:
            _abandon(opened)
            raise

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is not None:
                _abandon(self._bindings)
            elif self._delay_unscale:
                for binding in self._bindings:
                    binding.window.delay()
            else:
                _unscale(self._loss, self._bindings, self._scaler, self._delay_overflow_check)
        finally:
            self._cache.clear()


def _abandon(bindings: Sequence[OptimizerBinding]) -> None:
    for binding in bindings:
        binding.window.abandon()


def _scaled(loss: torch.Tensor, scaler: LossScaler) -> torch.Tensor:
    if scaler.is_identity:
        return loss
    wide = loss if loss.dtype is torch.float64 else loss.float()
    return wide * scaler.scale


def _unscale(
    loss: torch.Tensor, bindings: Sequence[OptimizerBinding], scaler: LossScaler, delays_check: bool
) -> None:
    """Unscale and check the gradients of all bindings, with one wait for the device."""
    policy = bindings[0].policy
    found = [binding.window.unscale(scaler) for binding in bindings]
    if delays_check or scaler.is_identity:
        for binding, verdicts in zip(bindings, found, strict=True):
            binding.window.settle(keep=True)
            if verdicts:
                binding.window.unchecked.append((scaler, verdicts))
        return
    earlier = [binding.window.take_unchecked() for binding in bindings]
    if policy.sync_overflow:
        found = [agreed(verdicts) for verdicts in found]
    overflows = each_found([one + other for one, other in zip(found, earlier, strict=True)])
    has_overflow = any(overflows)
    if has_overflow:
        _report(loss, bindings, scaler)
    for binding, own, unchecked in zip(bindings, overflows, earlier, strict=True):
        is_hit = has_overflow if policy.skip_together else own
        is_dropped = is_hit and policy.overflow_drops == "micro_batch" and not unchecked
        binding.window.settle(keep=not is_dropped)
        binding.window.has_overflow |= is_hit and not is_dropped
    scaler.update(has_overflow)


def _report(loss: torch.Tensor, bindings: Sequence[OptimizerBinding], scaler: LossScaler) -> None:
    """A quiet line for what is normal; a diagnosis, once, where no smaller scale can help."""
    group = bindings[0].group
    can_back_off = scaler.is_dynamic and not scaler.is_at_floor
    if can_back_off and bool(torch.isfinite(loss.detach()).all()):
        group.log_overflow(scaler)
    elif not scaler.is_reported:
        scaler.is_reported = True
        named = [row for binding in bindings for row in binding.named_gradients()]
        warn(str(report_overflow(loss, scaler.scale, scaler.skipped_in_a_row + 1, named)))
