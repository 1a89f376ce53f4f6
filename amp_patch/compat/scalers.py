"""Loss scalers with the attributes of apex: reads are true, writes take effect."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from typing_extensions import Self

from amp_patch.errors import AmpError
from amp_patch.scaling.loss_scaler import DynamicLossScale
from amp_patch.scaling.loss_scaler import LossScaler as Scaler
from amp_patch.slot import slot

_DEFAULT_CEILING = 2.0**24


class LossScaler:
    """What scripts reach as `_amp_state.loss_scalers[i]`. By itself: a scaler to be driven by hand.

    >>> scaler = LossScaler("dynamic")
    >>> scaler._loss_scale = 2.0**20
    >>> scaler.loss_scale()
    1048576.0
    """

    def __init__(
        self,
        loss_scale: Any,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = _DEFAULT_CEILING,
    ) -> None:
        if loss_scale == "dynamic":
            scaler = Scaler.dynamic(
                min_scale=1.0 if min_loss_scale is None else min_loss_scale,
                max_scale=max_loss_scale,
                config=DynamicLossScale(init_scale, scale_factor, 1 / scale_factor, scale_window),
            )
        else:
            scaler = Scaler.static(float(loss_scale))
        self._own_scaler = scaler
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    @classmethod
    def of(cls, scaler: Scaler) -> Self:
        """The face of `scaler`."""
        face = cls(1.0)
        face._own_scaler = scaler
        return face

    def rebound(self, scaler: Scaler) -> Scaler:
        """Become the face of `scaler`. Returns the scaler that was behind this one."""
        before, self._own_scaler = self._scaler, scaler
        return before

    @property
    def _scaler(self) -> Scaler:
        """The scaler, told of what fused optimizers have left to the device."""
        self._own_scaler.catch_up()
        return self._own_scaler

    def loss_scale(self) -> float:
        """The present scale."""
        return self._scaler.scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts."""
        return self._scaler.is_dynamic

    @property
    def _loss_scale(self) -> float:
        return self._scaler.scale

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        scale = float(value)
        if not 0 < scale < float("inf"):
            raise AmpError(f"_loss_scale: expected a finite number above zero, found {value!r}")
        self._scaler.scale = scale
        if not self._scaler.is_dynamic:
            self._scaler.min_scale = self._scaler.max_scale = scale

    @property
    def _unskipped(self) -> int:
        return self._scaler.unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        scale = self._scaler.scale
        self._scaler.load_state_dict({**self._scaler.state_dict(), "unskipped": int(value)})
        self._scaler.scale = scale  # one beyond its bounds stays there, as a script put it

    @property
    def _has_overflow(self) -> bool:
        return self._scaler.skipped_in_a_row > 0

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._scaler.skipped_in_a_row = max(self._scaler.skipped_in_a_row, 1) if value else 0

    @property
    def _max_loss_scale(self) -> float:
        return self._scaler.max_scale

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: float) -> None:
        self._scaler.max_scale = float(value)

    @property
    def _min_loss_scale(self) -> float:
        return self._scaler.min_scale

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        self._scaler.min_scale = 1.0 if value is None else float(value)

    @property
    def _scale_seq_len(self) -> int:
        return self._scaler.growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self._scaler.growth_interval = int(value)

    def clear_overflow_state(self) -> None:
        """Forget an overflow that was noted and not yet accounted for."""
        self._has_overflow = False
        self._overflow_buf.zero_()

    def update_scale(self) -> bool:
        """Account for one iteration, by `_has_overflow` or `_overflow_buf`. Synchronises.

        For loops that check gradients by themselves: `scale_loss` has done it already. Returns
        whether the step should be skipped.
        """
        has_overflow = self._has_overflow or bool(self._overflow_buf.any())
        return self._scaler.update(has_overflow)

    def adopt(self, loss_scale: Any) -> None:
        """Become dynamic, or static at a number."""
        usual = DynamicLossScale()
        if loss_scale == "dynamic":
            self._scaler.growth_factor = usual.growth_factor
            self._scaler.backoff_factor = usual.backoff_factor
            self._scaler.min_scale, self._scaler.max_scale = 1.0, _DEFAULT_CEILING
            return
        self._scaler.growth_factor = self._scaler.backoff_factor = 1.0
        self._loss_scale = loss_scale


class LossScalers(Sequence[LossScaler]):
    """The scalers of this process, the newest `initialize` call's first. Always of now."""

    def __init__(self) -> None:
        self._faces: weakref.WeakValueDictionary[int, LossScaler] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return sum(1 for _ in self._scalers())

    @overload
    def __getitem__(self, index: int) -> LossScaler: ...

    @overload
    def __getitem__(self, index: slice) -> list[LossScaler]: ...

    def __getitem__(self, index: int | slice) -> LossScaler | list[LossScaler]:
        if isinstance(index, slice):
            return [self._face(scaler) for scaler in list(self._scalers())[index]]
        return self._face(list(self._scalers())[index])

    def __setitem__(self, index: int, value: LossScaler) -> None:
        """Let the scaler of now count as `value` does, and be reached through it."""
        own = list(self._scalers())[index]
        vars(own).update(vars(value.rebound(own)))
        self._faces[id(own)] = value

    def _face(self, scaler: Scaler) -> LossScaler:
        face = self._faces.get(id(scaler))
        if face is None:
            face = self._faces[id(scaler)] = LossScaler.of(scaler)
        return face

    def _scalers(self) -> Iterator[Scaler]:
        session = slot.session
        count = 0
        while session is not None:
            try:
                scaler = session.scalers.scaler(count)
            except AmpError:
                return
            yield scaler
            count += 1
