"""Fused optimizers skip by themselves: nobody waits, and nothing else is different."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import assert_identical, snapshot
from torch import nn
from waits import counted_waits

import amp_patch as amp
from amp_patch.scaling import optimizer_binding, scaled_loss

LEVELS = ("O1", "O2")
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, weight_decay=0.01, fused=True
    ),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, fused=True),
}
EXACT = amp.DynamicLossScale(initial=2.0**12, growth_interval=3)


def started(
    opt_level: str, kind: str = "AdamW", **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = KINDS[kind](model.parameters())
    settings = {"loss_scale": EXACT, "verbosity": 0, **settings}
    return amp.initialize(model, optimizer, opt_level=opt_level, **settings)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, i: int, *, overflows: bool = False
) -> None:
    torch.manual_seed(i)
    loss = model(torch.randn(8, 4)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        (scaled * (torch.inf if overflows else 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is checked at its end, as for optimizers that cannot skip by themselves."""
    for module in (optimizer_binding, scaled_loss):
        monkeypatch.setattr(module, "skips_by_itself", lambda _: False)


def run(opt_level: str, kind: str, fates: list[bool], asks: set[int]) -> dict[str, Any]:
    model, optimizer = started(opt_level, kind)
    scales, skips = [], []
    for i, overflows in enumerate(fates):
        train_step(model, optimizer, i, overflows=overflows)
        if i in asks:
            scales.append((i, amp.loss_scale()))
            skips.append((i, amp.step_was_skipped(optimizer)))
    found = {"asked": (scales, skips), "state": snapshot(model, optimizer), "amp": amp.state_dict()}
    amp.uninitialize()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_no_block_after_the_first_step_waits(
    opt_level: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = started(opt_level, kind, loss_scale="dynamic")
    train_step(model, optimizer, 0)
    with counted_waits(monkeypatch) as waits:
        for i in range(1, 8):
            train_step(model, optimizer, i, overflows=i == 4)
    assert waits == []
    assert amp.loss_scale() == 2.0**15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_run_is_that_of_blocks_which_are_looked_at(
    opt_level: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = [i in (0, 3, 4, 9, 10, 17) for i in range(20)]
    asks = {5, 9, 10, 19}
    found = run(opt_level, kind, fates, asks)
    looked_at(monkeypatch)
    expected = run(opt_level, kind, fates, asks)
    assert found["asked"] == expected["asked"]
    assert found["amp"] == expected["amp"]
    assert_identical(found["state"], expected["state"])


@given(
    fates=st.lists(st.booleans(), min_size=1, max_size=12),
    asks=st.sets(st.integers(0, 11)),
    opt_level=st.sampled_from(LEVELS),
    kind=st.sampled_from(["AdamW", "momentum"]),
)
def test_whoever_asks_whenever_gets_the_same_answers(
    fates: list[bool], asks: set[int], opt_level: str, kind: str
) -> None:
    found = run(opt_level, kind, fates, asks)
    with pytest.MonkeyPatch.context() as monkeypatch:
        looked_at(monkeypatch)
        expected = run(opt_level, kind, fates, asks)
    assert found["asked"] == expected["asked"]
    assert found["amp"] == expected["amp"]
    assert_identical(found["state"], expected["state"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_step_that_is_skipped_by_the_kernel_leaves_no_trace(opt_level: str, kind: str) -> None:
    model, optimizer = started(opt_level, kind)
    for i in range(3):
        train_step(model, optimizer, i)
    before = snapshot(model, optimizer)
    train_step(model, optimizer, 3, overflows=True)
    assert_identical(snapshot(model, optimizer), before)
    assert amp.step_was_skipped(optimizer)
    train_step(model, optimizer, 4)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_gradients_of_a_skipped_step_that_nobody_clears_are_dropped(opt_level: str) -> None:
    model, optimizer = started(opt_level, "SGD")
    for i, overflows in enumerate((False, True, False)):
        loss = model(torch.ones(2, 4)).float().sum() * 2.0**-8
        with amp.scale_loss(loss, optimizer) as scaled:
            (scaled * (torch.inf if overflows else 1.0)).backward()
        if i < 2:
            optimizer.step()
            if i == 0:
                optimizer.zero_grad()
    gradients = [master.grad for master in amp.master_params(optimizer)]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_gradients_of_a_skipped_step_are_dropped_also_before_a_block_that_scales_nothing() -> None:
    model, optimizer = started("O1", num_losses=2, loss_scale=[EXACT, 1.0])
    train_step(model, optimizer, 0)
    for loss_id, factor in ((0, torch.inf), (1, 1.0)):
        loss = model(torch.ones(8, 4)).float().square().mean() * factor
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
        optimizer.step()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_window_of_several_blocks_is_skipped_by_any_of_them(
    opt_level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = started(opt_level)
    train_step(model, optimizer, 0)
    before = snapshot(model, optimizer)
    with counted_waits(monkeypatch) as waits:
        for overflows in (False, True, False):
            loss = model(torch.randn(3, 4)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                (scaled * (torch.inf if overflows else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert waits == []
    assert_identical(snapshot(model, optimizer), before)
    assert amp.step_was_skipped(optimizer)


def test_optimizers_of_one_block_skip_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [KINDS["SGD"](part.parameters()) for part in model]
    amp.initialize(model, optimizers, opt_level="O1", loss_scale=EXACT, verbosity=0)
    before = snapshot(model, optimizers[0])
    with counted_waits(monkeypatch) as waits:
        loss = model(torch.ones(1, 4)).float().sum()
        with amp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
            model[1].weight.grad[0, 0] = torch.nan
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert waits == []
    assert_identical(snapshot(model, optimizers[0]), before)
    assert all(map(amp.step_was_skipped, optimizers))


@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        (128.0, 1),  # it cannot back off: an overflow is diagnosed at once
        (amp.DynamicLossScale(), 0),
        (amp.DynamicLossScale(backoff_factor=0.3), 1),
        (amp.DynamicLossScale(hysteresis=2), 1),
        (amp.DynamicLossScale(initial=2.0**16 + 2.0**-20), 1),
    ],
    ids=str,
)
def test_a_scale_that_float32_cannot_follow_or_that_stays_is_looked_at(
    loss_scale: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = started("O1", loss_scale=loss_scale)
    train_step(model, optimizer, 0)
    with counted_waits(monkeypatch) as waits:
        train_step(model, optimizer, 1)
    assert len(waits) == expected


def test_the_scaler_is_told_every_so_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = started("O1", "SGD", loss_scale="dynamic")
    with counted_waits(monkeypatch) as waits:
        for i in range(130):
            train_step(model, optimizer, i)
    assert len(waits) == 2


def test_a_subclass_with_a_step_of_its_own_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.steps += 1
            return super().step(closure)

    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), lr=0.1, fused=True)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for overflows in (True, False):
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum() * 2.0**-9, optimizer) as scaled:
            (scaled * (torch.inf if overflows else 1.0)).backward()
        optimizer.step()
    assert optimizer.steps == 1


def test_overflows_are_logged_and_known_when_somebody_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = started("O1", "SGD", verbosity=1)
    with caplog.at_level(logging.INFO, logger="amp_patch"):
        train_step(model, optimizer, 0, overflows=True)
        assert "overflowed" not in caplog.text
        assert amp.loss_scale() == 2.0**11
    assert "overflowed at loss scale 4096" in caplog.text
    report = amp.last_overflow()
    assert report is not None
    assert (report.loss_scale, report.is_loss_finite, report.gradients) == (2.0**12, True, ())


def test_a_row_of_overflows_is_diagnosed_with_names() -> None:
    """After one that is known, blocks are looked at until one is clean."""
    model, optimizer = started("O1", "SGD", min_loss_scale=2.0**11)
    train_step(model, optimizer, 0, overflows=True)
    assert amp.loss_scale() == 2.0**11
    with pytest.warns(amp.AmpWarning, match=r"0\.weight"):
        train_step(model, optimizer, 1, overflows=True)


def test_nothing_is_kept_alive() -> None:
    model, optimizer = started("O2", "SGD")
    for i in range(3):
        train_step(model, optimizer, i)
    references = [weakref.ref(one) for one in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
