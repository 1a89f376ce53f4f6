"""Training from a checkpoint is training without the interruption, bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from networks import LEVELS, OPTIMIZERS, OptimizerFactory, assert_identical, snapshot, train_step
from torch import nn

import amp_patch as amp

STEPS_BEFORE, STEPS_AFTER = 20, 5


def new_pair(factory: OptimizerFactory) -> tuple[nn.Module, Any]:
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )
    return model, factory(model.parameters())


def train(model: nn.Module, optimizer: Any, seed: int, steps: int) -> list[float]:
    torch.manual_seed(seed)
    return [
        train_step(model, optimizer, (torch.randn(4, 6), torch.randn(4, 3))) for _ in range(steps)
    ]


def saved_to_file(model: nn.Module, optimizer: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        },
        file,
    )
    file.seek(0)
    return file


def outcome(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {
        "losses": train(model, optimizer, 2, STEPS_AFTER),
        "trained": snapshot(model, optimizer),
        "state_dict": {name: t.clone() for name, t in model.state_dict().items()},
        "scales": amp.state_dict(),
    }


@pytest.mark.parametrize("loads_first", [True, False], ids=["load-first", "initialize-first"])
@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_resuming_is_bit_exact(
    opt_level: str, factory: OptimizerFactory, loads_first: bool
) -> None:
    model, optimizer = new_pair(factory)
    amp.initialize(model, optimizer, opt_level=opt_level)
    train(model, optimizer, 1, STEPS_BEFORE)  # the first ones may overflow and back off
    file = saved_to_file(model, optimizer)
    expected = outcome(model, optimizer)
    amp.uninitialize()

    checkpoint = torch.load(file, weights_only=True)
    torch.manual_seed(9)  # other weights than the first time
    fresh, fresh_optimizer = new_pair(factory)
    if not loads_first:
        amp.initialize(fresh, fresh_optimizer, opt_level=opt_level)
    fresh.load_state_dict(checkpoint["model"])
    fresh_optimizer.load_state_dict(checkpoint["optimizer"])
    if loads_first:
        amp.initialize(fresh, fresh_optimizer, opt_level=opt_level)
    amp.load_state_dict(checkpoint["amp"])
    assert_identical(outcome(fresh, fresh_optimizer), expected)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_the_scale_and_its_count_are_resumed(opt_level: str) -> None:
    model, optimizer = new_pair(OPTIMIZERS["sgd"])
    amp.initialize(model, optimizer, opt_level=opt_level)
    train_step(model, optimizer, (torch.randn(4, 6), torch.randn(4, 3)), float("inf"))
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 0}})
    train(model, optimizer, 1, 3)
    checkpoint = torch.load(saved_to_file(model, optimizer), weights_only=True)
    assert checkpoint["amp"] == {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 3}}
    amp.uninitialize()
    amp.initialize(*new_pair(OPTIMIZERS["sgd"]), opt_level=opt_level)
    amp.load_state_dict(checkpoint["amp"])
    assert amp.state_dict() == checkpoint["amp"]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_checkpoint_loads_into_the_plain_script(opt_level: str) -> None:
    model, optimizer = new_pair(OPTIMIZERS["adam"])
    amp.initialize(model, optimizer, opt_level=opt_level)
    train(model, optimizer, 1, 3)
    checkpoint = torch.load(saved_to_file(model, optimizer), weights_only=True)
    amp.uninitialize()
    plain, plain_optimizer = new_pair(OPTIMIZERS["adam"])
    plain.load_state_dict(checkpoint["model"])
    plain_optimizer.load_state_dict(checkpoint["optimizer"])
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert_identical(dict(plain.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_checkpoint_of_the_plain_script_loads_at_every_level(opt_level: str) -> None:
    plain, plain_optimizer = new_pair(OPTIMIZERS["adam"])
    plain(torch.randn(4, 6)).sum().backward()
    plain_optimizer.step()
    model, optimizer = new_pair(OPTIMIZERS["adam"])
    amp.initialize(model, optimizer, opt_level=opt_level)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(plain_optimizer.state_dict())
    rounded = {
        name: t.to(torch.float16) if opt_level == "O3" and t.is_floating_point() else t
        for name, t in plain.state_dict().items()
    }
    found = dict(model.state_dict())
    assert_identical(found, {name: t.to(found[name].dtype) for name, t in rounded.items()})
    assert {t.dtype for t in found.values()} == {torch.float32, torch.int64}
    train(model, optimizer, 1, 3)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"loss_scale": 0.0, "unskipped": 0}, "a number above zero"),
        ({"loss_scale": float("nan"), "unskipped": 0}, "a number above zero"),
        ({"loss_scale": 2.0}, "unskipped"),
        (7, "found 7"),
    ],
    ids=["zero", "nan", "without-count", "number"],
)
def test_a_malformed_scale_is_refused_and_nothing_is_loaded(entry: Any, message: str) -> None:
    amp.initialize(*new_pair(OPTIMIZERS["sgd"]), opt_level="O1", num_losses=2)
    before = amp.state_dict()
    good = {"loss_scale": 8.0, "unskipped": 1}
    with pytest.raises(amp.AmpError, match=message):
        amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": entry})
    assert amp.state_dict() == before


def test_scalers_that_do_not_match_are_reported() -> None:
    amp.initialize(*new_pair(OPTIMIZERS["sgd"]), opt_level="O1")
    good = {"loss_scale": 8.0, "unskipped": 1}
    with pytest.warns(amp.AmpWarning, match="not used .*loss_scaler1"):
        amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": good})
    assert amp.state_dict() == {"loss_scaler0": good}
    with pytest.warns(amp.AmpWarning, match="missing .*loss_scaler0"):
        amp.load_state_dict({})
