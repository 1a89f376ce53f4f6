"""The interface of 2018 and the lists of functions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amp_patch
from amp_patch import AmpError
from amp_patch.compat.installer import install_as_apex


@pytest.fixture
def amp() -> Iterator[Any]:
    undo = install_as_apex()
    yield importlib.import_module("apex.amp")
    undo()


def half() -> torch.Tensor:
    return torch.full((2,), 0.5).half()


def test_handle_casts_without_a_model(amp: Any) -> None:
    handle = amp.init()
    assert handle.is_active()
    assert amp._amp_state.handle is handle  # noqa: SLF001
    assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float16
    with handle._disable_casts():  # noqa: SLF001
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32
    handle._deactivate()  # noqa: SLF001
    assert not handle.is_active()
    assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize("caches", [True, False])
def test_weights_are_cast_once_an_iteration_unless_told_otherwise(amp: Any, caches: bool) -> None:
    handle = amp.init(enable_caching=caches)
    assert handle.has_cache is caches
    model = torch.nn.Linear(1, 1, bias=False)
    alias = model.weight.detach().numpy()  # what is written here moves no counter of torch
    alias[:] = 1.0
    assert model(torch.ones(1, 1)).item() == 1.0
    alias[:] = 2.0
    assert model(torch.ones(1, 1)).item() == (1.0 if caches else 2.0)


def test_handle_scales_the_loss_of_a_new_optimizer(amp: Any) -> None:
    handle = amp.init(loss_scale=32.0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(torch.ones(1, 2)).float().sum()
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == 32.0 * loss.item()
        scaled.backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_wrapped_optimizer_has_a_scale_for_each_of_its_losses(amp: Any) -> None:
    handle = amp.init()
    model = torch.nn.Linear(2, 1)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    for factor in (1e30, 1e-3):
        loss = model(torch.ones(1, 2)).float().sum() * factor
        with optimizer.scale_loss(loss) as scaled:
            scaled.backward()
    before = model.weight.clone()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.weight, before)
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]  # noqa: SLF001
    assert scales[:2] == [2.0**15, 2.0**16]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_disabled_handle_does_nothing(amp: Any) -> None:
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    model = torch.nn.Linear(2, 1)
    assert model(torch.ones(1, 2)).dtype is torch.float32
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(1, 2)).sum()
    with optimizer.scale_loss(loss) as scaled:
        assert scaled is loss
    with handle.scale_loss(loss, optimizer) as scaled, handle._disable_casts():  # noqa: SLF001
        assert scaled is loss


def test_lists_are_those_of_2019(amp: Any) -> None:
    amp.init()
    with pytest.raises(AmpError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(half(), half())
    with pytest.raises(AmpError, match="exp_"):
        half().exp_()
    assert half().cpu().dtype is torch.float32


def test_banned_functions_are_allowed_on_request(amp: Any) -> None:
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(half(), half()).dtype is torch.float32


def test_init_refuses_a_level_that_casts_models(amp: Any) -> None:
    amp._amp_state.opt_level = "O2"  # noqa: SLF001
    with pytest.raises(AmpError, match="'O2'"):
        amp.init()


def test_lists_hold_the_names_that_scripts_look_for(amp: Any) -> None:
    lists = amp.lists
    assert lists.functional_overrides.MODULE is F
    assert lists.tensor_overrides.MODULE is torch.Tensor
    assert {"conv2d", "linear"} <= set(lists.functional_overrides.FP16_FUNCS)
    assert {"softmax", "layer_norm", "cross_entropy", "gelu", "interpolate"} <= set(
        lists.functional_overrides.FP32_FUNCS
    )
    assert {"addmm", "bmm", "matmul"} <= set(lists.torch_overrides.FP16_FUNCS)
    assert {"exp", "pow", "softmax", "sum"} <= set(lists.torch_overrides.FP32_FUNCS)
    assert {"addcmul", "atan2"} <= set(lists.torch_overrides.CASTS)
    assert lists.torch_overrides.SEQUENCE_CASTS == ["cat", "stack"]


def test_edits_hold_at_the_next_initialize(amp: Any) -> None:
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    amp.lists.functional_overrides.FP16_FUNCS.append("gelu")
    amp.lists.torch_overrides.FP32_FUNCS.append("sigmoid")
    amp.lists.torch_overrides.CASTS.append("maximum")
    amp.initialize(torch.nn.Linear(2, 1), opt_level="O1")
    assert torch.softmax(half(), -1).dtype is torch.float16
    assert F.gelu(torch.ones(2)).dtype is torch.float16
    assert torch.sigmoid(half()).dtype is torch.float32
    assert torch.maximum(half(), torch.ones(2)).dtype is torch.float32
    assert torch.exp(half()).dtype is torch.float32


def test_edits_end_with_the_undo() -> None:
    undo = install_as_apex()
    importlib.import_module("apex.amp").lists.torch_overrides.FP32_FUNCS.append("sigmoid")
    undo()
    amp_patch.initialize(torch.nn.Linear(2, 1), opt_level="O1")
    assert torch.sigmoid(half()).dtype is torch.float16
    undo = install_as_apex()
    assert "sigmoid" not in importlib.import_module("apex.amp").lists.torch_overrides.FP32_FUNCS
    undo()
