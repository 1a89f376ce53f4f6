"""Keep the running statistics of norms from before a step that may be skipped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from amp_patch.casts.patcher import Patcher
from amp_patch.hooks import ModelHook

_Row = list[tuple[torch.Tensor, torch.Tensor]]  # the buffers of a layer, and their values


class RunningStatistics:
    """The buffers of a model's BatchNorm and InstanceNorm layers, as before the present window.

    A training forward changes them before anybody knows whether its step will be skipped. The first
    one after a step saves them, a skip puts them back. Layers are held weakly.
    """

    def __init__(self) -> None:
        self._norms: list[weakref.ref[nn.Module]] = []
        self._saved: list[_Row] = []  # for each layer; empty before the first forward
        self._kept: list[_Row] = []  # after the last micro-batch, or before a forward of no window
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> RunningStatistics:
        return RunningStatistics()  # a copy of the model has no optimizer that skips

    def guard(self, model: nn.Module, modules: Iterable[nn.Module], patcher: Patcher) -> None:
        """Save before each training forward of `model` that begins a window.

        `modules` are those that have come into it since the last call.
        """
        norms: list[Any] = [one for one in modules if isinstance(one, _NormBase)]
        if not norms or isinstance(model, torch.jit.ScriptModule):
            return
        if not self._norms:
            hook = model.register_forward_pre_hook(SaveStatistics(self))
            patcher.on_restore(hook.remove)
        for norm in norms:
            loading = norm.register_load_state_dict_post_hook(FollowLoad(self))
            patcher.on_restore(loading.remove)
        with self._lock:
            self._norms += map(weakref.ref, norms)
            for rows in filter(None, (self._saved, self._kept)):
                rows.extend(map(_row_of, norms))

    def save(self, *, begins_window: bool) -> None:
        """Remember the statistics, unless earlier ones of this window are remembered.

        A forward without gradients begins no window. It may still need mending.
        """
        with self._lock:  # replicas of the model run on threads
            if begins_window and not self._saved:
                self._saved = [_row_of(one()) for one in self._norms]
            elif not self._saved and not self._kept:
                self._kept = [_row_of(one()) for one in self._norms]

    def restore(self, overflow: torch.Tensor | None = None) -> None:
        """Put back what was saved: the step is skipped.

        With `overflow`, a number on a device, if that is above 0.
        """
        for row in self._saved:
            _put_back(row, None if overflow is None else overflow > 0)
        if not self._saved:  # there was only a forward without gradients
            self.mend(overflow)
        self.forget()

    def mend(self, overflow: torch.Tensor | None = None) -> None:
        """Do so only in layers whose statistics are not finite, and go on with the window."""
        for row in filter(None, self._kept or self._saved):
            poisoned = _is_poisoned(row)
            if overflow is not None:
                poisoned = poisoned & (overflow.to(poisoned.device) > 0)
            _put_back(row, poisoned)

    def keep_micro_batch(self) -> None:
        """From here on a micro-batch that is dropped goes back to the present statistics.

        Not to those that are not finite: another micro-batch had its forward already.
        """
        self._kept = [
            [(buffer, torch.where(_is_poisoned(row), value, buffer)) for buffer, value in row]
            for row in self._kept or self._saved
        ]

    def drop_micro_batch(self) -> None:
        """Put back the statistics of before this micro-batch, and go on with the window."""
        for row in self._kept or self._saved:
            _put_back(row)

    def follow_load(self, norm: nn.Module) -> None:
        """Values were loaded into `norm`: these are what a skip puts back."""
        with self._lock:
            for rows in filter(None, (self._saved, self._kept)):
                for i, reference in enumerate(self._norms):
                    if reference() is norm:
                        rows[i] = _row_of(norm)

    def forget(self) -> None:
        """The step was taken."""
        self._saved, self._kept = [], []


class StepStatistics:
    """The statistics that depend on the step of one optimizer.

    Its `own` go back whole when it skips. Of others, among `everywhere`, a forward may have had to
    do with it, as a GAN's critic has with the step of the generator: they are mended.
    """

    def __init__(
        self, own: Iterable[RunningStatistics], everywhere: Iterable[RunningStatistics]
    ) -> None:
        self._own = tuple(own)
        self._everywhere = everywhere

    def restore(self, overflow: torch.Tensor | None = None) -> None:
        """The step is skipped. With `overflow`, a number on a device, if that is above 0."""
        for one in self._own:
            one.restore(overflow)
        self._mend_others(overflow)

    def leave_micro_batch(self, *, keep: bool) -> None:
        """A block has kept its gradients, or dropped them for an overflow."""
        for one in self._own:
            (one.keep_micro_batch if keep else one.drop_micro_batch)()
        if not keep:
            self._mend_others()

    def forget(self) -> None:
        """The step was taken."""
        for one in self._own:
            one.forget()

    def _mend_others(self, overflow: torch.Tensor | None = None) -> None:
        for one in list(self._everywhere):
            if one not in self._own:
                one.mend(overflow)


class ModelParts(NamedTuple):
    """What a binding has to do with one model whose parameters the optimizer updates."""

    model: weakref.ref[nn.Module]
    statistics: RunningStatistics


class SaveStatistics(ModelHook):
    """A forward pre-hook that saves the statistics in training."""

    def __init__(self, statistics: RunningStatistics) -> None:
        self.statistics = statistics

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training and not torch.compiler.is_compiling():
            self.statistics.save(begins_window=torch.is_grad_enabled())


class FollowLoad(ModelHook):
    """A hook after `load_state_dict` of a norm."""

    def __init__(self, statistics: RunningStatistics) -> None:
        self.statistics = statistics

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.statistics.follow_load(module)


def _row_of(norm: nn.Module | None) -> _Row:
    buffers = [] if norm is None else norm.buffers(recurse=False)
    return [(buffer, buffer.detach().clone()) for buffer in buffers]


@torch.no_grad()
def _put_back(row: _Row, where: torch.Tensor | None = None) -> None:
    for buffer, saved in row:
        # Through `data`: a graph that is yet to be run may hold the buffer, at any version. torch
        # itself does not count what a forward writes into it.
        uncounted = buffer.data
        if where is None:
            uncounted.copy_(saved)
        else:
            uncounted.copy_(torch.where(where.to(buffer.device), saved, uncounted))


def _is_poisoned(row: _Row) -> torch.Tensor:
    """On its device: whether any statistic of the layer is inf or NaN."""
    return torch.stack([~torch.isfinite(buffer).all() for buffer, _ in row]).any()
