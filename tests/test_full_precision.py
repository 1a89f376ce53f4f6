"""A model in its FP32 values for a while: to evaluate, to export, to average."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import LEVELS, MASTER_LEVELS, assert_identical, backward, snapshot, train_step
from torch import nn

import amp_patch as amp

MASTERED = pytest.mark.parametrize("opt_level", MASTER_LEVELS)
EVERY = pytest.mark.parametrize("opt_level", LEVELS)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def trained(opt_level: str, **options: Any) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    amp.initialize(model, optimizer, opt_level=opt_level, **options)
    for _ in range(3):
        train_step(model, optimizer, batch(), factor=2.0**-8)
    return model, optimizer


def plain_twin(model: nn.Module) -> nn.Module:
    twin = net()
    twin.load_state_dict(model.state_dict())
    return twin


@EVERY
def test_inside_the_model_is_the_plain_fp32_model_bit_for_bit(opt_level: str) -> None:
    model, _ = trained(opt_level)
    twin, inputs = plain_twin(model).eval(), batch()[0]
    model.eval()
    with torch.no_grad(), amp.full_precision(model) as inside:
        assert inside is model
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert_identical(model(inputs), twin(inputs))


@EVERY
def test_afterwards_everything_is_as_before(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    before = snapshot(model, optimizer)
    parameters = list(model.parameters())
    with torch.no_grad(), amp.full_precision(model):
        model.eval()
        model(batch()[0])
        model.train()
    assert_identical(snapshot(model, optimizer), before)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))


@EVERY
def test_training_goes_on_as_if_the_block_had_not_been(opt_level: str) -> None:
    found = []
    for looks in (False, True):
        torch.manual_seed(3)
        model, optimizer = trained(opt_level)
        if looks:
            with torch.no_grad(), amp.full_precision(model):
                model.eval()
                model(torch.ones(4, 6))
                model.train()
        torch.manual_seed(4)
        train_step(model, optimizer, batch(), factor=2.0**-8)
        found.append(snapshot(model, optimizer))
        amp.uninitialize()
    assert_identical(found[1], found[0])


@EVERY
def test_an_exception_inside_takes_the_masters_out_again(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    before = snapshot(model, optimizer)
    with pytest.raises(MemoryError), amp.full_precision(model):
        raise MemoryError
    assert_identical(snapshot(model, optimizer), before)
    train_step(model, optimizer, batch(), factor=2.0**-8)


@EVERY
def test_blocks_nest(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    before = snapshot(model, optimizer)
    with amp.full_precision(model):
        with amp.full_precision(model):
            assert model[0].weight.dtype is torch.float32
        assert model[0].weight.dtype is torch.float32
    assert_identical(snapshot(model, optimizer), before)


@EVERY
def test_what_is_written_inside_is_kept(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    value = 1.0 + 2.0**-10 if opt_level == "O3" else 1.0 + 2.0**-20  # as exact as the level is
    with torch.no_grad(), amp.full_precision(model):
        model[0].weight.fill_(value)
    assert (model.state_dict()["0.weight"] == value).all()
    assert (next(amp.master_params(optimizer)) == value).all()
    optimizer.zero_grad()
    optimizer.step()
    assert (model.state_dict()["0.weight"] == value).all()


@MASTERED
def test_an_average_of_weights_is_exact(opt_level: str) -> None:
    model, optimizer = trained(opt_level)
    average = torch.optim.swa_utils.AveragedModel(net())
    exact = []
    for _ in range(3):
        train_step(model, optimizer, batch(), factor=2.0**-8)
        with amp.full_precision(model):
            average.update_parameters(model)
        exact.append(model.state_dict()["0.weight"].double())
    expected = sum(exact[1:], exact[0]) / 3
    # Three additions and divisions of FP32.
    torch.testing.assert_close(
        average.module[0].weight.double(), expected, rtol=4 * 2.0**-24, atol=2.0**-28
    )


@EVERY
def test_export_inside_gives_an_fp32_program(opt_level: str) -> None:
    model, _ = trained(opt_level)
    twin, inputs = plain_twin(model).eval(), batch()[0]
    model.eval()
    traced_file, exported_file = io.BytesIO(), io.BytesIO()
    with amp.full_precision(model):
        torch.jit.save(torch.jit.trace(model, inputs), traced_file)
        torch.export.save(torch.export.export(model, (inputs,)), exported_file)
    traced_file.seek(0)
    exported_file.seek(0)
    exported = torch.export.load(exported_file)
    assert {p.dtype for p in exported.parameters()} == {torch.float32}
    assert {name for name, _ in model.named_parameters()} == set(
        exported.graph_signature.parameters
    )
    amp.uninitialize()
    with torch.no_grad():
        expected = twin(inputs)
        for found in (torch.jit.load(traced_file)(inputs), exported.module()(inputs)):
            # The same FP32 weights; other kernels may add in another order.
            torch.testing.assert_close(found, expected, rtol=2.0**-20, atol=2.0**-20)


@EVERY
def test_a_deep_copy_made_inside_is_an_fp32_model(opt_level: str) -> None:
    model, _ = trained(opt_level)
    with amp.full_precision(model):
        twin = copy.deepcopy(model)
        assert {p.dtype for p in twin.parameters()} == {torch.float32}
    assert_identical(dict(twin.state_dict()), dict(model.state_dict()))


@EVERY
def test_with_amp_disabled_nothing_happens(opt_level: str) -> None:
    model = net()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)
    with amp.full_precision(model) as inside:
        assert inside is model


def test_a_model_that_is_not_known_is_refused() -> None:
    trained("O2")
    with (
        pytest.raises(amp.AmpError, match="full_precision: expected a model that went through"),
        amp.full_precision(net()),
    ):
        pytest.fail("the block was entered")


def test_before_initialize_there_is_a_clear_error() -> None:
    with (
        pytest.raises(amp.AmpError, match="full_precision: expected an earlier call"),
        amp.full_precision(net()),
    ):
        pytest.fail("the block was entered")


@MASTERED
def test_without_optimizer_the_model_is_widened(opt_level: str) -> None:
    model = amp.initialize(net(), opt_level=opt_level)
    with torch.no_grad(), amp.full_precision(model):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        model.eval()
        assert model(batch()[0]).dtype is torch.float32
    assert model[0].weight.dtype is MASTER_LEVELS[opt_level]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "float16", None], ids=str)
@EVERY
def test_a_model_state_dict_can_be_had_in_half_size(opt_level: str, dtype: Any) -> None:
    model, _ = trained(opt_level)
    full, found = model.state_dict(), amp.model_state_dict(model, dtype)
    assert list(found) == list(full)
    wanted = {None: torch.float32, "float16": torch.float16}.get(dtype, dtype)
    for name, value in found.items():
        if full[name].is_floating_point():
            assert value.dtype is wanted
            assert_identical(value, full[name].to(wanted))
        else:
            assert_identical(value, full[name])
    net().load_state_dict(found)


@EVERY
def test_gradients_that_wait_for_their_step_survive_a_look_at_the_model(opt_level: str) -> None:
    """A validation between two micro-batches."""
    model, optimizer = trained(opt_level)
    optimizer.zero_grad()
    backward(F.mse_loss(model(batch()[0]), batch()[1]) * 2.0**-8, optimizer)
    before = [p.grad.clone() for p in amp.master_params(optimizer)]
    with torch.no_grad(), amp.full_precision(model):
        model.eval()
        model(batch()[0])
        model.train()
    found = [p.grad for p in amp.master_params(optimizer)]
    if opt_level == "O3":
        assert all(gradient is None for gradient in found) or before  # half weights hold their own
        return
    assert_identical(found, before)
