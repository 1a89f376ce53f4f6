"""The loss scalers of apex.fp16_utils, under which their state was pickled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def to_python_float(value: Any) -> float:
    """The number in a tensor, or in the first place of a sequence.

    >>> to_python_float(torch.tensor([2.0]))
    2.0
    """
    return value.item() if hasattr(value, "item") else value[0]  # type: ignore[no-any-return]


class LossScaler:
    """A loss scale that stays what it is, and does not look for overflows."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The factor."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """False: nothing would follow from it."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """For a backward hook: every gradient times the scale."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of the scaled loss."""
        torch.autograd.backward(loss * self.loss_scale, retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that is divided by `scale_factor` at an overflow, and multiplied by it every
    `scale_window` iterations since the last one.

        >>> scaler = DynamicLossScaler(init_scale=8.0)
        >>> scaler.update_scale(True)
        >>> scaler.loss_scale
        4.0
    """

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether any element of any gradient is inf or NaN. Synchronises."""
        gradients = [p.grad for p in params if p.grad is not None]
        return not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def update_scale(self, overflow: bool) -> None:
        """Account for one iteration. The scale does not fall below 1."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
