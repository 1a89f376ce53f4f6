"""What became of the last step of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from amp_patch.scaling.gradient_window import Checks
from amp_patch.scaling.overflow_check import make_checks
from amp_patch.weights.param_pairs import ParamPair


class StepOutcome:
    """Knows it, or asks the device when somebody wants to know."""

    def __init__(self) -> None:
        self._was_skipped = False
        self._checks: Checks = []  # of the last step, where the device alone knows of it
        self.may_hold_skipped = False  # gradients of that step may be there still

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was. Waits for the device if that alone knows."""
        if self._checks:
            make_checks(check for check, _ in self._checks)
            self._was_skipped = any(check.skips[i] for check, i in self._checks)
            self._checks = []
        return self._was_skipped

    def note(self, *, skipped: bool) -> None:
        """A step begins, or is skipped."""
        self._was_skipped, self._checks = skipped, []

    def leave_open(self, checks: Checks) -> None:
        """`checks` tell of the step that was run."""
        self._checks, self.may_hold_skipped = checks, True

    def forget_gradients(self) -> None:
        """They were cleared."""
        self.may_hold_skipped = False

    def drop_skipped(self, pairs: Sequence[ParamPair]) -> None:
        """Drop gradients that an optimizer did not use, before others are added to them."""
        is_possible, self.may_hold_skipped = self.may_hold_skipped, False
        held = [pair for pair in pairs if is_possible and pair.master.grad is not None]
        for pair in held if held and self.was_skipped else ():
            pair.master.grad = None
