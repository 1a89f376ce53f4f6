"""A loss scale that its device keeps up to date, so that nobody has to wait for an outcome."""

from __future__ import annotations

import math
import struct

import torch

from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.overflow_check import OverflowCheck, make_checks

_MOST_OPEN = 64  # blocks that the scaler is not told of, before it is


class DeviceScale:
    """The scale after the blocks that `scaler` was not told of; what a scaler has `ahead` of it.

    The same arithmetic as the scaler's, by torch's own kernel. The scaler learns the outcomes, in
    order and with one wait, when somebody looks at it, and every so many blocks.
    """

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self.device = device
        self.scale = torch.full((), scaler.scale, dtype=torch.float32, device=device)
        self._scaler = scaler
        self._open: list[OverflowCheck] = []
        self._unskipped = torch.full((), scaler.unskipped, dtype=torch.int32, device=device)

    @property
    def is_full(self) -> bool:
        """Whether the scaler should be told."""
        return len(self._open) >= _MOST_OPEN

    def take(self, check: OverflowCheck, overflow: torch.Tensor) -> None:
        """Account for one block. `overflow` is 1.0 if it had one, 0.0 if not, on a device."""
        scaler = self._scaler
        scale = self.scale.clone()  # the graph of the loss needs the one that it had
        torch._amp_update_scale_(
            scale,
            self._unskipped,
            overflow.to(self.device),
            scaler.growth_factor,
            scaler.backoff_factor,
            scaler.growth_interval,
        )
        self.scale = scale.clamp_(scaler.min_scale, scaler.max_scale)
        self._open.append(check)
        scaler.ahead = self

    def settle(self) -> None:
        """Tell the scaler. Synchronises once."""
        checks, self._open = self._open, []
        make_checks(checks)


def scale_on(scaler: LossScaler, device: torch.device) -> DeviceScale | None:
    """The scale of `scaler` on `device`; None where the next block had better be looked at.

    That is after an overflow and where the scale can back off no further, for the diagnosis, and
    where float32 cannot follow the scaler.
    """
    ahead = scaler.ahead
    if isinstance(ahead, DeviceScale):
        if ahead.device == device and not ahead.is_full:
            return ahead
        scaler.catch_up()
    if scaler.skipped_in_a_row or scaler.is_at_floor or not _is_followed_exactly(scaler):
        return None
    return DeviceScale(scaler, device)


def _is_followed_exactly(scaler: LossScaler) -> bool:
    if not scaler.is_dynamic or not hasattr(torch, "_amp_update_scale_"):
        return False
    factors = (scaler.growth_factor, scaler.backoff_factor)
    bounds = (scaler.scale, scaler.min_scale, scaler.max_scale)
    are_powers = all(math.frexp(factor)[0] == 0.5 for factor in factors)
    return scaler.hysteresis == 1 and are_powers and all(map(_is_float32, bounds))


def _is_float32(number: float) -> bool:
    try:
        return bool(struct.unpack("f", struct.pack("f", number))[0] == number)
    except OverflowError:
        return False
