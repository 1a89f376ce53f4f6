"""When the loss scale grows and when it backs off. Plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INITIAL_SCALE = 2.0**16
GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 2000


class LossScaler:
    """The scale of one loss (Micikevicius et al., "Mixed Precision Training", ICLR 2018, 3.2).

    The scale doubles after `growth_interval` updates in a row without overflow and halves on an
    overflow, always inside [`min_scale`, `max_scale`]. A static scale is one whose factors are 1.

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
        min_scale: float,
        max_scale: float,
    ) -> None:
        self.scale = scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = max_scale
        self._unskipped = 0

    @classmethod
    def dynamic(cls, *, min_scale: float, max_scale: float) -> LossScaler:
        """A scale that starts at 2^16, or at the nearest bound, and adapts."""
        return cls(
            min(max(INITIAL_SCALE, min_scale), max_scale),
            growth_factor=GROWTH_FACTOR,
            backoff_factor=BACKOFF_FACTOR,
            growth_interval=GROWTH_INTERVAL,
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
            growth_interval=GROWTH_INTERVAL,
            min_scale=scale,
            max_scale=scale,
        )

    @property
    def is_dynamic(self) -> bool:
        """Whether an update can change the scale."""
        return self.backoff_factor != 1.0

    @property
    def is_identity(self) -> bool:
        """Whether scaling with it changes nothing, now and later: a static scale of 1."""
        return self.scale == 1.0 and not self.is_dynamic

    @property
    def is_at_floor(self) -> bool:
        """Whether a dynamic scale can back off no further."""
        return self.is_dynamic and self.scale <= self.min_scale

    def update(self, overflow: bool) -> bool:
        """Account for one checked backward pass. Returns whether its step must be skipped."""
        if overflow:
            self._unskipped = 0
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return True
        self._unskipped += 1
        if self._unskipped >= self.growth_interval:
            self._unskipped = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)
        return False

    def state_dict(self) -> dict[str, float | int]:
        """`{"loss_scale": ..., "unskipped": ...}`, the keys of checkpoints in the field."""
        return {"loss_scale": self.scale, "unskipped": self._unskipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. A static scale stays as it was configured."""
        if self.is_dynamic:
            self.scale = min(max(float(state["loss_scale"]), self.min_scale), self.max_scale)
            self._unskipped = int(state["unskipped"])
