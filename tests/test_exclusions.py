"""What of a cast model stays FP32: modules, buffers and arguments, chosen by the user."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical, backward, train_step
from plain_torch import assert_trains_as_in_fp32
from torch import nn

import amp_patch as amp

CAST = pytest.mark.parametrize("opt_level", ["O2", "O3", "O5"])
UNCAST = pytest.mark.parametrize("opt_level", ["O0", "O1", "O4"])
FP32 = torch.float32


class FrozenNorm(nn.Module):
    """A hand-written norm with statistics in buffers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(size))
        self.register_buffer("std", torch.rand(size) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = FrozenNorm(8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.norm(self.first(x)))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def started(model: nn.Module, opt_level: str, **options: Any) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return amp.initialize(model, optimizer, opt_level=opt_level, **options)


def full(model: nn.Module) -> set[str]:
    """The paths of what is FP32."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {path for path, tensor in named if tensor.dtype is FP32}


HEAD = {"head.weight", "head.bias"}
SELECTORS: dict[str, tuple[Any, set[str]]] = {
    "nothing": ((), set()),
    "path": ("head", HEAD),
    "type": (nn.LayerNorm, {"norm.weight", "norm.bias"}),
    "own type": ([FrozenNorm], {"frozen.mean", "frozen.std"}),
    "pattern": ("blocks.*", {f"blocks.{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}),
    "several": (["head", nn.LayerNorm], HEAD | {"norm.weight", "norm.bias"}),
    "one buffer": ("frozen.mean", {"frozen.mean"}),
    "every bias": (
        "*.bias",
        {"first.bias", "norm.bias", "blocks.0.bias", "blocks.1.bias", "head.bias"},
    ),
}


@pytest.mark.parametrize(("selector", "expected"), SELECTORS.values(), ids=SELECTORS)
@CAST
def test_what_is_selected_stays_fp32_and_the_rest_is_cast(
    opt_level: str, selector: Any, expected: set[str]
) -> None:
    model, _ = started(Net(), opt_level, keep_fp32=selector)
    assert full(model) == expected


@CAST
def test_an_instance_can_be_selected(opt_level: str) -> None:
    model = Net()
    started(model, opt_level, keep_fp32=[model.blocks[1], model.head])
    assert full(model) == {"blocks.1.weight", "blocks.1.bias"} | HEAD


@pytest.mark.parametrize("selector", ["head", nn.LayerNorm, [FrozenNorm, "blocks.0"]], ids=repr)
@CAST
def test_a_model_with_exclusions_trains_as_in_fp32(opt_level: str, selector: Any) -> None:
    def loop(library: Any, **options: Any) -> Any:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        library.initialize(model, optimizer, keep_fp32=selector, **options)
        losses = []
        for inputs, targets in [batch() for _ in range(4)]:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            with library.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
        return [model], losses

    assert_trains_as_in_fp32(loop, opt_level, factor=2.0)


@CAST
def test_an_excluded_module_computes_in_fp32_and_its_neighbours_in_half(opt_level: str) -> None:
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen[self.name] = (x.dtype, out.dtype)
            return out

    layers = [Watched(4, 4) for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.name = f"layer{i}"
    model, _ = started(nn.Sequential(*layers), opt_level, keep_fp32=layers[1])
    assert model(torch.randn(2, 4)).dtype is FP32
    half = amp.OPT_LEVELS[opt_level].half_dtype
    assert seen == {"layer0": (half, half), "layer1": (FP32, FP32), "layer2": (half, half)}


@pytest.mark.parametrize("selector", ["haed", "blocks.7", nn.Conv2d], ids=repr)
@CAST
def test_a_selector_that_selects_nothing_is_refused(opt_level: str, selector: Any) -> None:
    with pytest.raises(amp.AmpError, match=r"keep_fp32: .* selects nothing"):
        started(Net(), opt_level, keep_fp32=selector)


@pytest.mark.parametrize("selector", [7, [None], torch.float32, {"head": True, 3: 1}], ids=repr)
@CAST
def test_what_is_no_selector_is_refused(opt_level: str, selector: Any) -> None:
    with pytest.raises(amp.AmpError, match="keep_fp32: expected modules, types of modules"):
        started(Net(), opt_level, keep_fp32=selector)


@CAST
def test_exclusions_come_off_with_the_rest(opt_level: str) -> None:
    model = Net()
    before = copy.deepcopy(dict(model.state_dict()))
    started(model, opt_level, keep_fp32=["head", "frozen.mean"])
    amp.uninitialize()
    if opt_level == "O3":
        assert full(model) == set(before)
    else:
        assert_identical(dict(model.state_dict()), before)
    assert model(torch.randn(2, 6)).dtype is FP32


@CAST
def test_a_state_dict_with_exclusions_is_fp32_and_loads_back(opt_level: str) -> None:
    model, optimizer = started(Net(), opt_level, keep_fp32="head")
    train_step(model, optimizer, batch(), factor=2.0**-8)
    state = copy.deepcopy(dict(model.state_dict()))
    assert {value.dtype for value in state.values()} == {FP32}
    train_step(model, optimizer, batch(), factor=2.0**-8)
    model.load_state_dict(state)
    assert_identical(dict(model.state_dict()), state)


# -- norms -----------------------------------------------------------------------------------------

NORMS: dict[str, Any] = {
    "BatchNorm": nn.BatchNorm1d(4),
    "BatchNorm without affine": nn.BatchNorm1d(4, affine=False),
    "BatchNorm without statistics": nn.BatchNorm1d(4, track_running_stats=False),
    "SyncBatchNorm in eval": nn.SyncBatchNorm(4).eval(),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("opt_level", ["O2", "O5"])
def test_every_batchnorm_keeps_weights_and_statistics_in_fp32(opt_level: str, name: str) -> None:
    norm = copy.deepcopy(NORMS[name])
    model = nn.Sequential(nn.Linear(6, 4), norm, nn.Linear(4, 3))
    _, optimizer = started(model, opt_level)
    model.train()
    if "eval" in name:
        norm.eval()
    for _ in range(3):
        train_step(model, optimizer, batch(), factor=2.0**-8)
    floating = [t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()]
    assert all(tensor.dtype is FP32 for tensor in floating)
    assert all(tensor.isfinite().all() for tensor in floating)


OTHER_NORMS: dict[str, Any] = {
    "GroupNorm": (nn.GroupNorm(2, 4), (4, 6, 3)),
    "LayerNorm": (nn.LayerNorm(4), (4, 6)),
    "InstanceNorm": (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (4, 6, 3)),
    "hand-written": (FrozenNorm(4), (4, 6)),
}


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "cast"])
@pytest.mark.parametrize("name", OTHER_NORMS)
@CAST
def test_other_norms_stay_fp32_on_request_and_train_either_way(
    opt_level: str, name: str, keeps: bool
) -> None:
    norm, shape = copy.deepcopy(OTHER_NORMS[name])
    first = nn.Conv1d(6, 4, 1) if len(shape) == 3 else nn.Linear(6, 4)
    model = nn.Sequential(first, norm)
    _, optimizer = started(model, opt_level, keep_fp32=type(norm) if keeps else ())
    for _ in range(3):
        optimizer.zero_grad()
        backward(model(torch.randn(shape)).square().mean() * 2.0**-6, optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
    if keeps:
        assert all(
            t.dtype is FP32 for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()
        )


@pytest.mark.parametrize("opt_level", ["O2", "O5"])
def test_running_statistics_of_an_instance_norm_are_exact_in_checkpoints(opt_level: str) -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv1d(6, 4, 1), norm)
    started(model, opt_level)
    state = model.state_dict()
    assert state["1.running_var"].dtype is FP32
    model(torch.randn(4, 6, 3))
    assert norm.running_mean.dtype is FP32  # statistics are sums over many batches


@CAST
def test_a_frozen_batchnorm_beside_layers_in_training_keeps_its_statistics(opt_level: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    _, optimizer = started(model, opt_level)
    model.train()
    model[1].eval()
    before = [buffer.clone() for buffer in model[1].buffers()]
    train_step(model, optimizer, batch(), factor=2.0**-8)
    assert_identical(list(model[1].buffers()), before)


# -- buffers with large values ---------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_buffer_above_the_range_of_half_is_warned_of_by_its_path() -> None:
    with pytest.warns(amp.AmpWarning, match=r"the buffers 0\.table hold values above 65504"):
        started(nn.Sequential(Table(1.0, 70000.0)), "O2")


def test_the_warning_names_the_option_that_helps_and_with_it_is_silent() -> None:
    with pytest.warns(amp.AmpWarning, match=r"keep_fp32=\['0\.table'\]"):
        started(nn.Sequential(Table(1.0, 70000.0)), "O2")
    amp.uninitialize()
    model, _ = started(nn.Sequential(Table(1.0, 70000.0)), "O2", keep_fp32=["0.table"])
    assert model[0].table.tolist() == [1.0, 70000.0]


@pytest.mark.parametrize(
    ("opt_level", "values"),
    [("O5", (1.0, 70000.0)), ("O2", (1.0, 65504.0)), ("O2", (1.0, float("-inf")))],
    ids=["bfloat16", "just-inside", "infinite-already"],
)
def test_buffers_that_lose_nothing_are_not_warned_of(
    opt_level: str, values: tuple[float, ...]
) -> None:
    model, _ = started(nn.Sequential(Table(*values)), opt_level)
    assert model[0].table.dtype is not FP32


# -- arguments -------------------------------------------------------------------------------------


class Echo(nn.Module):
    """Gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, *, target: Any = None
    ) -> tuple[torch.Tensor, Any, Any]:
        return self.linear(x), t, target


@pytest.mark.parametrize("how", ["positional", "keyword"])
@CAST
def test_kept_arguments_arrive_as_they_were(opt_level: str, how: str) -> None:
    model, _ = started(Echo(), opt_level, keep_inputs=("t", "target"))
    x, t, target = torch.randn(1, 2), torch.tensor([70000.0]), {"y": torch.tensor([16777217.0])}
    arguments = ((x, t), {}) if how == "positional" else ((), {"x": x, "t": t})
    _, found, found_target = model(*arguments[0], target=target, **arguments[1])
    assert found.item() == 70000.0
    assert found_target["y"].item() == 16777216.0  # as FP32 has it


@CAST
def test_arguments_that_are_not_kept_are_cast(opt_level: str) -> None:
    model, _ = started(Echo(), opt_level, keep_inputs="target", cast_model_outputs="float32")
    _, found, _ = model(torch.randn(1, 2), torch.tensor([1.0 + 2.0**-12]))
    assert found.item() == 1.0


@CAST
def test_float64_and_integers_pass_without_being_named(opt_level: str) -> None:
    model, _ = started(Echo(), opt_level)
    exact, ids = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64), torch.arange(60000)
    _, found, found_ids = model(torch.randn(1, 2), exact, target=ids)
    assert found.dtype is torch.float64
    assert found.item() == exact.item()
    assert found_ids is ids


@CAST
def test_an_argument_that_forward_does_not_have_is_refused_with_those_it_has(
    opt_level: str,
) -> None:
    with pytest.raises(amp.AmpError, match=r"keep_inputs: .*\(t, target, x\), found 'targets'"):
        started(Echo(), opt_level, keep_inputs="targets")


@CAST
def test_names_that_are_no_strings_are_refused(opt_level: str) -> None:
    with pytest.raises(amp.AmpError, match="keep_inputs: expected names of arguments, found int"):
        started(Echo(), opt_level, keep_inputs=[1])


@UNCAST
def test_exclusions_do_no_harm_where_nothing_is_cast(opt_level: str) -> None:
    model, optimizer = started(Net(), opt_level, keep_fp32="head", keep_inputs="x")
    assert {p.dtype for p in model.parameters()} == {FP32}
    train_step(model, optimizer, batch(), factor=2.0**-8)
