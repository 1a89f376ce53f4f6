"""Casting a model in place: which tensors, what goes in and comes out, and what cannot be cast."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch import OPT_LEVELS, AmpError, AmpWarning

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Net(nn.Module):
    """Layers, statistics and buffers of every kind of dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.batch_norm = nn.BatchNorm1d(2)
        self.plain_norm = nn.BatchNorm1d(2, affine=False)
        self.layer_norm = nn.LayerNorm(2)
        self.wide = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("table", torch.full((2,), 1 / 3))
        self.register_buffer("counts", torch.ones(2, dtype=torch.int64))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_norm(self.plain_norm(self.batch_norm(self.linear(x)))) + self.table


def cast(model: nn.Module, opt_level: str = "O2", **overrides: Any) -> torch.optim.Optimizer:
    """Cast `model` as the level says, with an optimizer for all its parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **overrides)
    return optimizer


def masters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for one in amp.master_params(optimizer) if one.dtype is FP32]


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.dtype for name, tensor in named}


@pytest.mark.parametrize(("opt_level", "half"), [("O2", FP16), ("O5", BF16)])
def test_all_is_cast_but_batchnorm_and_what_is_no_single_precision(
    opt_level: str, half: torch.dtype
) -> None:
    model = Net()
    before = dtypes(model)
    cast(model, opt_level)
    for name, dtype in dtypes(model).items():
        keeps = "batch_norm" in name or "plain_norm" in name or before[name] is not FP32
        assert dtype is (before[name] if keeps else half), name


def test_all_half_casts_batchnorm_and_its_statistics_too() -> None:
    model = Net()
    cast(model, "O3")
    found = dtypes(model)
    assert found["batch_norm.weight"] is FP16
    assert found["batch_norm.running_mean"] is FP16
    assert found["plain_norm.running_var"] is FP16
    assert found["batch_norm.num_batches_tracked"] is torch.int64


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d]
)
def test_every_kind_of_batchnorm_keeps_its_precision(norm: Any) -> None:
    model = nn.Sequential(norm(2, affine=True, track_running_stats=True))
    cast(model)
    assert dtypes(model)["0.weight"] is FP32
    assert dtypes(model)["0.running_var"] is FP32


def test_norm_without_running_statistics_is_cast() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(2, affine=True))
    cast(model)
    assert dtypes(model)["0.weight"] is FP16


def test_parameters_stay_the_same_objects() -> None:
    model = Net()
    before = dict(model.named_parameters())
    cast(model)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


def test_shared_weight_is_cast_once_and_stays_shared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    optimizer = cast(model)
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype is FP16
    assert len(masters_of(optimizer)) == 3


def test_only_parameters_of_an_optimizer_and_buffers_keep_their_exact_values() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([model.linear.weight], lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    after = model.state_dict()
    for name in ("linear.weight", "table"):
        assert torch.equal(after[name], before[name])
    assert torch.equal(after["linear.bias"], before["linear.bias"].half().float())


@pytest.mark.parametrize("overrides", [{"opt_level": "O3"}, {"master_weights": False}], ids=str)
def test_no_masters_where_the_policy_has_none(overrides: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    assert masters_of(cast(model, **overrides)) == []


def test_restore_gives_back_dtypes_values_and_hooks() -> None:
    model = Net()
    before, hooks = copy.deepcopy(model.state_dict()), hook_counts(model)
    optimizer = cast(model)
    assert hook_counts(model) != hooks
    amp.uninitialize()
    assert list(model.parameters()) == optimizer.param_groups[0]["params"]
    assert hook_counts(model) == hooks
    for name, value in model.state_dict().items():
        assert value.dtype is before[name].dtype
        assert torch.equal(value, before[name])


def hook_counts(model: nn.Module) -> list[int]:
    tables = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_state_dict_hooks",
        "_load_state_dict_pre_hooks",
    )
    return [len(vars(module)[table]) for module in model.modules() for table in tables]


def test_failure_in_the_middle_of_a_cast_leaves_nothing_behind() -> None:
    class Fragile(nn.Linear):
        def register_forward_pre_hook(self, *_: Any, **__: Any) -> Any:
            raise ValueError("no hooks here")

    model = Fragile(2, 2)
    weight = model.weight.detach().clone()
    with pytest.raises(ValueError, match="no hooks here"):
        cast(model)
    assert model.weight.dtype is FP32
    assert torch.equal(model.weight, weight)
    assert hook_counts(model) == hook_counts(nn.Linear(2, 2))


def test_model_with_half_weights_is_cast_with_a_warning_at_the_users_line() -> None:
    model = nn.Linear(2, 2).half()
    with pytest.warns(AmpWarning) as caught:
        cast(model)
    (warning,) = caught
    assert warning.filename == __file__
    assert "Linear has half weights already" in str(warning.message)
    assert "pass the FP32 model" in str(warning.message)


def test_half_weights_come_back_half() -> None:
    model = nn.Linear(2, 2).half()
    with pytest.warns(AmpWarning, match="has half weights already"):
        cast(model, "O5")
    assert model.weight.dtype is BF16
    amp.uninitialize()
    assert model.weight.dtype is FP16


class Point(NamedTuple):
    x: torch.Tensor
    index: torch.Tensor


class Echo(nn.Module):
    """Notes what it is called with, and returns what it was told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.result: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return self.result


def test_inputs_are_cast_wherever_they_stand_and_the_rest_is_not() -> None:
    model = Echo()
    cast(model)
    args = (torch.ones(1), [torch.ones(1)], torch.ones(1, dtype=torch.float64), "text")
    point = Point(torch.ones(1), torch.zeros(1, dtype=torch.int64))
    model(*args, point=point, flag=True)
    assert model.args[0].dtype is model.args[1][0].dtype is model.kwargs["point"].x.dtype is FP16
    assert model.args[2] is args[2]
    assert model.args[3] == "text"
    assert model.kwargs["point"].index is point.index
    assert model.kwargs["flag"] is True
    assert args[0].dtype is args[1][0].dtype is point.x.dtype is FP32


def test_input_that_needs_a_gradient_gets_it() -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
    cast(model)
    model(x).sum().backward()
    assert x.grad.dtype is FP32
    assert torch.equal(x.grad, model.weight.detach().float())


def test_outputs_are_cast_wherever_they_stand() -> None:
    model = Echo()
    cast(model)
    index = torch.zeros(1, dtype=torch.int64)
    model.result = {"logits": torch.ones(1, dtype=FP16), "more": [index, "text"]}
    mapped = model()
    assert mapped["logits"].dtype is FP32
    assert mapped["more"] is model.result["more"]
    assert model.result["logits"].dtype is FP16


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_output_has_the_dtype_asked_for(opt_level: str, dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    cast(model, opt_level, cast_model_outputs=dtype)
    assert model(torch.ones(1, 2)).dtype is dtype
    amp.uninitialize()
    assert model(torch.ones(1, 2)).dtype is FP32


@pytest.mark.parametrize("opt_level", OPT_LEVELS)
def test_ordinary_model_is_castable_at_every_level(opt_level: str) -> None:
    cast(Net(), opt_level)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])
def test_lazy_parameters_are_refused_by_name(opt_level: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(AmpError) as caught:
        amp.initialize(model, opt_level=opt_level)
    assert str(caught.value) == (
        "models: expected materialised parameters, found the lazy '1.weight' in Sequential; run "
        "one forward pass before initialize"
    )


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
def test_half_weights_are_refused_where_only_operations_are_cast(
    opt_level: str, half: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(2, 2).to(half))
    with pytest.raises(AmpError) as caught:
        amp.initialize(model, opt_level=opt_level)
    assert f"models: {opt_level} expects FP32 weights, found '0.weight' in {half}" in str(
        caught.value
    )
    assert "call model.float()" in str(caught.value)


def test_weights_that_amp_patch_cast_count_with_the_dtype_they_had() -> None:
    model = nn.Linear(2, 2)
    cast(model)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model.weight.dtype is FP32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("opt_level", ["O2", "O3", "O5"])
def test_scripted_model_is_refused_where_the_model_is_cast(opt_level: str) -> None:
    model = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(AmpError, match=f"models: {opt_level} expects modules that take hooks"):
        amp.initialize(model, opt_level=opt_level)
    amp.initialize(model, opt_level="O1", verbosity=0)
