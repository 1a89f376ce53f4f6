"""Copies of models and optimizers: by deepcopy, by pickle, as state dicts of every kind."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import LEVELS, MASTER_LEVELS, assert_identical, backward, train_step
from torch import nn

import amp_patch as amp

EVERY = pytest.mark.parametrize("opt_level", LEVELS)
MASTERED = pytest.mark.parametrize("opt_level", MASTER_LEVELS)


class Net(nn.Module):
    """A shared tensor, extra state, buffers of both kinds and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.embed.weight
        self.register_buffer("table", torch.randn(6))
        self.register_buffer("scratch", torch.randn(6), persistent=False)
        self.epochs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.norm(self.embed(x)))) + self.table

    def get_extra_state(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 6)


def trained(opt_level: str) -> tuple[Net, Any]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    amp.initialize(model, optimizer, opt_level=opt_level)
    for _ in range(2):
        train_step(model, optimizer, batch(), factor=2.0**-8)
    return model, optimizer


def state_of(model: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(dict(model.state_dict()))


# -- deep copies -----------------------------------------------------------------------------------


@EVERY
def test_a_copy_computes_the_same_with_weights_of_its_own(opt_level: str) -> None:
    model, _ = trained(opt_level)
    twin, inputs = copy.deepcopy(model).eval(), batch()[0]
    model.eval()
    with torch.no_grad():
        assert_identical(twin(inputs), model(inputs))
        assert twin(inputs).dtype is model(inputs).dtype
    assert_identical(state_of(twin), state_of(model))
    assert twin.decode.weight is twin.embed.weight
    own = {id(p) for p in (*model.parameters(), *model.buffers())}
    assert not own & {id(p) for p in (*twin.parameters(), *twin.buffers())}


@EVERY
def test_training_the_student_leaves_a_copied_teacher_alone(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    teacher, inputs = copy.deepcopy(model).eval(), batch()[0]
    with torch.no_grad():
        before, state = teacher(inputs), state_of(teacher)
    for _ in range(3):
        train_step(model, optimizer, batch(), factor=2.0**-8)
    with torch.no_grad():
        assert_identical(teacher(inputs), before)
    assert_identical(state_of(teacher), state)


@EVERY
def test_a_teacher_guides_the_student_without_gradients_of_its_own(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    inputs, _ = batch()
    optimizer.zero_grad()
    with torch.no_grad():
        targets = teacher(inputs).float()
    backward(F.mse_loss(model(inputs).float(), targets) * 2.0**-8, optimizer)
    optimizer.step()
    assert all(parameter.grad is None for parameter in teacher.parameters())


@EVERY
def test_a_frozen_copy_from_before_initialize_works_beside_the_model(opt_level: str) -> None:
    model = Net()
    stock = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=opt_level)
    inputs, _ = batch()
    loss = F.mse_loss(model(inputs).float(), stock(inputs).float())
    backward(loss * 2.0**-8, optimizer)
    optimizer.step()
    assert {p.dtype for p in stock.parameters()} == {torch.float32}


@EVERY
def test_an_average_written_into_the_tensors_of_a_copy_is_exact_and_reaches_its_forward(
    opt_level: str,
) -> None:
    model, optimizer = trained(opt_level)
    average = copy.deepcopy(model)
    expected = {n: v.clone() for n, v in state_of(average).items() if torch.is_tensor(v)}
    for _ in range(3):
        train_step(model, optimizer, batch(), factor=2.0**-8)
        latest = model.state_dict()
        for name, value in average.state_dict().items():
            is_averaged = torch.is_tensor(value) and value.is_floating_point()
            if is_averaged and name != "decode.weight" and opt_level != "O3":  # a tensor once
                value.mul_(0.9).add_(latest[name], alpha=0.1)
                expected[name] = expected[name] * 0.9 + latest[name] * 0.1
    if opt_level == "O3":
        return  # half weights have no other tensor that could be written into
    found = average.state_dict()
    for name in ("embed.weight", "norm.weight", "decode.bias"):
        torch.testing.assert_close(found[name], expected[name], rtol=2.0**-20, atol=2.0**-24)
    with torch.no_grad():
        average(batch()[0])
    half = average.embed.weight.dtype
    assert_identical(average.embed.weight.detach(), found["embed.weight"].to(half))


@EVERY
def test_torchs_own_averaging_works_on_the_model(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for _ in range(2):
        train_step(model, optimizer, batch(), factor=2.0**-8)
        average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        assert average(batch()[0]).isfinite().all()


@EVERY
def test_copies_of_copies_and_of_lists_hold_together(opt_level: str) -> None:
    model, _ = trained(opt_level)
    first, second = copy.deepcopy([model, {"again": model}])
    assert second["again"] is first
    assert_identical(state_of(copy.deepcopy(first)), state_of(model))


@EVERY
def test_a_copied_optimizer_is_refused_readably_and_its_state_is_whole(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    twin = copy.deepcopy(optimizer)
    assert_identical(twin.state_dict()["state"], copy.deepcopy(optimizer.state_dict()["state"]))
    loss = model(batch()[0]).sum()
    with pytest.raises(amp.AmpError, match="that did not"), amp.scale_loss(loss, twin):
        pytest.fail("the block was entered")


@EVERY
def test_a_model_and_its_optimizer_copied_together_belong_together(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = state_of(model)
    for group in twin_optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    twin_optimizer.step()
    assert_identical(state_of(model), before)
    assert not torch.equal(twin.state_dict()["embed.weight"], before["embed.weight"])


@EVERY
def test_a_copied_pair_can_be_initialized_and_trained(opt_level: str) -> None:
    model, _ = trained(opt_level)
    twin = Net()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01, eps=1e-3)
    amp.initialize(twin, optimizer, opt_level=opt_level)
    before = state_of(model)
    train_step(twin, optimizer, batch(), factor=2.0**-8)
    assert_identical(state_of(model), before)


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_patched_function_copies_to_itself(copies: Callable[[Any], Any]) -> None:
    trained("O1")
    for function in (F.softmax, F.gelu, torch.matmul):
        assert copies(function) is function


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")  # torch's own
def test_layers_that_clone_a_patched_function_can_be_built_after_initialize() -> None:
    trained("O1")
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu")
    nn.TransformerEncoder(layer, 2)


# -- pickles ---------------------------------------------------------------------------------------


def reloaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "through",
    [reloaded, lambda v: pickle.loads(pickle.dumps(v))],  # noqa: S301 (our own bytes)
    ids=["torch", "pickle"],
)
@EVERY
def test_a_model_pickles_and_computes_the_same(opt_level: str, through: Any) -> None:
    model, _ = trained(opt_level)
    twin, inputs = through(model).eval(), batch()[0]
    model.eval()
    with torch.no_grad():
        cast = inputs.to(twin.embed.weight.dtype)
        assert_identical(twin(cast).float(), model(inputs).float())
    assert twin.decode.weight is twin.embed.weight


@EVERY
def test_an_optimizer_pickles_with_its_state(opt_level: str) -> None:
    _, optimizer = trained(opt_level)
    twin = reloaded(optimizer)
    assert_identical(twin.state_dict()["state"], copy.deepcopy(optimizer.state_dict()["state"]))
    assert twin.param_groups[0]["lr"] == 0.01


@EVERY
def test_a_pickled_model_loads_where_amp_patch_is_not_installed(
    opt_level: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[1].act = F.gelu
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    amp.initialize(model, optimizer, opt_level=opt_level)
    model[0].later = F.softmax
    train_step(model, optimizer, (torch.randn(4, 2), torch.randn(4, 1)), factor=2.0**-8)
    file = tmp_path / "model.pt"
    torch.save({"model": model, "optimizer": optimizer}, file)
    script = (
        "import sys, torch\n"
        "sys.modules['amp_patch'] = None\n"
        f"found = torch.load({str(file)!r}, weights_only=False)\n"
        "model = found['model'].eval()\n"
        "x = torch.ones(1, 2, dtype=model[0].weight.dtype)\n"
        "print(model.float()(x.float()).shape, found['optimizer'].param_groups[0]['lr'])\n"
        "assert model[0].later is torch.nn.functional.softmax\n"
        "assert model[1].act is torch.nn.functional.gelu\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "torch.Size([1, 1]) 0.001" in result.stdout


@EVERY
def test_a_model_pickled_after_uninitialize_has_no_trace_of_amp(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    amp.uninitialize()
    for value in (model, optimizer):
        assert b"amp_patch" not in pickle.dumps(value)


# -- state dicts -----------------------------------------------------------------------------------


@EVERY
def test_a_state_dict_has_shared_tensors_extra_state_and_the_usual_names(opt_level: str) -> None:
    model, _ = trained(opt_level)
    model.epochs = 7
    state = model.state_dict()
    assert list(state) == list(Net().state_dict())
    assert state["_extra_state"] == {"epochs": 7}
    assert "scratch" not in state
    assert_identical(state["decode.weight"], state["embed.weight"])
    if opt_level != "O3":
        assert state["decode.weight"].data_ptr() == state["embed.weight"].data_ptr()
    twin = Net()
    twin.load_state_dict(state)
    assert twin.epochs == 7


@EVERY
def test_a_state_dict_takes_a_prefix_and_a_destination(opt_level: str) -> None:
    model, _ = trained(opt_level)
    destination: dict[str, Any] = {}
    model.state_dict(destination=destination, prefix="net.")
    plain = model.state_dict()
    assert list(destination) == [f"net.{name}" for name in plain]
    for name, value in plain.items():
        if torch.is_tensor(value):
            assert destination[f"net.{name}"].dtype is value.dtype
            assert_identical(destination[f"net.{name}"], value)


@EVERY
def test_kept_variables_are_those_that_train(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    state = model.state_dict(keep_vars=True)
    assert state["embed.weight"].requires_grad
    assert not model.state_dict()["embed.weight"].requires_grad
    if opt_level != "O3":
        assert any(state["embed.weight"] is p for p in amp.master_params(optimizer))
    else:
        assert state["embed.weight"].dtype is torch.float32


@EVERY
def test_a_missing_and_an_unexpected_key_are_reported_as_ever(opt_level: str) -> None:
    model, _ = trained(opt_level)
    state = state_of(model)
    before = copy.deepcopy(state)
    del state["decode.bias"]
    state["other"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*decode\.bias.*Unexpected key.*other"):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["decode.bias"], ["other"])
    assert_identical(state_of(model)["decode.bias"], before["decode.bias"])


@EVERY
def test_a_state_dict_of_other_dtypes_loads(opt_level: str) -> None:
    model, _ = trained(opt_level)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        state = {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in state_of(model).items()
        }
        model.load_state_dict(state)
        found = model.state_dict()["embed.weight"]
        assert found.dtype is torch.float32
        kept = model.embed.weight.dtype if opt_level == "O3" else torch.float32
        assert_identical(found, state["embed.weight"].to(kept).float())


@MASTERED
def test_a_safe_way_of_loading_reads_every_state(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    model_state = {n: v for n, v in model.state_dict().items() if n != "_extra_state"}
    file = io.BytesIO()
    torch.save({"m": model_state, "o": optimizer.state_dict(), "a": amp.state_dict()}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert_identical(found["m"], copy.deepcopy(model_state))


@EVERY
def test_a_state_dict_is_not_changed_by_the_next_step_after_a_copy(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    kept = state_of(model)
    again = copy.deepcopy(kept)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    assert_identical(kept, again)
    model.load_state_dict(kept)
    assert_identical(state_of(model), kept)
