"""The loss scalers of each `initialize` call, and their state by name."""

from __future__ import annotations

import gc
import itertools
import logging
import operator
import weakref
from collections.abc import Mapping
from typing import Any

from amp_patch.errors import AmpError, warn
from amp_patch.parsing import OneScale
from amp_patch.policy import Policy
from amp_patch.scaling.loss_scaler import DynamicLossScale, LossScaler
from amp_patch.scaling.overflow_report import OverflowReport
from amp_patch.scaling.ranks import rank

_MALFORMED = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
_overflows = itertools.count()  # of this process, to know the latest
logger = logging.getLogger("amp_patch")


class ScalerGroup:
    """The scalers of one call, one for each loss. Owned by its models and optimizers."""

    def __init__(self, policy: Policy, num_losses: int, is_verbose: bool) -> None:
        self._is_verbose = is_verbose
        self._level = policy.opt_level
        self._overflows = 0
        self.last_overflow: tuple[int, OverflowReport] | None = None  # and when among all groups'
        scale = policy.loss_scale
        scales = scale if isinstance(scale, tuple) else (scale,) * num_losses
        if len(scales) != num_losses:
            raise AmpError(
                f"loss_scale: expected one for each of num_losses={num_losses}, found {len(scales)}"
            )
        self.scalers = tuple(_make_scaler(one, policy) for one in scales)

    @property
    def is_identity(self) -> bool:
        """Whether no loss is ever scaled, and so no step ever skipped."""
        return all(scaler.is_identity for scaler in self.scalers)

    def scaler(self, loss_id: int) -> LossScaler:
        """The scaler of `loss_id`."""
        return _at(self.scalers, loss_id)

    def log_start(self, models: int, optimizers: int) -> None:
        """A line that says what `initialize` has done."""
        if self._is_verbose:
            logger.info("%s: %d model(s), %d optimizer(s)", self._level, models, optimizers)

    def note_overflow(self, report: OverflowReport) -> None:
        """Keep what is known of the latest overflow."""
        self.last_overflow = (next(_overflows), report)

    def log_overflow(self, scale: float) -> None:
        """A line for a normal overflow: on rank 0, and ever more seldom."""
        self._overflows += 1
        is_seldom = self._overflows <= 3 or self._overflows.bit_count() == 1
        if self._is_verbose and is_seldom and rank() == 0:
            logger.info(
                "Gradients overflowed at loss scale %g: the step is skipped. Normal at the start "
                "of a run, and now and then later (%d so far)",
                scale,
                self._overflows,
            )


class ScalerGroups:
    """The groups that are still alive, the newest first, numbered through from `loss_scaler0`."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[ScalerGroup]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there was never a group."""
        return not self._groups

    def add(self, group: ScalerGroup) -> None:
        """Put `group` before the others."""
        self._groups.insert(0, weakref.ref(group))

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()

    def scaler(self, loss_id: int) -> LossScaler:
        """The scaler of `loss_id`, counted through all groups."""
        return _at(self._scalers(), loss_id)

    def last_overflow(self) -> OverflowReport | None:
        """What is known of the latest overflow in any group, or None."""
        for scaler in self._scalers():
            scaler.catch_up()
        found = [group.last_overflow for group in self._alive() if group.last_overflow is not None]
        return max(found, key=operator.itemgetter(0))[1] if found else None

    def state_dict(self) -> dict[str, dict[str, float | int]]:
        """The state of every scaler, as `loss_scaler0`, `loss_scaler1`, ..."""
        self._forget_dead()
        return {f"loss_scaler{i}": scaler.state_dict() for i, scaler in enumerate(self._scalers())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the scalers by name. All or nothing; names on one side only are reported.

        The state of a `torch.amp.GradScaler` sets the first.
        """
        if "_growth_tracker" in state and "scale" in state:
            first = {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}
            state = {"loss_scaler0": first}
        self._forget_dead()
        known = {f"loss_scaler{i}": scaler for i, scaler in enumerate(self._scalers())}
        checked = {name: _checked(name, state[name]) for name in known if name in state}
        missing, extra = known.keys() - state.keys(), state.keys() - known.keys()
        if missing or extra:
            warn(
                "load_state_dict: the state does not match the losses of this run; missing "
                f"{sorted(missing) or 'none'}, not used {sorted(map(str, extra)) or 'none'}"
            )
        for name, entry in checked.items():
            known[name].load_state_dict(entry)

    def _forget_dead(self) -> None:
        """Optimizers sit in cycles: those of a notebook's last run must not count as alive."""
        if len(self._groups) > 1:
            gc.collect()
            self._groups = [reference for reference in self._groups if reference() is not None]

    def _scalers(self) -> tuple[LossScaler, ...]:
        return tuple(scaler for group in self._alive() for scaler in group.scalers)

    def _alive(self) -> list[ScalerGroup]:
        return [group for group in (reference() for reference in self._groups) if group]


def _make_scaler(scale: OneScale, policy: Policy) -> LossScaler:
    if isinstance(scale, (int, float)):
        return LossScaler.static(scale)
    config = scale if isinstance(scale, DynamicLossScale) else None
    return LossScaler.dynamic(
        min_scale=policy.min_loss_scale, max_scale=policy.max_loss_scale, config=config
    )


def _at(scalers: tuple[LossScaler, ...], loss_id: int) -> LossScaler:
    if isinstance(loss_id, int) and 0 <= loss_id < len(scalers):
        return scalers[loss_id]
    if not scalers:
        raise AmpError("loss_id: expected live models or optimizers, found that all are gone")
    raise AmpError(
        f"loss_id: expected 0 to {len(scalers) - 1}, found {loss_id!r}; pass num_losses to "
        "initialize"
    )


def _checked(name: str, entry: Any) -> dict[str, float | int]:
    try:
        state = {"loss_scale": float(entry["loss_scale"]), "unskipped": int(entry["unskipped"])}
        state["skipped_in_a_row"] = int(entry.get("skipped_in_a_row", 0))
    except _MALFORMED:
        state = {}
    if not 0 < state.get("loss_scale", 0) < float("inf") or state["unskipped"] < 0:
        raise AmpError(
            f"load_state_dict: {name!r}: expected {{'loss_scale': a number above zero, "
            f"'unskipped': a count}}, found {entry!r}; nothing was loaded"
        )
    return state
