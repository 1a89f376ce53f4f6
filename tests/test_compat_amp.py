"""What scripts rely on in apex.amp: shapes of returns, private state, and the order of things."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections import UserDict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import amp_patch
from amp_patch import OPT_LEVELS, AmpError
from amp_patch.compat.installer import install_as_apex

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


@pytest.fixture
def amp() -> Iterator[Any]:
    undo = install_as_apex()
    yield importlib.import_module("apex.amp")
    undo()


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def pair(lr: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def step(amp: Any, model: Any, optimizer: Any, **keywords: Any) -> float:
    loss = model(torch.ones(2, 4)).float().mean() / 100
    with amp.scale_loss(loss, optimizer, **keywords) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state(amp: Any) -> Any:
    return amp._amp_state  # noqa: SLF001 (the name that scripts use)


# -- what comes back ------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_what_comes_back_has_the_shape_of_what_was_given(amp: Any, level: str) -> None:
    model, optimizer = pair()
    assert amp.initialize(model, opt_level=level) is model
    assert amp.initialize(model, None, opt_level=level) is model
    assert amp.initialize(model, [], opt_level=level) == (model, [])
    model, optimizer = pair()
    assert amp.initialize([model], [optimizer], opt_level=level) == ([model], [optimizer])
    assert amp.initialize(model, optimizer, opt_level=level) == (model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_type_false_is_taken_at_every_level(amp: Any, level: str) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level=level, cast_model_type=False)
    assert next(model.parameters()).dtype is torch.float32
    step(amp, model, optimizer)


def test_inference_at_o3(amp: Any) -> None:
    model, _ = amp.initialize(network(), [], opt_level="O3")
    assert model(torch.ones(1, 4)).dtype is torch.float32


# -- private state --------------------------------------------------------------------------------


def test_state_is_absent_before_initialize(amp: Any) -> None:
    assert not hasattr(state(amp), "loss_scalers")
    assert not hasattr(state(amp), "opt_properties")
    with pytest.raises(RuntimeError, match=r"amp\.initialize"):
        amp.scale_loss(torch.ones(1), pair()[1])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scaler_reads_are_true(amp: Any, level: str) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level=level)
    scaler = state(amp).loss_scalers[0]
    assert scaler.loss_scale() == scaler._loss_scale == 2.0**16  # noqa: SLF001
    step(amp, model, optimizer)
    assert scaler._unskipped == amp.state_dict()["loss_scaler0"]["unskipped"] == 1  # noqa: SLF001
    assert scaler.dynamic
    assert not scaler._has_overflow  # noqa: SLF001
    loss = model(torch.ones(2, 4)).float().mean() * 1e30
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert scaler._has_overflow  # noqa: SLF001
    assert scaler.loss_scale() == 2.0**15
    assert state(amp).loss_scalers[0] is scaler
    assert len(state(amp).loss_scalers) == 1
    assert [one.loss_scale() for one in state(amp).loss_scalers] == [2.0**15]


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_written_loss_scale_takes_effect(amp: Any, loss_scale: Any) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level="O2", loss_scale=loss_scale)
    state(amp).loss_scalers[0]._loss_scale = 2**10  # noqa: SLF001
    loss = model(torch.ones(2, 4)).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == pytest.approx(loss.item() * 2**10)
        scaled.backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1024.0
    assert amp_patch.loss_scale() == 1024.0
    loss = model(torch.ones(2, 4)).float().mean() * 1e30
    is_static = loss_scale != "dynamic"
    warned = pytest.warns(amp_patch.AmpWarning, match="static") if is_static else nullcontext()
    with warned, amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert amp_patch.loss_scale() == (512.0 if loss_scale == "dynamic" else 1024.0)


def test_written_count_and_bounds_take_effect(amp: Any) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level="O1")
    scaler = state(amp).loss_scalers[0]
    scaler._unskipped = 1999  # noqa: SLF001
    assert scaler._unskipped == 1999  # noqa: SLF001
    step(amp, model, optimizer)
    assert scaler.loss_scale() == 2.0**17
    scaler._scale_seq_len = 1  # noqa: SLF001
    scaler._max_loss_scale = 2.0**17  # noqa: SLF001
    step(amp, model, optimizer)
    assert scaler.loss_scale() == 2.0**17
    with pytest.raises(AmpError, match="above zero"):
        scaler._loss_scale = 0  # noqa: SLF001


def test_scaler_may_be_replaced(amp: Any) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level="O2")
    scaler = importlib.import_module("apex.amp.scaler").LossScaler("dynamic", init_scale=2.0**6)
    state(amp).loss_scalers[0] = scaler
    assert state(amp).loss_scalers[0] is scaler
    loss = model(torch.ones(2, 4)).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == pytest.approx(loss.item() * 2**6)
        scaled.backward()
    assert scaler._unskipped == 1  # noqa: SLF001
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}}


def test_scale_can_be_updated_by_hand(amp: Any) -> None:
    amp.initialize(*pair(), opt_level="O1")
    scaler = state(amp).loss_scalers[0]
    scaler._overflow_buf.fill_(1)  # noqa: SLF001
    assert scaler.update_scale()
    assert scaler.loss_scale() == 2.0**15
    scaler.clear_overflow_state()
    assert not scaler.update_scale()


def test_properties_are_those_of_the_last_call(amp: Any) -> None:
    amp.initialize(*pair(), opt_level="O1", loss_scale="128.0")
    found = state(amp).opt_properties
    assert (found.enabled, found.opt_level, found.loss_scale) == (True, "O1", 128.0)
    amp.initialize(*pair(), opt_level="O2")
    found = state(amp).opt_properties
    assert found.cast_model_type is torch.float16
    assert found.master_weights
    assert found.loss_scale == "dynamic"
    assert found.options["opt_level"] == "O2"
    with pytest.raises(AmpError, match="pass opt_level='O3' to initialize"):
        found.opt_level = "O3"


def test_written_properties_take_effect(amp: Any) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level="O1")
    state(amp).opt_properties.loss_scale = 64.0
    assert state(amp).loss_scalers[0].loss_scale() == 64.0
    assert not state(amp).loss_scalers[0].dynamic
    state(amp).opt_properties.loss_scale = "dynamic"
    assert state(amp).loss_scalers[0].dynamic
    state(amp).opt_properties.enabled = False
    loss = model(torch.ones(2, 4)).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


def test_half_models_are_let_in_at_o2(amp: Any) -> None:
    state(amp).allow_incoming_model_not_fp32 = True
    model = network().half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(amp_patch.AmpWarning, match="half weights already"):
        amp.initialize(model, optimizer, opt_level="O2")
    assert next(amp.master_params(optimizer)).dtype is torch.float32


# -- the optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_stash_says_that_amp_is_on(amp: Any, level: str) -> None:
    model, optimizer = pair()
    assert not hasattr(optimizer, "_amp_stash")
    amp.initialize(model, optimizer, opt_level=level)
    assert hasattr(optimizer, "_amp_stash")


def test_disabled_amp_leaves_the_optimizer_alone(amp: Any) -> None:
    model, optimizer = amp.initialize(*pair(), enabled=False)
    assert not hasattr(optimizer, "_amp_stash")
    assert not state(amp).opt_properties.enabled
    assert not hasattr(state(amp), "loss_scalers")
    assert amp.state_dict() == {}
    step(amp, model, optimizer)


def test_stash_holds_the_masters(amp: Any) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O2")
    stash = optimizer._amp_stash  # noqa: SLF001
    assert list(map(id, stash.all_fp16_params)) == list(map(id, model.parameters()))
    assert list(map(id, stash.all_fp32_from_fp16_params)) == list(
        map(id, amp.master_params(optimizer))
    )
    assert stash.all_fp32_from_fp32_params == []
    assert [len(group) for group in stash.fp32_from_fp16_groups] == [4]
    assert stash.lazy_init_called


def test_restored_masters_reach_the_model(amp: Any) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O2")
    step(amp, model, optimizer)
    saved = [p.detach().clone() + 1 for p in amp.master_params(optimizer)]
    optimizer._lazy_init_maybe_master_weights()  # noqa: SLF001
    optimizer._amp_stash.lazy_init_called = True  # noqa: SLF001
    for parameter, value in zip(amp.master_params(optimizer), saved, strict=True):
        parameter.data.copy_(value)
    optimizer._master_params_to_model_params()  # noqa: SLF001
    for parameter, value in zip(model.parameters(), saved, strict=True):
        assert torch.equal(parameter, value.half())
    step(amp, model, optimizer)


def test_stash_keeps_nothing_alive_and_is_not_copied(amp: Any) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level="O2")
    assert not hasattr(copy.deepcopy(optimizer), "_amp_stash")
    reference = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert reference() is None


def test_undo_takes_the_stash_off() -> None:
    undo = install_as_apex()
    _, optimizer = importlib.import_module("apex.amp").initialize(*pair(), opt_level="O1")
    before = set(vars(optimizer))
    undo()
    assert {"_amp_stash", "_lazy_init_maybe_master_weights"} <= before - set(vars(optimizer))


def test_larc_may_be_initialized_and_scaled(amp: Any) -> None:
    larc = importlib.import_module("apex.parallel").LARC
    model, optimizer = pair()
    model, optimizer = amp.initialize(model, larc(optimizer), opt_level="O2", loss_scale=128.0)
    before = next(model.parameters()).clone()
    step(amp, model, optimizer)
    assert not torch.equal(before, next(model.parameters()))
    model, optimizer = amp.initialize(*pair(), opt_level="O1", loss_scale=128.0)
    step(amp, model, larc(optimizer))


# -- training -------------------------------------------------------------------------------------


def test_load_state_dict_takes_no_strict(amp: Any) -> None:
    amp.initialize(*pair(), opt_level="O1")
    saved = amp.state_dict()
    with pytest.raises(TypeError):
        amp.load_state_dict(saved, strict=False)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}})
    assert amp.state_dict(destination={"x": 1}) == {
        "x": 1,
        "loss_scaler0": {"loss_scale": 512.0, "unskipped": 7},
    }


@pytest.mark.parametrize("clearing", ["p.grad = None", "model.zero_grad()"])
def test_gradients_cleared_on_the_model_alone_do_not_pile_up(amp: Any, clearing: str) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level="O2", loss_scale=128.0)
    norms = []
    for _ in range(3):
        if clearing == "model.zero_grad()":
            model.zero_grad()
        for parameter in model.parameters():
            parameter.grad = None
        with amp.scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled:
            scaled.backward()
        norms.append(sum(p.grad.norm().item() for p in amp.master_params(optimizer)))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    assert norms == [norms[0]] * 3


def test_several_blocks_before_a_step_add_up(amp: Any) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level="O2", loss_scale=128.0)
    sums = []
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(2, 4)).mean() / 2, optimizer) as scaled:
            scaled.backward()
        sums.append(sum(p.grad.abs().sum().item() for p in amp.master_params(optimizer)))
    assert sums[1] == pytest.approx(2 * sums[0])
    assert amp_patch.loss_scale() == 128.0


def test_levels_follow_each_other_while_old_models_live(amp: Any) -> None:
    kept = []
    for level in ("O0", "O1", "O2", "O1", "O0"):
        model, optimizer = amp.initialize(*pair(), opt_level=level)
        kept.append((model, optimizer))
        step(amp, model, optimizer)
        assert state(amp).opt_properties.opt_level == level
        half_weights, half_outputs = level == "O2", level == "O1"
        assert (next(model.parameters()).dtype is torch.float16) is half_weights
        assert (model(torch.ones(1, 4)).dtype is torch.float16) is half_outputs
        linear = torch.nn.functional.linear
        assert not hasattr(getattr(linear, "__wrapped__", linear), "__wrapped__")


def test_five_models_with_two_optimizers(amp: Any) -> None:
    models = [network() for _ in range(5)]
    optimizers = [
        torch.optim.SGD([p for model in models[:3] for p in model.parameters()], lr=0.1),
        torch.optim.SGD(models[3].parameters(), lr=0.1),
    ]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O2", num_losses=2)
    for i in range(2):
        step(amp, models[3 * i], optimizers[i], loss_id=i)


class SquaredError(torch.nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).pow(2).mean()


def test_copy_and_trace_after_initialize(amp: Any) -> None:
    model, optimizer = amp.initialize(*pair(), opt_level="O1")
    twin = copy.deepcopy(model)
    assert twin(torch.ones(1, 4)).dtype is torch.float16
    traced = torch.jit.trace(SquaredError(), (torch.ones(2), torch.zeros(2)))
    assert traced(torch.ones(2), torch.zeros(2)).item() == 1.0
    step(amp, model, optimizer)


class Output(UserDict[str, torch.Tensor]):
    def __getattr__(self, name: str) -> torch.Tensor:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Mapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(logits=self.inner(x))


def test_mapping_outputs_keep_their_type_at_o2(amp: Any) -> None:
    model = amp.initialize(Mapped(), opt_level="O2")
    output = model(torch.ones(1, 4))
    assert type(output) is Output
    assert output.logits.dtype is torch.float32


def test_statistics_in_float64_stay(amp: Any) -> None:
    amp.initialize(network(), opt_level="O1")
    assert torch.matmul(torch.ones(2, 2).double(), torch.ones(2, 2).double()).dtype is torch.float64


def test_override_replaces_the_level_of_the_script(amp: Any) -> None:
    state(amp).opt_level = "O2"
    model, _ = amp.initialize(*pair(), opt_level="O1", loss_scale=64.0)
    assert next(model.parameters()).dtype is torch.float16
    assert amp_patch.loss_scale() == 2.0**16
    state(amp).opt_level = "O1"
    amp.initialize(*pair(), opt_level="O1", loss_scale=64.0)
    assert amp_patch.loss_scale() == 64.0


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_disable_casts_nests_in_any_level(amp: Any, level: str) -> None:
    model = amp.initialize(torch.nn.Linear(4, 1), opt_level=level)
    with amp.disable_casts():
        result = torch.matmul(torch.ones(1, 1), torch.ones(1, 1))
    assert result.dtype is torch.float32
    assert model(torch.ones(1, 4)).shape == (1, 1)


# -- functions of the script ----------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = 2
        assert x.dtype is torch.float32
        return ctx.factor * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.factor * gradient


class Head:
    def scores(self, x: torch.Tensor) -> torch.dtype:
        return x.dtype


def test_functions_can_be_decorated_in_every_place(amp: Any) -> None:
    amp.initialize(network(), opt_level="O1")
    half = torch.ones(2).half().requires_grad_()
    amp.float_function(Doubled.apply)(half).sum().backward()
    assert half.grad is not None
    assert amp.half_function(Head().scores)(torch.ones(2)) is torch.float16
    assert amp.promote_function(lambda *both: both[0].dtype)(half, torch.ones(1)) is torch.float32


def test_registrations_end_with_the_undo() -> None:
    undo = install_as_apex()
    amp = importlib.import_module("apex.amp")
    amp.register_half_function(torch, "tanh")
    amp.register_float_function(Head, "scores")
    amp.initialize(network(), opt_level="O1")
    assert torch.tanh(torch.ones(1)).dtype is torch.float16
    assert Head().scores(torch.ones(1).half()) is torch.float32
    undo()
    assert torch.tanh(torch.ones(1)).dtype is torch.float32
    with pytest.raises(AmpError, match="registered"):
        importlib.import_module("amp_patch.casting").unregister_function(torch, "tanh")


def test_overflow_that_a_fused_optimizer_skipped_by_itself_is_read_truly(amp: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for factor in (1.0, float("inf"), 1.0):
        with amp.scale_loss(model(torch.ones(2, 4)).float().mean() / 100, optimizer) as scaled:
            (scaled * factor).backward()
        scaler = state(amp).loss_scalers[0]
        assert scaler._has_overflow is (factor != 1.0)  # noqa: SLF001
        optimizer.step()
        optimizer.zero_grad()
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**15, 1)  # noqa: SLF001


def test_limits_that_are_written_hold_for_what_comes_after(amp: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    scaler = state(amp).loss_scalers[0]
    with amp.scale_loss(model(torch.ones(2, 4)).float().mean(), optimizer) as scaled:
        (scaled * float("inf")).backward()
    scaler._min_loss_scale = 2.0**16  # noqa: SLF001
    assert scaler.loss_scale() == 2.0**15
