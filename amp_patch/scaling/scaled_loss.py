"""The block around backward: scale the loss, then unscale and check the gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from amp_patch.casts.cache import CastCache
from amp_patch.errors import warn
from amp_patch.scaling import gradients
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.optimizer_binding import OptimizerBinding

logger = logging.getLogger("amp_patch")


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
                _unscale(self._bindings, self._scaler, self._delay_overflow_check)
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


def _unscale(bindings: Sequence[OptimizerBinding], scaler: LossScaler, delays_check: bool) -> None:
    found: list[torch.Tensor] = []
    for binding in bindings:
        verdicts = binding.window.finish(scaler)
        if delays_check:
            binding.window.unchecked.append((scaler, verdicts))
        else:
            found += verdicts
            found += binding.window.take_unchecked()
    if delays_check:
        return
    was_at_floor = scaler.is_at_floor
    if scaler.update(gradients.any_found(found)):
        for binding in bindings:
            binding.window.has_overflow = True
        _report(scaler, bindings[0], was_at_floor)


def _report(scaler: LossScaler, binding: OptimizerBinding, was_at_floor: bool) -> None:
    if was_at_floor:
        warn(
            f"gradients are inf or NaN at the smallest loss scale allowed, {scaler.scale:g}, and "
            "every such step is skipped: the loss is probably non-finite without any scaling. Look "
            "at the loss and the learning rate; opt_level='O4' (bfloat16) has the range of FP32; a "
            "lower min_loss_scale allows scales below this one"
        )
    elif binding.group.logs_overflows:
        logger.info(
            "Gradients overflowed: the step is skipped, the loss scale is now %g. Normal at the "
            "start of a run, and now and then later",
            scaler.scale,
        )
