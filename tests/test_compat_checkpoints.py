"""Files in the layouts of the old package, made by hand, load."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from amp_patch.compat.flat_fp16_optimizer import FP16_Optimizer as FlatOptimizer
from amp_patch.compat.fp16_optimizer import FP16_Optimizer
from amp_patch.compat.fused_adam import FusedAdam
from amp_patch.compat.fused_novograd import FusedNovoGrad
from amp_patch.compat.installer import install_as_apex
from amp_patch.compat.loss_scalers import DynamicLossScaler

VALUES = {"weight": torch.tensor([[0.5, -1.25]]), "bias": torch.tensor([2.0])}


@pytest.fixture
def amp() -> Iterator[Any]:
    undo = install_as_apex()
    yield importlib.import_module("apex.amp")
    undo()


def adam_state(*, step_beside_moments: bool) -> dict[str, Any]:
    """A state dict of apex's FusedAdam; the step count was beside the moments until 2019."""
    state = {
        i: {"exp_avg": torch.full_like(value, 0.1), "exp_avg_sq": torch.full_like(value, 0.04)}
        for i, value in enumerate(VALUES.values())
    }
    group = {
        "lr": 0.01,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "params": [0, 1],
    }
    if step_beside_moments:
        for entry in state.values():
            entry["step"] = 7
    else:
        group["step"] = 7
    return {"state": state, "param_groups": [group]}


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1)
    model.load_state_dict(VALUES)
    return model


@pytest.mark.parametrize("half", [True, False], ids=["half", "float"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_checkpoint_of_an_amp_run_loads(amp: Any, tmp_path: Path, level: str, half: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic")
    old = OrderedDict((name, v.half() if half else v) for name, v in VALUES.items())
    file = {
        "model": old,
        "optimizer": adam_state(step_beside_moments=False),
        "amp": OrderedDict(loss_scaler0={"loss_scale": 4096.0, "unskipped": 77}),
    }
    torch.save(file, tmp_path / "amp_checkpoint.pt")
    checkpoint = torch.load(tmp_path / "amp_checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, VALUES[name])
    assert optimizer.param_groups[0]["step"] == 7
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 77}}
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    # One more step of Adam by hand, with a gradient of 1, from the moments in the file.
    m, v = (0.9 * 0.1 + 0.1) / (1 - 0.9**8), (0.999 * 0.04 + 0.001) / (1 - 0.999**8)
    moved = VALUES["bias"].item() - 0.01 * m / (v**0.5 + 1e-8)
    assert model.state_dict()["bias"].item() == pytest.approx(moved, abs=1e-6)


@pytest.mark.parametrize("step_beside_moments", [True, False])
def test_states_of_fused_adam_of_any_age_load(step_beside_moments: bool) -> None:
    optimizer = FusedAdam(linear().parameters())
    optimizer.load_state_dict(adam_state(step_beside_moments=step_beside_moments))
    assert optimizer.param_groups[0]["step"] == 7
    assert [sorted(entry) for entry in optimizer.state.values()] == [["exp_avg", "exp_avg_sq"]] * 2


def test_norms_of_fused_novograd_come_out_of_the_group() -> None:
    model = linear()
    optimizer = FusedNovoGrad(model.parameters(), lr=0.1)
    state = {i: {"exp_avg": torch.zeros_like(v)} for i, v in enumerate(VALUES.values())}
    group = {
        **optimizer.state_dict()["param_groups"][0],
        "step": 3,
        "exp_avg_sq": [None, torch.tensor([3.0, 5.0])],
    }
    optimizer.load_state_dict({"state": state, "param_groups": [group]})
    norms = [optimizer.state[p]["exp_avg_sq"].item() for p in model.parameters()]
    assert norms == [3.0, 5.0]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.bias]["exp_avg_sq"].item() == pytest.approx(
        (0.999 * 25 + 0.001) ** 0.5
    )


def test_file_of_an_fp16_optimizer_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "apex.fp16_utils.loss_scaler"
    old = type("DynamicLossScaler", (), {"__module__": path})
    scaler = old()
    vars(scaler).update(
        cur_scale=256.0, cur_iter=11, last_overflow_iter=4, scale_factor=2.0, scale_window=1000
    )
    with monkeypatch.context() as patch:
        for name in ("apex", "apex.fp16_utils", path):
            patch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path])["DynamicLossScaler"] = old
        file = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": True,
            "overflow": False,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": adam_state(step_beside_moments=False),
            "fp32_from_fp16": [[torch.nn.Parameter(v + 2**-14) for v in VALUES.values()]],
        }
        torch.save(file, tmp_path / "fp16.pt")
    model = torch.nn.Linear(2, 1).half()
    optimizer = FP16_Optimizer(FusedAdam(model.parameters()), dynamic_loss_scale=True)
    undo = install_as_apex()
    optimizer.load_state_dict(torch.load(tmp_path / "fp16.pt"))  # with weights_only, the default
    undo()
    assert isinstance(optimizer.loss_scaler, DynamicLossScaler)
    assert optimizer.loss_scale == 256.0
    assert optimizer.loss_scaler.last_overflow_iter == 4
    assert optimizer.param_groups[0]["step"] == 7
    for master, value in zip(optimizer.param_groups[0]["params"], VALUES.values(), strict=True):
        assert torch.equal(master, value + 2**-14)
    assert torch.equal(model.bias, (VALUES["bias"] + 2**-14).half())


def test_file_of_the_flat_fp16_optimizer_loads() -> None:
    flat = torch.tensor([0.5, -1.25, 2.0])
    group = adam_state(step_beside_moments=False)["param_groups"][0]
    state = {
        "dynamic_loss_scale": True,
        "cur_scale": 512.0,
        "cur_iter": 5,
        "last_overflow_iter": 1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "optimizer_state_dict": {
            "state": {0: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}},
            "param_groups": [{**group, "params": [0]}],
        },
        "fp32_groups_flat": [flat],
    }
    model = torch.nn.Linear(2, 1).half()
    optimizer = FlatOptimizer(FusedAdam(model.parameters()), dynamic_loss_scale=True)
    optimizer.load_state_dict(state)
    assert optimizer.cur_scale == 512.0
    assert torch.equal(model.weight, VALUES["weight"].half())
    assert torch.equal(model.bias, VALUES["bias"].half())
    assert set(optimizer.state_dict()) == set(state)


def test_safe_globals_end_with_the_undo() -> None:
    before = set(torch.serialization.get_safe_globals())
    undo = install_as_apex()
    assert len(torch.serialization.get_safe_globals()) == len(before) + 2
    undo()
    assert set(torch.serialization.get_safe_globals()) == before
