"""Nothing of the package keeps a user's model, optimizer or parameter alive."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from networks import LEVELS, OPTIMIZERS, normalised_mlp, train_step
from torch import nn

import amp_patch as amp


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def references(model: nn.Module, *optimizers: Any) -> dict[str, weakref.ref[Any]]:
    """Weak references to a model, its optimizers, parameters, buffers, masters and their state."""
    found: dict[str, Any] = {"model": model, **dict(model.named_parameters())}
    found.update(model.named_buffers())
    for i, optimizer in enumerate(optimizers):
        found[f"optimizer {i}"] = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for j, parameter in enumerate(parameters):
            found[f"updated {i}.{j}"] = parameter
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"state {i}.{j}.{name}"] = value
    return {name: weakref.ref(value) for name, value in found.items()}


def alive(watched: dict[str, weakref.ref[Any]]) -> list[str]:
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


def trained_pair(opt_level: str, factor: float = 1.0) -> tuple[nn.Module, Any]:
    model = normalised_mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    for _ in range(3):
        train_step(model, optimizer, batch())
    train_step(model, optimizer, batch(), factor)
    return model, optimizer


@pytest.mark.parametrize("opt_level", LEVELS)
def test_model_optimizer_parameters_and_masters_die_while_the_session_is_open(
    opt_level: str,
) -> None:
    model, optimizer = trained_pair(opt_level)
    watched = references(model, optimizer)
    del model, optimizer
    assert alive(watched) == []
    torch.mm(torch.ones(1, 1), torch.ones(1, 1))  # the session is still of use
    assert isinstance(amp.state_dict(), dict)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_masters_die_with_the_optimizer_and_the_model(opt_level: str) -> None:
    model, optimizer = trained_pair(opt_level)
    masters = [weakref.ref(master) for master in amp.master_params(optimizer)]
    del optimizer
    gc.collect()
    model(batch()[0])
    del model
    gc.collect()
    assert not any(master() is not None for master in masters)


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
def test_they_die_after_a_skipped_step_and_after_a_block_without_a_step(opt_level: str) -> None:
    model, optimizer = trained_pair(opt_level, float("inf") if opt_level < "O3" else 1.0)
    with amp.scale_loss(model(batch()[0]).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    watched = references(model, optimizer)
    del model, optimizer, scaled_loss
    assert alive(watched) == []


@pytest.mark.parametrize("opt_level", LEVELS)
def test_they_die_after_a_forward_without_a_backward(opt_level: str) -> None:
    model, optimizer = trained_pair(opt_level)
    model(batch()[0])
    watched = references(model, optimizer)
    del model, optimizer
    assert alive(watched) == []


@pytest.mark.parametrize("opt_level", LEVELS)
def test_they_die_with_a_scheduler(opt_level: str) -> None:
    model = normalised_mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train_step(model, optimizer, batch())
    watched = references(model, optimizer)
    del model, optimizer, before, after
    assert alive(watched) == []


@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_original_dies_while_a_deep_copy_lives(opt_level: str) -> None:
    model, optimizer = trained_pair(opt_level)
    twin = copy.deepcopy(model)
    watched = references(model, optimizer)
    del model, optimizer
    assert alive(watched) == []
    twin(batch()[0])


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_deep_copy_dies_after_a_forward(opt_level: str) -> None:
    model, _optimizer = trained_pair(opt_level)
    twin = copy.deepcopy(model)
    twin(batch()[0])
    watched = references(twin)
    del twin
    assert alive(watched) == []


@pytest.mark.parametrize("opt_level", LEVELS)
def test_they_die_after_uninitialize(opt_level: str) -> None:
    model, optimizer = trained_pair(opt_level)
    amp.uninitialize()
    watched = references(model, optimizer)
    del model, optimizer
    assert alive(watched) == []


@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_objects_of_an_earlier_call_die_when_there_is_a_later_one(opt_level: str) -> None:
    first, first_optimizer = trained_pair(opt_level)
    second, second_optimizer = trained_pair(opt_level)
    watched = references(first, first_optimizer)
    del first, first_optimizer
    assert alive(watched) == []
    assert list(amp.state_dict()) == ["loss_scaler0"]
    train_step(second, second_optimizer, batch())


class _OwnNorm(nn.Module):
    def forward(self, source: torch.Tensor) -> torch.Tensor:
        centred = source - source.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


class _SwishBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), _OwnNorm()

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(source)
        return self.norm(hidden * torch.sigmoid(hidden))


def _bytes_saved_for_backward(opt_level: str) -> int:
    model = nn.Sequential(*[_SwishBlock() for _ in range(20)])
    model = amp.initialize(model, opt_level=opt_level, verbosity=0)
    saved: dict[tuple[int, int], int] = {}
    kept: list[torch.Tensor] = []  # an address that is used twice would count once

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        saved[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(256, 32)).sum()
    return sum(saved.values())


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_operations_in_float_among_half_ones_save_no_more_than_float_alone(opt_level: str) -> None:
    in_float = _bytes_saved_for_backward("O0")
    amp.uninitialize()
    assert _bytes_saved_for_backward(opt_level) <= in_float
