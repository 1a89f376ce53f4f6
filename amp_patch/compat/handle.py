"""The interface of 2018: `handle = amp.init()`, `handle.scale_loss`, `handle.wrap_optimizer`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from amp_patch.call_setup import Setup
from amp_patch.casts.rules import OpRule
from amp_patch.errors import AmpError
from amp_patch.policy import Policy
from amp_patch.slot import slot
from amp_patch.training import clear_cache, disable_casts, scale_loss

ScaledLoss = AbstractContextManager[torch.Tensor]


class AmpHandle:
    """Casts around operations, and loss scales for optimizers as they come.

    Of `init`: it switches the casts on, without a model. Of `initialize`: it only tells of them.
    """

    def __init__(
        self,
        policy: Policy,
        rules: tuple[OpRule, ...],
        verbose: bool = False,
        has_cache: bool = True,
    ) -> None:
        self.verbose = verbose
        self.has_cache = has_cache  # whether weights are cast once an iteration
        self._policy = policy
        self._rules = rules
        self._anchor = nn.Module()  # casts last as long as some model wants them

    def is_active(self) -> bool:
        """Whether casts are installed."""
        return slot.session is not None and slot.session.casts.is_there

    def switch_on(self) -> None:
        """Install the casts."""
        session = slot.open()
        session.add([self._anchor], [], self._setup(1))
        session.context.cache.clear()
        session.context.cache.is_on = self.has_cache

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> ScaledLoss:
        """As `amp.scale_loss`, for an optimizer that may be new."""
        if not self.is_active():
            return nullcontext(loss)
        self.bind(optimizer)
        return scale_loss(loss, optimizer)

    def bind(self, optimizer: Any, num_loss: int = 1) -> None:
        """Give `optimizer` its loss scales, if it has none."""
        session = slot.open()
        try:
            session.binding_of(optimizer, "scale_loss")
        except AmpError:
            session.add([], [optimizer], self._setup(num_loss))

    def _setup(self, num_losses: int) -> Setup:
        return Setup(self._policy, num_losses, is_verbose=self.verbose, rules=self._rules)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """`optimizer` with a `scale_loss` of its own."""
        return OptimWrapper(optimizer, self, num_loss)

    def _deactivate(self) -> None:
        slot.close()

    def _disable_casts(self) -> AbstractContextManager[None]:
        return disable_casts()

    def _clear_cache(self) -> None:
        clear_cache()


class NoOpHandle:
    """What `init(enabled=False)` gives: nothing is cast and nothing is scaled."""

    verbose = False
    has_cache = False

    def is_active(self) -> bool:
        """No."""
        return False

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> ScaledLoss:
        """The loss itself."""
        return nullcontext(loss)

    def bind(self, optimizer: Any, num_loss: int = 1) -> None:
        """Do nothing."""

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """`optimizer` with a `scale_loss` that does nothing."""
        return OptimWrapper(optimizer, self, num_loss)

    def _deactivate(self) -> None:
        pass

    def _disable_casts(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _clear_cache(self) -> None:
        pass


class OptimWrapper:
    """An optimizer with `scale_loss(loss)`: the n-th of a step has the n-th of its scales."""

    def __init__(self, optimizer: Any, amp_handle: AmpHandle | NoOpHandle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        if amp_handle.is_active():
            amp_handle.bind(optimizer, num_loss)

    def scale_loss(self, loss: torch.Tensor) -> ScaledLoss:
        """As `amp.scale_loss`."""
        if not self._handle.is_active():
            return nullcontext(loss)
        loss_id = self._loss_idx % self._num_loss
        self._loss_idx += 1
        return scale_loss(loss, self._optimizer, loss_id=loss_id)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """That of the optimizer; the next loss is the first again."""
        self._loss_idx = 0
        return self._optimizer.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
