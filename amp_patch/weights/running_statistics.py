"""Keep the running statistics of norms from before a step that may be skipped."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from amp_patch.casts.patcher import Patcher
from amp_patch.hooks import ModelHook


class RunningStatistics:
    """The buffers of a model's BatchNorm and InstanceNorm layers, as before the present window.

    A training forward changes them before anybody knows whether its step will be skipped. The first
    one after a step saves them, a skip puts them back. Layers are held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = [weakref.ref(one) for one in model.modules() if isinstance(one, _NormBase)]
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> RunningStatistics:
        return RunningStatistics(nn.Module())  # a copy of the model has no optimizer that skips

    @property
    def is_empty(self) -> bool:
        """Whether the model has no such layers."""
        return not self._norms

    def save(self) -> None:
        """Remember the statistics, unless earlier ones of this window are remembered."""
        with self._lock:  # replicas of the model run on threads
            if self._saved:
                return
            norms = [norm for norm in (one() for one in self._norms) if norm is not None]
            buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
            self._saved = [(buffer, buffer.detach().clone()) for buffer in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was saved: the step is skipped."""
        for buffer, saved in self._saved:
            buffer.copy_(saved)
        self._saved = []

    @torch.no_grad()
    def restore_where(self, overflow: torch.Tensor) -> None:
        """Put back what was saved if `overflow`, a number on a device, is above 0."""
        for buffer, saved in self._saved:
            is_skipped = overflow.to(buffer.device) > 0
            buffer.copy_(torch.where(is_skipped, saved, buffer))
        self._saved = []

    def forget(self) -> None:
        """The step was taken."""
        self._saved = []


class ModelParts(NamedTuple):
    """What a binding has to do with one model whose parameters the optimizer updates."""

    model: weakref.ref[nn.Module]
    statistics: RunningStatistics


class SaveStatistics(ModelHook):
    """A forward pre-hook that saves the statistics in training."""

    def __init__(self, statistics: RunningStatistics) -> None:
        self.statistics = statistics

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.statistics.save()


def guard_statistics(model: nn.Module, patcher: Patcher) -> RunningStatistics:
    """Save the statistics of `model` before each training forward that begins a window."""
    statistics = RunningStatistics(model)
    if not statistics.is_empty and not isinstance(model, torch.jit.ScriptModule):
        hook = model.register_forward_pre_hook(SaveStatistics(statistics))
        patcher.on_restore(hook.remove)
    return statistics
