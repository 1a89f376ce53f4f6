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
        # Told if there is one, then, with the scale at which it happened.
        self.on_overflow: Callable[[float], object] | None = None
        self.scaler = scaler
        self.verdicts = agreed(verdicts) if sync_overflow else verdicts
        self._skip_together = skip_together

    def conclude(self, overflows: Sequence[bool | None]) -> None:
        """Take the outcome for each optimizer, None if it had no gradients; tell the scaler."""
        scale = self.scaler.scale
        self.has_overflow = any(overflows)
        is_shared = self._skip_together
        self.skips = tuple(self.has_overflow if is_shared else bool(own) for own in overflows)
        if any(own is not None for own in overflows):  # else there were no gradients at all
            self.scaler.update(self.has_overflow)
        if self.has_overflow and self.on_overflow is not None:
            self.on_overflow(scale)

    def verdict(self, position: int | None = None) -> torch.Tensor | None:
        """On its device: above 0 if there is an overflow for the optimizer there, or for any.

        None where there were no gradients to test.
        """
        is_for_all = position is None or self._skip_together
        groups = self.verdicts if is_for_all else [self.verdicts[position or 0]]
        return worst(verdict for group in groups for verdict in group)


def worst(verdicts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The largest of `verdicts`, on the device of the first; None if there are none."""
    found = [verdict for verdict in verdicts if verdict is not None]
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack([verdict.to(found[0].device) for verdict in found]).amax()


def make_checks(checks: Iterable[OverflowCheck]) -> None:
    """Make those of `checks` that are still open, in order, with one wait for the device."""
    checks = list(checks)
    for check in checks:
        check.scaler.catch_up()  # earlier checks of the same scaler come first
    pending = [check for check in dict.fromkeys(checks) if not check.skips]
    if not pending:
        return
    overflows = iter(each_found([one for check in pending for one in check.verdicts]))
    for check in pending:
        check.conclude([next(overflows) for _ in check.verdicts])
