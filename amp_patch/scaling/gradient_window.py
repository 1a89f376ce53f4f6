"""The gradients of one optimizer from the first backward pass to the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

import torch

from amp_patch.errors import AmpError
from amp_patch.scaling import gradients
from amp_patch.scaling.gradient_lists import (
    Gradient,
    added,
    clear,
    cloned,
    gradients_of,
    put,
    refuse_stray_gradients,
    taken,
    to_masters,
)
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.overflow_check import OverflowCheck, make_checks, worst
from amp_patch.scaling.ranks import Wrapper
from amp_patch.weights.param_pairs import NO_PAIRS, ParamPair, ParamPairs

Checks = list[tuple[OverflowCheck, int]]  # and which optimizer of each this is


class Stage(Enum):
    """Where an optimizer is between two steps."""

    READY = auto()  # gradients, if any, are unscaled
    BACKWARD = auto()  # inside a scale_loss block
    DELAYED = auto()  # the model's gradients are still scaled, by delay_unscale


class GradientWindow:
    """Keeps what was accumulated earlier apart from what the open block produces.

    Gradients come to rest unscaled on the masters (on the parameters themselves where there are no
    masters). Where `DistributedDataParallel` has left earlier ones to this rank alone (`no_sync`),
    the block in which it averages gets them back, scaled, on the model. Nothing here waits for the
    device, except `take_overflow` where a check was delayed.
    """

    def __init__(self) -> None:
        self.stage = Stage.READY
        self.has_overflow = False
        self.unchecked: Checks = []
        self._pairs = NO_PAIRS
        self._unscaled: list[Gradient] = []  # of the masters, set aside; empty if none had any
        self._scaled: list[Gradient] = []  # of the model, from earlier blocks with delay_unscale
        self._fresh: list[Gradient] = []  # of the block, unscaled
        self._is_in_place = False  # these are where backward has left them
        self._watched: list[ParamPair] = []  # their gradients come from blocks of other optimizers
        self._kept = 0  # blocks of this window whose gradients were kept
        self._dropped = 0  # and dropped
        self._weight = 1.0  # by which the gradients of the kept ones were multiplied for that
        self._scaler: LossScaler | None = None
        self._scale: gradients.Scale = 1.0  # by which the loss of the block was multiplied
        self._stage_before = Stage.READY
        self._has_local = False  # some gradients set aside may be of this rank alone
        self._leaves_local = False  # the block may leave some more
        self._is_merged = False  # the block's gradients contain the earlier ones
        self.is_separable = True  # no block of this window has merged

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients that a user finds are multiplied by the loss scale."""
        return self.stage is not Stage.READY and bool(self._pairs)

    def begin(
        self,
        pairs: Iterable[ParamPair],
        scaler: LossScaler,
        wrappers: Sequence[Wrapper] = (),
        scale: gradients.Scale | None = None,
    ) -> None:
        """Enter a block: set the gradients that exist aside. `wrappers` average the new ones.

        `scale` is that of the loss, if it is not the scaler's of now.
        """
        scale = scaler.scale if scale is None else scale
        if self.stage is Stage.BACKWARD:
            raise AmpError(
                "scale_loss: expected one block at a time, found one inside another, which handles "
                "this optimizer too; add the losses, or leave the first block before the second"
            )
        is_delayed = self.stage is Stage.DELAYED
        if not is_delayed:
            self._pairs = ParamPairs.of(pairs)
            refuse_stray_gradients("scale_loss", self._pairs)
            self._unscaled = taken(self._pairs.masters)
        elif scaler is not self._scaler:
            raise AmpError(
                "scale_loss: found gradients that another loss scaled (delay_unscale=True); "
                "expected every block of a window to have the same loss_id, and the last one no "
                "delay_unscale"
            )
        else:
            self._join(pairs)
            self._scaled = taken(self._pairs.models)
            if scale != self._scale:  # it changed since, by another optimizer's overflow
                present = [gradient for gradient in self._scaled if gradient is not None]
                gradients.scale_(present, float(scale / self._scale))
        self._scaler, self._scale = scaler, scale
        self._stage_before, self.stage = self.stage, Stage.BACKWARD
        if wrappers:
            self._begin_averaging(wrappers)

    def begin_beside(self, pairs: Iterable[ParamPair]) -> None:
        """Enter a block of other optimizers: set the gradients aside, which are still scaled."""
        self._join(pairs)
        self._scaled = cloned(taken(self._pairs.models))
        self._stage_before, self.stage = self.stage, Stage.BACKWARD

    def leave_beside(self, scale: gradients.Scale) -> None:
        """Leave it. What it produced has its `scale`, and gets that of this window."""
        fresh = [one for one in gradients_of(self._pairs.models) if one is not None]
        if fresh and scale != self._scale:
            gradients.scale_(fresh, float(self._scale / scale))
        self.delay()

    def _begin_averaging(self, wrappers: Sequence[Wrapper]) -> None:
        if any(wrapper.gradient_as_bucket_view for wrapper in wrappers):
            # What was set aside may be the memory that backward writes into.
            self._unscaled = cloned(self._unscaled)
            self._scaled = cloned(self._scaled)
        # Until the next forward, `require_forward_param_sync` says what the last one has decided.
        flags = [
            (one.require_backward_grad_sync, one.require_forward_param_sync) for one in wrappers
        ]
        self._leaves_local = not all(all(flag) for flag in flags)
        self._is_merged = self._has_local and any(any(flag) for flag in flags)
        if self._is_merged:
            self.is_separable = False
            self._give_back()

    def _give_back(self) -> None:
        """Put all that was set aside on the model, as backward would have left it there."""
        models = self._pairs.models
        put(models, cloned(self._scaled))
        for model, unscaled in zip(models, self._unscaled, strict=False):  # may be empty
            if unscaled is not None:
                scaled = (unscaled * (self._scale / self._weight)).to(model.dtype)
                model.grad = scaled if model.grad is None else model.grad + scaled

    def _join(self, pairs: Iterable[ParamPair]) -> None:
        """Take in parameters that have come since the window began."""
        known = {id(pair.master) for pair in self._pairs}
        joined = [pair for pair in pairs if id(pair.master) not in known]
        self._pairs = ParamPairs([*self._pairs, *joined])
        if self._unscaled:
            self._unscaled = self._unscaled + [None] * len(joined)

    def close_early(self) -> None:
        """The optimizer is released: leave unscaled gradients behind."""
        if self.stage is Stage.BACKWARD:
            self.abandon()
        if self.stage is Stage.DELAYED and self._scaler is not None:
            self.unscale(self._scaler)
            self.settle(keep=True)

    def abandon(self) -> None:
        """The block raised: put the gradients back as they were before it."""
        was_delayed = self._stage_before is Stage.DELAYED
        clear(self._pairs.models)
        if was_delayed:
            put(self._pairs.models, self._scaled)
            self.stage, self._scaled = Stage.DELAYED, []
        else:
            put(self._pairs.masters, self._unscaled)
            self._close()

    def delay(self) -> None:
        """Leave the block with the model's gradients still scaled."""
        models = self._pairs.models
        if self._is_merged:
            self._unscaled = []
        elif self._scaled:
            put(models, added(self._scaled, gradients_of(models)))
        self.stage, self._scaled = Stage.DELAYED, []
        self._note_local()

    def unscale(self, scaler: LossScaler) -> list[torch.Tensor]:
        """Unscale what the block produced. Returns the verdicts of the finite test.

        With a scale that is always 1 nothing is divided or tested, and nothing is returned.
        """
        produced = gradients_of(self._pairs.models)
        is_added = self._scaled and not self._is_merged
        scaled = added(self._scaled, produced) if is_added else produced
        self._fresh = to_masters(self._pairs, scaled)
        self._is_in_place = self._fresh is produced
        if scaler.is_identity:
            return []
        present = [gradient for gradient in self._fresh if gradient is not None]
        return gradients.unscale_(present, self._scale)

    def fresh(self) -> list[tuple[ParamPair, torch.Tensor]]:
        """The unscaled gradients of the block, before they are settled."""
        rows = zip(self._pairs, self._fresh, strict=True)
        return [(pair, gradient) for pair, gradient in rows if gradient is not None]

    def settle(self, *, keep: bool) -> None:
        """Leave the block: add its gradients to the earlier ones, or drop them."""
        self._kept += keep
        self._dropped += not keep
        self._reweigh()
        if not keep:
            totals = self._unscaled or [None] * len(self._pairs)
        elif self._unscaled and not self._is_merged:
            totals = added(self._unscaled, self._fresh)
        else:
            totals = self._fresh
        if not (self._is_in_place and totals is self._fresh):
            clear(self._pairs.mastered.models)
            put(self._pairs.masters, totals)
        self._note_local()
        self._close()

    def _reweigh(self) -> None:
        """Let the blocks that were kept stand for those that were dropped too."""
        weight = (self._kept + self._dropped) / self._kept if self._kept and self._dropped else 1.0
        for values, factor in ((self._unscaled, weight / self._weight), (self._fresh, weight)):
            if factor != 1.0:
                gradients.scale_([value for value in values if value is not None], factor)
        self._weight = weight

    def _note_local(self) -> None:
        self._has_local = self._leaves_local or (self._has_local and not self._is_merged)
        self._is_merged = self._leaves_local = False

    def watch(self, shared: Iterable[ParamPair]) -> None:
        """Look at the gradients of `shared` before the next step: other optimizers check them."""
        known = {id(pair.master) for pair in self._watched}
        self._watched += [pair for pair in shared if id(pair.master) not in known]

    def take_overflow(self) -> bool:
        """Whether the step that follows must be skipped; forgotten by asking."""
        has_overflow = self.will_skip()
        self.has_overflow = False
        if has_overflow:
            self.begin_anew()
        return has_overflow

    def will_skip(self) -> bool:
        """Whether the step that follows must be skipped. Makes a check that was delayed."""
        if self.unchecked:
            make_checks(check for check, _ in self.unchecked)
            self.has_overflow |= any(check.skips[i] for check, i in self.unchecked)
            self.unchecked = []
        if self._watched and not self.has_overflow:
            foreign = [pair.master.grad for pair in self._watched if pair.master.grad is not None]
            self.has_overflow = gradients.any_found(gradients.non_finite(foreign))
        return self.has_overflow or (self._dropped > 0 and self._kept == 0)

    def take_verdict(self) -> tuple[Checks, torch.Tensor] | None:
        """The checks that nobody has made, and what the device says of them; forgotten by asking.

        None where it is known already what will become of the step.
        """
        verdict = worst(check.verdict(i) for check, i in self.unchecked)
        if verdict is None or self.has_overflow or self._dropped or self._watched:
            return None
        checks, self.unchecked = self.unchecked, []
        self.begin_anew()
        return checks, verdict

    def zero(self) -> None:
        """The user clears the gradients: forget what was set aside, and any overflow in it."""
        self.has_overflow = False
        self.unchecked = []
        self.begin_anew()
        if self.stage is Stage.BACKWARD:
            self._unscaled, self._scaled = [], []
            self._stage_before = Stage.READY
        else:
            self._close()

    def begin_anew(self) -> None:
        """The gradients are used, or dropped: the next block is the first of a window."""
        self._kept = self._dropped = 0
        self._weight = 1.0
        self._watched = []
        self._has_local, self.is_separable = False, True

    def _close(self) -> None:
        self._pairs = NO_PAIRS
        self._unscaled, self._scaled, self._fresh = [], [], []
        self._scaler = None
        self.stage = Stage.READY
