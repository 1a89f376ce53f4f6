"""When the loss scale grows and when it backs off. Plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from amp_patch.errors import AmpError

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """How a dynamic loss scale behaves; pass it to `initialize` as `loss_scale`.

    The scale starts at `initial`, is multiplied by `growth_factor` after `growth_interval` clean
    blocks in a row, and by `backoff_factor` at an overflow, the `hysteresis`-th in a row if that is
    above 1. It stays inside [`min_loss_scale`, `max_loss_scale`] of the `initialize` call. The
    defaults are those of the field. Raises AmpError for values that make no sense.

        >>> DynamicLossScale(initial=2.0**12, growth_interval=500).backoff_factor
        0.5
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1

    def __post_init__(self) -> None:
        expected = {
            "initial": (_is_between(0, self.initial, _INFINITY), "a finite number above zero"),
            "growth_factor": (_is_between(1, self.growth_factor, _INFINITY), "a number above 1"),
            "backoff_factor": (_is_between(0, self.backoff_factor, 1), "a number between 0 and 1"),
            "growth_interval": (_is_count(self.growth_interval), "an integer of at least 1"),
            "hysteresis": (_is_count(self.hysteresis), "an integer of at least 1"),
        }
        wrong = [
            f"{name}: expected {what}, found {getattr(self, name)!r}"
            for name, (is_right, what) in expected.items()
            if not is_right
        ]
        if wrong:
            raise AmpError("DynamicLossScale: " + "; ".join(wrong))


class Ahead(Protocol):
    """Whoever knows of blocks that a scaler was not told of yet."""

    def settle(self) -> None:
        """Tell the scaler."""


class LossScaler:
    """The scale of one loss (Micikevicius et al., "Mixed Precision Training", ICLR 2018, 3.2).

    A static scale is one whose factors are 1. Where `ahead` is set, whoever looks waits for it.

        >>> scaler = LossScaler.dynamic(min_scale=1.0, max_scale=2.0**24)
        >>> scaler.update(overflow=True), scaler.scale
        (True, 32768.0)
    """

    def __init__(
        self,
        scale: float,
        *,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        min_scale: float,
        max_scale: float,
    ) -> None:
        self.ahead: Ahead | None = None
        self._scale = scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.skipped_in_a_row = 0
        self.is_reported = False  # whether the present row of skips was diagnosed
        self.is_in_loss = False  # whether the loss was computed from gradients scaled by this
        self._unskipped = 0

    @classmethod
    def dynamic(
        cls, *, min_scale: float, max_scale: float, config: DynamicLossScale | None = None
    ) -> LossScaler:
        """A scale that adapts, starting at the initial one of `config` or the nearest bound."""
        config = DynamicLossScale() if config is None else config
        return cls(
            min(max(config.initial, min_scale), max_scale),
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
            hysteresis=config.hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )

    @classmethod
    def static(cls, scale: float) -> LossScaler:
        """A scale that stays what it is. An overflow still asks to skip the step."""
        return cls(
            scale,
            growth_factor=1.0,
            backoff_factor=1.0,
            growth_interval=DynamicLossScale().growth_interval,
            hysteresis=1,
            min_scale=scale,
            max_scale=scale,
        )

    @property
    def scale(self) -> float:
        """The scale now."""
        if self.ahead is not None:
            self.catch_up()
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self.catch_up()
        self._scale = scale

    @property
    def unskipped(self) -> int:
        """The clean blocks in a row since the scale changed."""
        self.catch_up()
        return self._unskipped

    def catch_up(self) -> None:
        """Learn what is known elsewhere."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.settle()

    @property
    def is_dynamic(self) -> bool:
        """Whether an update can change the scale."""
        return self.backoff_factor != 1.0

    @property
    def is_identity(self) -> bool:
        """Whether scaling with it changes nothing, now and later: a static scale of 1."""
        return not self.is_dynamic and self._scale == 1.0

    @property
    def is_at_floor(self) -> bool:
        """Whether a dynamic scale can back off no further."""
        return self.is_dynamic and self.scale <= self.min_scale

    def update(self, overflow: bool) -> bool:
        """Account for one checked backward pass. Returns whether its step must be skipped."""
        self.is_in_loss = False
        if overflow:
            self._unskipped = 0
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.hysteresis:
                self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            return True
        self._unskipped += 1
        self.skipped_in_a_row = 0
        self.is_reported = False
        if self._unskipped >= self.growth_interval:
            self._unskipped = 0
            self._scale = min(self._scale * self.growth_factor, self.max_scale)
        return False

    def state_dict(self) -> dict[str, float | int]:
        """`{"loss_scale": ..., "unskipped": ...}`, the keys of checkpoints in the field."""
        state: dict[str, float | int] = {"loss_scale": self.scale, "unskipped": self.unskipped}
        if self.hysteresis > 1:
            state["skipped_in_a_row"] = self.skipped_in_a_row
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. A static scale stays as it was configured."""
        self.catch_up()
        if self.is_dynamic:
            self._scale = min(max(float(state["loss_scale"]), self.min_scale), self.max_scale)
            self._unskipped = int(state["unskipped"])
            self.skipped_in_a_row = int(state.get("skipped_in_a_row", 0))


def _is_between(low: float, value: Any, high: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and low < value < high


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
