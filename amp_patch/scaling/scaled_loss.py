"""The block around backward: scale the loss, then unscale and check the gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from amp_patch.casts.cache import CastCache
from amp_patch.errors import warn
from amp_patch.scaling import gradients
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.optimizer_binding import OptimizerBinding

logger = logging.getLogger("amp_patch")


@contextmanager
def scaled_loss(
    loss: torch.Tensor,
    bindings: Sequence[OptimizerBinding],
    scaler: LossScaler,
    cache: CastCache,
    *,
    delay_unscale: bool,
    delay_overflow_check: bool,
) -> Iterator[torch.Tensor]:
    """Yield `loss` scaled; leave the gradients of `bindings` unscaled and checked.

    All of `bindings` skip their next step together. If the body raises, their gradients are what
    they were. `cache` is empty afterwards. Synchronises once, where a check is made.
    """
    opened: list[OptimizerBinding] = []
    claimed: set[int] = set()
    try:
        for binding in bindings:
            binding.before_backward(scaler, claimed)
            opened.append(binding)
        yield _scaled(loss, scaler)
    except BaseException:
        for binding in opened:
            binding.window.abandon()
        raise
    else:
        if delay_unscale and not scaler.is_identity:
            for binding in bindings:
                binding.window.delay()
        else:
            _unscale(bindings, scaler, delay_overflow_check)
    finally:
        cache.clear()


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
