"""One check of the gradients of a block, made at its end or later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from amp_patch.scaling.gradients import each_found
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.ranks import agreed


class OverflowCheck:
    """The verdicts on one block, and what follows from them for each of its optimizers.

    `verdicts` has a list of device tensors for each optimizer. The scaler is updated once, when the
    check is made, whoever asks for it.
    """

    def __init__(
        self,
        scaler: LossScaler,
        verdicts: Sequence[Sequence[torch.Tensor]],
        *,
        skip_together: bool,
        sync_overflow: bool,
    ) -> None:
        self.has_overflow = False
        self.skips: tuple[bool, ...] = ()  # for each optimizer, once the check is made
        self.on_overflow: Callable[[], object] | None = None  # told if there is one, then
        self._scaler = scaler
        self.verdicts = agreed(verdicts) if sync_overflow else verdicts
        self._skip_together = skip_together

    def conclude(self, overflows: Sequence[bool | None]) -> None:
        """Take the outcome for each optimizer, None if it had no gradients; tell the scaler."""
        self.has_overflow = any(overflows)
        is_shared = self._skip_together
        self.skips = tuple(self.has_overflow if is_shared else bool(own) for own in overflows)
        if any(own is not None for own in overflows):  # else there were no gradients at all
            self._scaler.update(self.has_overflow)
        if self.has_overflow and self.on_overflow is not None:
            self.on_overflow()


def make_checks(checks: Iterable[OverflowCheck]) -> None:
    """Make those of `checks` that are still open, in order, with one wait for the device."""
    pending = [check for check in dict.fromkeys(checks) if not check.skips]
    overflows = iter(each_found([one for check in pending for one in check.verdicts]))
    for check in pending:
        check.conclude([next(overflows) for _ in check.verdicts])
