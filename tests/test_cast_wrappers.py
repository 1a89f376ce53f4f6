"""The wrapper itself: it stands for the function it wraps, in every respect but the casts."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp
from amp_patch import AmpError, AmpWarning
from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.presets import PRESETS, resolve_rules
from amp_patch.casts.rules import OP_RULES, CastRule, OpRule
from amp_patch.casts.wrappers import CastWrapper, install_casts

PLAIN = {row: getattr(row.owner, row.name) for row in OP_RULES if hasattr(row.owner, row.name)}


@pytest.fixture
def context() -> Iterator[CastContext]:
    """Wrappers of the default rules are in place; no model, no session."""
    patcher, context = Patcher(), CastContext()
    install_casts(patcher, context)
    context.half_dtype = torch.bfloat16
    yield context
    patcher.restore()


def _installed(*rules: OpRule) -> tuple[Patcher, CastContext]:
    patcher, context = Patcher(), CastContext()
    context.half_dtype = torch.float16
    install_casts(patcher, context, rules)
    return patcher, context


def test_every_row_is_wrapped_and_put_back() -> None:
    patcher = Patcher()
    install_casts(patcher, CastContext())
    for row in PLAIN:
        assert isinstance(vars(row.owner)[row.name], CastWrapper), row
    patcher.restore()
    assert all(getattr(row.owner, row.name) == plain for row, plain in PLAIN.items())
    assert "matmul" not in vars(torch.Tensor)  # which torch inherits


def test_wrapper_passes_for_its_function(context: CastContext) -> None:
    plain = next(plain for row, plain in PLAIN.items() if row.qualified_name == "torch:softmax")
    assert torch.softmax == plain
    assert hash(torch.softmax) == hash(plain)
    assert torch.softmax.__name__ == "softmax"
    assert torch.softmax.__doc__ == plain.__doc__
    assert inspect.signature(F.gumbel_softmax).parameters["tau"].default == 1


@pytest.mark.parametrize(
    "path", ["softmax", "Tensor.matmul", "nn.functional.linear", "linalg.inv", "_VF.lstm"]
)
def test_pickle_of_a_wrapper_is_the_name_of_the_function(context: CastContext, path: str) -> None:
    function: Any = torch
    for part in path.split("."):
        function = getattr(function, part)
    stored = pickle.dumps(function)
    assert b"amp_patch" not in stored
    assert pickle.loads(stored) == function  # noqa: S301 (made by this test)
    assert copy.deepcopy(function) is function
    assert copy.copy(function) is function


def test_bound_method_pickles_with_its_tensor(context: CastContext) -> None:
    bound = pickle.loads(pickle.dumps(torch.ones(2, 2).matmul))  # noqa: S301 (made by this test)
    assert torch.equal(bound(torch.ones(2, 2)).float(), torch.full((2, 2), 2.0))


def test_suspended_wrapper_is_the_plain_function(context: CastContext) -> None:
    value = torch.ones(2, 2)
    with context.suspended():
        assert (value @ value).dtype is torch.float32
        assert torch.exp(value.half()).dtype is torch.float16
    assert (value @ value).dtype is torch.bfloat16


def test_weight_is_cast_once(context: CastContext) -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2))
    layer(torch.ones(1, 2))
    assert len(context.cache) == 2
    layer.double()(torch.ones(1, 2).double())
    assert layer(torch.ones(1, 2).double()).dtype is torch.float64


def test_operation_that_torch_lacks_is_left_out_with_one_warning() -> None:
    rows = (OpRule(torch, "brand_new", CastRule.HALF), OpRule(torch, "newer", CastRule.FLOAT))
    with pytest.warns(AmpWarning, match=r"has no torch:brand_new, torch:newer") as caught:
        patcher, _ = _installed(*rows)
    assert len(caught) == 1
    patcher.restore()


def test_refused_operation_names_the_way_out() -> None:
    rules = resolve_rules("apex-2019")
    patcher, _ = _installed(*rules)
    try:
        with pytest.raises(AmpError, match=r"pass tensor.float\(\), or better: .*_with_logits"):
            F.binary_cross_entropy(torch.rand(2).half(), torch.ones(2))
        with pytest.raises(AmpError, match=r"exp_: expected float32 tensors, found half ones"):
            torch.ones(2).half().exp_()
        assert F.binary_cross_entropy(torch.rand(2), torch.ones(2)).dtype is torch.float32
    finally:
        patcher.restore()


@pytest.mark.parametrize("preset", PRESETS)
def test_model_trains_under_every_preset(preset: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )
    patcher, context = _installed(*resolve_rules(preset))
    try:
        loss = F.cross_entropy(model(torch.rand(2, 1, 4, 4)), torch.tensor([0, 2]))
        loss.backward()
    finally:
        context.cache.clear()
        patcher.restore()
    assert loss.dtype is torch.float32
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_half_only_leaves_precision_to_the_inputs() -> None:
    patcher, _ = _installed(*resolve_rules(half_only=True))
    try:
        half, full = torch.rand(3, 3).half(), torch.rand(3, 3)
        assert half.exp().dtype is half.softmax(-1).dtype is torch.float16
        assert F.mse_loss(half, full).dtype is torch.float32
        assert torch.linalg.inv(half).dtype is torch.float16  # in float32, for want of a kernel
        assert (full @ full).dtype is torch.float16
        assert half.clone().exp_().dtype is torch.float16
    finally:
        patcher.restore()


def test_additions_of_the_user_are_in_force() -> None:
    rules = resolve_rules(half=[F.gelu], float=["Tensor.add"], leave=["torch.softmax"])
    patcher, _ = _installed(*rules)
    try:
        half, full = torch.rand(3).half(), torch.rand(3)
        assert F.gelu(full).dtype is torch.float16
        assert (half + half).dtype is torch.add(half, half).dtype is torch.float32
        half += full
        assert half.dtype is torch.float16
        assert F.softmax(half, 0).dtype is torch.float16
    finally:
        patcher.restore()


def test_nothing_is_cast_inside_a_decomposition_in_float() -> None:
    model = nn.Linear(1, 1)
    amp.initialize(model, opt_level="O1", verbosity=0)
    matrix = torch.rand(6, 4).half()
    torch.manual_seed(0)
    result = torch.svd_lowrank(matrix, 2)
    with amp.disable_casts():
        torch.manual_seed(0)
        expected = torch.svd_lowrank(matrix.float(), 2)
    for one, want in zip(result, expected, strict=True):
        assert torch.equal(one, want)


def test_wrapper_calls_what_it_is_told_to_until_it_is_told_otherwise(context: CastContext) -> None:
    wrapper, matrix = vars(torch.Tensor)["matmul"], torch.ones(2, 2)
    before, seen = wrapper.call, []

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(wrapper.row.qualified_name)
        return before(*args, **kwargs)

    taken = matrix.matmul  # bound before: it keeps what it would have called
    wrapper.set_call(call)
    try:
        assert matrix.matmul(matrix).dtype is torch.bfloat16
        assert vars(torch.Tensor)["matmul"] is wrapper
        assert b"Tensor.matmul" in pickle.dumps(torch.Tensor.matmul)
    finally:
        wrapper.set_call(before)
    taken(matrix)
    assert matrix.matmul(matrix).dtype is torch.bfloat16
    assert seen == ["torch:Tensor.matmul"]
    assert wrapper.call is before
