"""The gradients of one optimizer between two steps: set aside, unscaled, added, given back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from amp_patch.errors import AmpError
from amp_patch.scaling.gradient_window import GradientWindow, Stage
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.overflow_check import OverflowCheck
from amp_patch.weights.param_pairs import ParamPair

INF = float("inf")


def single() -> ParamPair:
    """A parameter without a master."""
    parameter = Parameter(torch.ones(2))
    return ParamPair(parameter, parameter)


def mastered() -> ParamPair:
    """A half parameter with its FP32 master."""
    return ParamPair(Parameter(torch.ones(2).half()), Parameter(torch.ones(2)))


def produce(pair: ParamPair, value: float) -> None:
    """What a backward pass does: accumulate into the gradient of the model."""
    fresh = torch.full((2,), value, dtype=pair.model.dtype)
    pair.model.grad = fresh if pair.model.grad is None else pair.model.grad + fresh


def leave(window: GradientWindow, scaler: LossScaler) -> list[torch.Tensor]:
    found = window.unscale(scaler)
    window.settle(keep=True)
    return found


def block(
    window: GradientWindow, pairs: list[ParamPair], scaler: LossScaler, value: float
) -> list[torch.Tensor]:
    """A whole block in which every pair gets `value` as its scaled gradient."""
    window.begin(pairs, scaler)
    for pair in pairs:
        produce(pair, value)
    return leave(window, scaler)


def value_of(tensor: torch.Tensor) -> float | None:
    return None if tensor.grad is None else tensor.grad.tolist()[0]


PAIRS = pytest.mark.parametrize("make", [single, mastered], ids=["single", "mastered"])


@PAIRS
def test_gradient_comes_to_rest_unscaled_in_float32_on_the_master(
    make: Callable[[], ParamPair],
) -> None:
    pair, window = make(), GradientWindow()
    (verdict,) = block(window, [pair], LossScaler.static(8.0), 16.0)
    assert verdict.item() == 0.0
    assert torch.equal(pair.master.grad, torch.full((2,), 2.0))
    assert pair.master.grad.dtype is torch.float32
    assert window.stage is Stage.READY


def test_half_parameter_has_no_gradient_after_the_block() -> None:
    pair = mastered()
    block(GradientWindow(), [pair], LossScaler.static(8.0), 16.0)
    assert pair.model.grad is None


def test_gradient_too_small_for_half_survives_on_the_master() -> None:
    pair = mastered()
    block(GradientWindow(), [pair], LossScaler.static(2.0**16), 2.0**-11)
    assert value_of(pair.master) == 2.0**-27


@PAIRS
def test_gradients_of_several_blocks_add_up(make: Callable[[], ParamPair]) -> None:
    pair, window = make(), GradientWindow()
    for scale in (8.0, 4.0, 2.0):
        block(window, [pair], LossScaler.static(scale), 8.0)
    assert value_of(pair.master) == 1.0 + 2.0 + 4.0


@PAIRS
def test_gradient_that_the_user_set_before_is_not_unscaled(make: Callable[[], ParamPair]) -> None:
    pair = make()
    pair.master.grad = torch.full((2,), 5.0)
    block(GradientWindow(), [pair], LossScaler.static(8.0), 8.0)
    assert value_of(pair.master) == 6.0


@PAIRS
def test_parameter_without_a_gradient_stays_without(make: Callable[[], ParamPair]) -> None:
    reached, missed, window = make(), make(), GradientWindow()
    window.begin([reached, missed], LossScaler.static(8.0))
    produce(reached, 8.0)
    leave(window, LossScaler.static(8.0))
    assert (value_of(reached.master), value_of(missed.master)) == (1.0, None)


@PAIRS
def test_gradient_that_only_an_earlier_block_produced_is_kept(
    make: Callable[[], ParamPair],
) -> None:
    first, second, window = make(), make(), GradientWindow()
    scaler = LossScaler.static(8.0)
    for pair in (first, second):
        window.begin([first, second], scaler)
        produce(pair, 8.0)
        leave(window, scaler)
    assert (value_of(first.master), value_of(second.master)) == (1.0, 1.0)


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")], ids=repr)
@PAIRS
def test_verdict_tells_of_a_bad_element(make: Callable[[], ParamPair], bad: float) -> None:
    (verdict,) = block(GradientWindow(), [make()], LossScaler.static(8.0), bad)
    assert verdict.item() == 1.0


def test_master_gets_sparse_gradients_in_float32() -> None:
    pair, window, scaler = mastered(), GradientWindow(), LossScaler.static(8.0)
    for _ in range(2):
        window.begin([pair], scaler)
        pair.model.grad = torch.full((2,), 8.0).half().to_sparse()
        leave(window, scaler)
    assert pair.master.grad.is_sparse
    assert torch.equal(pair.master.grad.to_dense(), torch.full((2,), 2.0))


@PAIRS
def test_scale_that_is_always_one_is_not_tested(make: Callable[[], ParamPair]) -> None:
    pair = make()
    assert block(GradientWindow(), [pair], LossScaler.static(1.0), INF) == []
    assert value_of(pair.master) == INF


@PAIRS
def test_abandoned_block_leaves_gradients_as_they_were(make: Callable[[], ParamPair]) -> None:
    pair, window = make(), GradientWindow()
    before = pair.master.grad = torch.full((2,), 5.0)
    window.begin([pair], LossScaler.static(8.0))
    produce(pair, 8.0)
    window.abandon()
    assert pair.master.grad is before
    assert torch.equal(before, torch.full((2,), 5.0))
    assert pair.model.grad is (before if pair.model is pair.master else None)
    assert window.stage is Stage.READY


@PAIRS
def test_abandoned_first_block_leaves_no_gradients(make: Callable[[], ParamPair]) -> None:
    pair, window = make(), GradientWindow()
    window.begin([pair], LossScaler.static(8.0))
    produce(pair, 8.0)
    window.abandon()
    assert pair.master.grad is None
    assert pair.model.grad is None
    block(window, [pair], LossScaler.static(8.0), 8.0)
    assert value_of(pair.master) == 1.0


@PAIRS
def test_delayed_gradients_are_unscaled_by_the_last_block(make: Callable[[], ParamPair]) -> None:
    pair, window, scaler = make(), GradientWindow(), LossScaler.static(8.0)
    pair.master.grad = torch.full((2,), 5.0)
    for _ in range(3):
        window.begin([pair], scaler)
        produce(pair, 8.0)
        window.delay()
        assert window.stage is Stage.DELAYED
    block(window, [pair], scaler, 8.0)
    assert value_of(pair.master) == 5.0 + 4.0
    assert window.stage is Stage.READY


@PAIRS
def test_abandoned_block_after_a_delayed_one_keeps_what_was_delayed(
    make: Callable[[], ParamPair],
) -> None:
    pair, window, scaler = make(), GradientWindow(), LossScaler.static(8.0)
    window.begin([pair], scaler)
    produce(pair, 8.0)
    window.delay()
    window.begin([pair], scaler)
    produce(pair, 24.0)
    window.abandon()
    assert window.stage is Stage.DELAYED
    assert value_of(pair.model) == 8.0
    block(window, [pair], scaler, 8.0)
    assert value_of(pair.master) == 2.0


def test_block_of_another_scaler_after_a_delayed_one_is_refused() -> None:
    pair, window = single(), GradientWindow()
    window.begin([pair], LossScaler.static(8.0))
    produce(pair, 8.0)
    window.delay()
    with pytest.raises(AmpError, match=r"delay_unscale=True.*same loss_id"):
        window.begin([pair], LossScaler.static(4.0))
    assert window.stage is Stage.DELAYED
    assert value_of(pair.model) == 8.0


def test_parameter_that_came_after_a_delayed_block_is_unscaled_with_the_others() -> None:
    old, new, window, scaler = single(), single(), GradientWindow(), LossScaler.static(8.0)
    window.begin([old], scaler)
    produce(old, 8.0)
    window.delay()
    block(window, [old, new], scaler, 8.0)
    assert (value_of(old.master), value_of(new.master)) == (2.0, 1.0)


def test_block_inside_a_block_is_refused_and_the_outer_one_goes_on() -> None:
    pair, window, scaler = single(), GradientWindow(), LossScaler.static(8.0)
    window.begin([pair], scaler)
    with pytest.raises(AmpError, match=r"one block at a time.*add the losses, or leave"):
        window.begin([pair], scaler)
    produce(pair, 8.0)
    leave(window, scaler)
    assert value_of(pair.master) == 1.0


def test_gradient_on_a_half_weight_that_no_block_produced_is_refused() -> None:
    pair, window = mastered(), GradientWindow()
    produce(pair, 1.0)
    with pytest.raises(AmpError) as caught:
        window.begin([pair], LossScaler.static(8.0))
    assert str(caught.value).startswith("scale_loss: found gradients on half weights")
    assert "zero_grad()" in str(caught.value)
    assert window.stage is Stage.READY
    assert value_of(pair.model) == 1.0


def test_overflow_is_forgotten_by_asking() -> None:
    window = GradientWindow()
    window.has_overflow = True
    assert window.take_overflow() is True
    assert window.take_overflow() is False


def test_check_that_was_delayed_is_made_when_the_step_asks() -> None:
    window, scaler = GradientWindow(), LossScaler.dynamic(min_scale=1.0, max_scale=2.0**24)
    check = OverflowCheck(scaler, [[torch.tensor(1.0)]], skip_together=True, sync_overflow=False)
    window.unchecked.append((check, 0))
    assert window.take_overflow() is True
    assert scaler.scale == 2.0**15
    assert window.take_overflow() is False
    assert scaler.scale == 2.0**15


def test_zero_forgets_an_overflow_and_what_was_delayed() -> None:
    pair, window, scaler = single(), GradientWindow(), LossScaler.static(8.0)
    window.begin([pair], scaler)
    produce(pair, INF)
    window.delay()
    window.has_overflow = True
    window.zero()
    assert window.stage is Stage.READY
    assert window.take_overflow() is False


@PAIRS
def test_zero_inside_a_block_drops_only_what_came_before(make: Callable[[], ParamPair]) -> None:
    pair, window, scaler = make(), GradientWindow(), LossScaler.static(8.0)
    pair.master.grad = torch.full((2,), 5.0)
    window.begin([pair], scaler)
    window.zero()
    produce(pair, 8.0)
    leave(window, scaler)
    assert value_of(pair.master) == 1.0
