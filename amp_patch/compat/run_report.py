"""What happened in a run: levels, steps, loss scales, time in casts; written as JSON at its end."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_patch.casts import arguments
from amp_patch.casts.cache import CastCache
from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.compat.amp_state import AmpState
from amp_patch.policy import Policy
from amp_patch.scaling.optimizer_binding import OptimizerBinding
from amp_patch.scaling.ranks import rank
from amp_patch.scaling.scaler_groups import ScalerGroup, ScalerGroups
from amp_patch.version import __version__
from amp_patch.weights.model_casting import CastInputs, CastOutputs
from amp_patch.weights.param_pairs import ParamPairs

_CASTS: tuple[tuple[type, str], ...] = (
    (CastCache, "cast"),
    (CastContext, "cast"),
    (CastInputs, "cast"),
    (CastOutputs, "cast"),
    (ParamPairs, "copy_to_model"),
)
_LAST = -1_000_000  # of the finalizers of a process


class RunReport:
    """Counts from its construction to `close`. Times are those of the Python calls: on a device
    that works asynchronously, of the launches.
    """

    def __init__(self) -> None:
        self._levels: list[str] = []
        self._calls = 0
        self._steps = 0
        self._skipped = 0
        self._seconds = 0.0
        self._is_timing = False
        self._groups: list[ScalerGroup] = []
        self._rank = 0
        self._patcher = Patcher()
        self._watch(AmpState, "note", self._on_initialize)
        self._watch(ScalerGroups, "add", self._on_scalers)
        self._watch(OptimizerBinding, "skip_step", self._on_skip)
        for owner, name in _CASTS:
            self._patcher.replace(owner, name, self._timed(vars(owner)[name]))
        table = {dtype: self._timed(cast) for dtype, cast in vars(arguments)["CONVERSIONS"].items()}
        self._patcher.replace(arguments, "CONVERSIONS", table)
        handle = register_optimizer_step_post_hook(self._on_step)
        self._patcher.on_restore(handle.remove)

    @property
    def is_of_training(self) -> bool:
        """Whether anything was initialized in this process, which is the first rank of its kind."""
        return self._calls > 0 and self._rank == 0

    def close(self) -> None:
        """Stop counting. A second call does nothing."""
        self._is_timing = True  # casts that are in place go on to call what is timed
        self._patcher.restore()

    def figures(self) -> dict[str, Any]:
        """The report, as plain values."""
        scalers = [scaler for group in reversed(self._groups) for scaler in group.scalers]
        return {
            "amp_patch": __version__,
            "level": self._levels[-1] if self._levels else None,
            "levels": self._levels,
            "initialize_calls": self._calls,
            "steps": self._steps,
            "skipped_steps": self._skipped,
            "loss_scales": [scaler.scale for scaler in scalers],
            "seconds_in_casts": round(self._seconds, 6),
        }

    def write(self, path: str) -> None:
        """Write it to `path`, whole or not at all."""
        target = Path(path)
        text = json.dumps(self.figures(), indent=2) + "\n"
        if target.exists() and not target.is_file():  # a device or a pipe takes the text itself
            target.write_text(text, encoding="utf-8")
            return
        temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)

    def _watch(self, owner: type, name: str, listener: Callable[..., None]) -> None:
        original = vars(owner)[name]

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            listener(*args[1:])
            return original(*args, **kwargs)

        self._patcher.replace(owner, name, watched)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_timing:  # one cast that calls another counts once
                return original(*args, **kwargs)
            self._is_timing, start = True, time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._is_timing = False
                self._seconds += time.perf_counter() - start

        return timed

    def _on_initialize(self, policy: Policy | None, num_losses: int) -> None:
        self._calls += 1
        self._rank = rank()
        self._levels.append("disabled" if policy is None else policy.opt_level)

    def _on_scalers(self, group: ScalerGroup) -> None:
        self._groups.append(group)

    def _on_skip(self) -> None:
        self._skipped += 1

    def _on_step(self, *_: Any) -> None:
        self._steps += 1
        self._rank = max(self._rank, rank())  # of a fork, it may be known after `initialize`


def start_report(path: str | None, *, is_main: bool) -> Callable[[], None]:
    """Begin to count for the report in `path`, if there is one. Returns what ends and writes it.

    Of the processes that trained, the one with the most steps tells, forked ones among them; of
    those that did not, the main one, if nobody else does.
    """
    if path is None:
        return _nothing_to_write
    report = RunReport()
    register_after_fork(report, functools.partial(_continue_in_fork, path=path))
    return functools.partial(_finish, report, path, is_main=is_main)


def _nothing_to_write() -> None:
    """There is no report."""


def _continue_in_fork(report: RunReport, path: str) -> None:
    """A process of `multiprocessing` ends without the exit handlers, but with its finalizers."""
    before = report.figures()

    def finish() -> None:
        if report.figures() != before:  # a data loader's worker has nothing to tell
            _finish(report, path, is_main=False)

    Finalize(None, finish, exitpriority=_LAST)


def _finish(report: RunReport, path: str, *, is_main: bool) -> None:
    report.close()
    told = _steps_in(Path(path))
    if report.figures()["steps"] >= told if report.is_of_training else is_main and told < 0:
        report.write(path)


def _steps_in(path: Path) -> int:
    """The steps in a report that is there; -1 if there is none."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["steps"]) if path.is_file() else -1
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # or it is of something else
        return -1
