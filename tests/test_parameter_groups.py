"""What optimizers hold: groups that grow, layers that thaw, gradients of every kind."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from injections import overflowing
from networks import (
    LEVELS,
    MASTER_LEVELS,
    assert_identical,
    backward,
    gradients,
    snapshot,
    train_step,
)
from plain_torch import Loop, assert_trains_as_in_fp32
from torch import nn

import amp_patch as amp

SCALED_LEVELS = ("O1", "O2")
SMALL = {level: {"loss_scale": 128.0} for level in SCALED_LEVELS}  # nothing overflows


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def iteration(library: Any, model: nn.Module, optimizer: Any, *, none: bool = True) -> float:
    inputs, targets = batch()
    optimizer.zero_grad(set_to_none=none)
    loss = F.mse_loss(model(inputs), targets)
    with library.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return loss.item()


# -- groups that change ----------------------------------------------------------------------------


def adding_a_group_later(library: Any, **options: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.5)
    library.initialize(model, optimizer, **options)
    losses = [iteration(library, model, optimizer) for _ in range(3)]
    model.zero_grad()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
    losses += [iteration(library, model, optimizer) for _ in range(3)]
    return [model], losses


def adding_a_group_before_the_first_step(library: Any, **options: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.5)
    library.initialize(model, optimizer, **options)
    optimizer.add_param_group({"params": model[0].weight})
    return [model], [iteration(library, model, optimizer) for _ in range(4)]


def thawing_a_layer(library: Any, **options: Any) -> Any:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    library.initialize(model, optimizer, **options)
    losses = [iteration(library, model, optimizer) for _ in range(3)]
    model[0].requires_grad_(True)
    losses += [iteration(library, model, optimizer) for _ in range(3)]
    return [model], losses


def freezing_a_layer(library: Any, **options: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    library.initialize(model, optimizer, **options)
    losses = [iteration(library, model, optimizer) for _ in range(3)]
    optimizer.zero_grad()
    model[0].requires_grad_(False)
    losses += [iteration(library, model, optimizer) for _ in range(3)]
    return [model], losses


def thawing_with_a_new_optimizer(library: Any, **options: Any) -> Any:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    library.initialize(model, optimizer, **options)
    losses = [iteration(library, model, optimizer) for _ in range(3)]
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if options:
        library.initialize(model, optimizer, **options)
    losses += [iteration(library, model, optimizer) for _ in range(3)]
    return [model], losses


def replacing_a_head(library: Any, **options: Any) -> Any:
    """A new last layer half-way, with the whole of it initialised again."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    library.initialize(model, optimizer, **options)
    losses = [iteration(library, model, optimizer) for _ in range(3)]
    with torch.no_grad():
        model[2].weight.copy_(torch.linspace(-0.5, 0.5, 15).view(3, 5).half())
        model[2].bias.zero_()
    losses += [iteration(library, model, optimizer) for _ in range(3)]
    return [model], losses


def some_parameters_without_gradient(library: Any, **options: Any) -> Any:
    """Two branches, of which each batch takes one."""
    branches = nn.ModuleList([net(), net()])
    optimizer = torch.optim.SGD(branches.parameters(), lr=0.1, momentum=0.5)
    library.initialize(list(branches), optimizer, **options)
    losses = [iteration(library, branches[i % 2], optimizer) for i in range(6)]
    return list(branches), losses


def zeroing_in_place(library: Any, **options: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    library.initialize(model, optimizer, **options)
    return [model], [iteration(library, model, optimizer, none=False) for _ in range(4)]


def zeroing_through_the_model(library: Any, **options: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    library.initialize(model, optimizer, **options)
    losses = []
    for i in range(6):
        inputs, targets = batch()
        loss = F.mse_loss(model(inputs), targets)
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if i % 2:  # two batches a step
            optimizer.step()
            model.zero_grad()
        losses.append(loss.item())
    return [model], losses


def changing_hyperparameters_by_hand(library: Any, **options: Any) -> Any:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    library.initialize(model, optimizer, **options)
    losses = []
    for i in range(4):
        optimizer.param_groups[i % 2]["lr"] *= 0.5
        optimizer.param_groups[1]["momentum"] = 0.1 * i
        losses.append(iteration(library, model, optimizer))
    return [model], losses


def a_list_of_parameters_beside_the_registered_ones(library: Any, **options: Any) -> Any:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.alphas = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))]
            for i, alpha in enumerate(self.alphas):
                self.register_parameter(f"alpha{i}", alpha)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.alphas[0] + self.alphas[1]

    model = Mixed()
    optimizer = torch.optim.SGD([*model.alphas, *model.body.parameters()], lr=0.1)
    library.initialize(model, optimizer, **options)
    return [model], [iteration(library, model, optimizer) for _ in range(4)]


LOOPS: dict[str, Loop] = {
    one.__name__.replace("_", "-"): one
    for one in (
        adding_a_group_later,
        adding_a_group_before_the_first_step,
        thawing_a_layer,
        freezing_a_layer,
        thawing_with_a_new_optimizer,
        replacing_a_head,
        some_parameters_without_gradient,
        zeroing_in_place,
        zeroing_through_the_model,
        changing_hyperparameters_by_hand,
        a_list_of_parameters_beside_the_registered_ones,
    )
}


@pytest.mark.filterwarnings("ignore:.*gave its weights no master:amp_patch.AmpWarning")
@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_loop_trains_as_in_fp32(loop: Loop, opt_level: str) -> None:
    assert_trains_as_in_fp32(loop, opt_level)


# -- optimizers of every implementation ------------------------------------------------------------

IMPLEMENTATIONS: dict[str, Callable[[Any], Any]] = {
    f"{kind.__name__}-{how}": lambda p, kind=kind, how=how, more=more: kind(
        p, **more, **({how: True} if how != "plain" else {"foreach": False})
    )
    for kind, more, hows in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, ("plain", "foreach", "fused")),
        (torch.optim.Adam, {"lr": 0.02, "eps": 1e-3}, ("plain", "foreach", "fused")),
        (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3}, ("plain", "foreach", "fused")),
        (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-3}, ("plain", "foreach", "fused")),
        (torch.optim.RMSprop, {"lr": 0.02, "eps": 1e-2}, ("plain", "foreach")),
    )
    for how in hows
}


@pytest.mark.parametrize("factory", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_every_implementation_trains_as_in_fp32(
    opt_level: str, factory: Callable[[Any], Any]
) -> None:
    def loop(library: Any, **options: Any) -> Any:
        model = net()
        optimizer = factory(model.parameters())
        library.initialize(model, optimizer, **options)
        return [model], [iteration(library, model, optimizer) for _ in range(5)]

    if opt_level == "O3" and factory is IMPLEMENTATIONS["SGD-fused"]:
        pytest.skip("fused SGD of torch 2.13 is wrong for float16 parameters on a CPU")
    # Most of these divide by the size of the gradient, so that small ones are not small steps.
    assert_trains_as_in_fp32(loop, opt_level, factor=16.0)


class Scaled(torch.optim.SGD):
    """An optimizer whose step takes another argument and gives something back."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> float:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        super().step(closure)
        return factor


class NoOptimizer:
    """What others build around an optimizer: it has groups, a step and no other likeness."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups = self.inner.param_groups
        self.steps = 0

    def step(self) -> None:
        self.inner.step()
        self.steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_arguments_of_a_step_reach_it_and_its_result_comes_back(opt_level: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = Scaled(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, **SMALL.get(opt_level, {}))
    model.load_state_dict({"weight": torch.zeros(1, 1)})
    backward(model(torch.ones(1, 1)).sum(), optimizer)
    assert optimizer.step(factor=0.25) == 0.25
    assert model.state_dict()["weight"].item() == -0.25


@pytest.mark.parametrize("opt_level", LEVELS)
def test_what_only_looks_like_an_optimizer_trains_as_in_fp32(opt_level: str) -> None:
    def loop(library: Any, **options: Any) -> Any:
        model = net()
        optimizer = NoOptimizer(model.parameters())
        library.initialize(model, optimizer, **options)
        losses = [iteration(library, model, optimizer) for _ in range(4)]
        assert optimizer.steps == 4
        return [model], losses

    assert_trains_as_in_fp32(loop, opt_level)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_what_only_looks_like_an_optimizer_skips_too(opt_level: str) -> None:
    model = net()
    optimizer = NoOptimizer(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level)
    before = copy.deepcopy(dict(model.state_dict()))
    backward(overflowing(model(batch()[0]).sum()), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert optimizer.steps == 0
    assert_identical(dict(model.state_dict()), before)


# -- sparse gradients ------------------------------------------------------------------------------


def sparse_loop(factory: Callable[[Any], Any]) -> Loop:
    def loop(library: Any, **options: Any) -> Any:
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True))
        optimizer = factory(model.parameters())
        library.initialize(model, optimizer, **options)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(torch.randint(9, (5,))).float() - 1).square().mean()
            with library.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
        return [model], losses

    return loop


SPARSE: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, foreach=False),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # Adagrad's own
@pytest.mark.parametrize("factory", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_sparse_gradients_train_as_in_fp32(opt_level: str, factory: Callable[[Any], Any]) -> None:
    assert_trains_as_in_fp32(sparse_loop(factory), opt_level, factor=4.0)


@pytest.mark.parametrize("opt_level", SCALED_LEVELS)
def test_an_overflow_in_a_sparse_gradient_leaves_its_optimizer_as_it_was(opt_level: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1, eps=1e-3)
    amp.initialize(model, optimizer, opt_level=opt_level)
    backward(model(torch.arange(3)).float().sum() * 2.0**-6, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    before = snapshot(model, optimizer)
    backward(overflowing(model(torch.arange(5)).float().sum()), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_identical(snapshot(model, optimizer), before)


# -- gradients that are cleared --------------------------------------------------------------------


def clear_none(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)


def clear_zero(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def clear_default(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize("clear", [clear_none, clear_zero, clear_default])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_cleared_gradients_are_gone_from_weights_and_masters(
    opt_level: str, clear: Callable[[nn.Module, Any], None]
) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, **SMALL.get(opt_level, {}))
    backward(model(torch.ones(1, 1)).sum() * 3, optimizer)
    assert gradients(optimizer)[0].item() == 3.0
    clear(model, optimizer)
    left = [p.grad for p in (*model.parameters(), *amp.master_params(optimizer))]
    assert all(gradient is None or not gradient.any() for gradient in left)
    for _ in range(2):
        backward(model(torch.ones(1, 1)).sum() * 2, optimizer)
    assert gradients(optimizer)[0].item() == 4.0


@pytest.mark.parametrize("opt_level", LEVELS)
def test_clearing_through_the_model_after_a_step_leaves_nothing_to_be_added(
    opt_level: str,
) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, **SMALL.get(opt_level, {}))
    for value in (3.0, 2.0):
        backward(model(torch.ones(1, 1)).sum() * value, optimizer)
        assert gradients(optimizer)[0].item() == value
        optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("opt_level", LEVELS)
def test_clearing_through_the_model_without_a_step_leaves_nothing_to_be_added(
    opt_level: str,
) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=opt_level, **SMALL.get(opt_level, {}))
    backward(model(torch.ones(1, 1)).sum() * 3, optimizer)
    model.zero_grad()  # the user drops this batch
    backward(model(torch.ones(1, 1)).sum() * 2, optimizer)
    assert gradients(optimizer)[0].item() == 2.0


# -- odd moments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_step_before_the_first_backward_changes_nothing(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    amp.initialize(model, optimizer, opt_level=opt_level)
    before = snapshot(model, optimizer)
    optimizer.step()
    optimizer.state_dict()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    assert_identical(snapshot(model, optimizer), before)
    train_step(model, optimizer, batch(), factor=2.0**-8)


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_masters_are_made_in_initialize_and_nothing_is_made_later(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    masters = list(amp.master_params(optimizer))
    assert {master.dtype for master in masters} == {torch.float32}
    train_step(model, optimizer, batch(), factor=2.0**-8)
    for master, later in zip(masters, amp.master_params(optimizer), strict=True):
        assert later is master


@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_optimizer_of_a_model_that_was_rebuilt_is_refused_readably(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    strangers = [torch.optim.SGD(net().parameters(), lr=0.1)]
    for stranger in strangers:
        loss = model(batch()[0]).sum()
        with (
            pytest.raises(amp.AmpError, match=r"expected an optimizer that went through amp\.init"),
            amp.scale_loss(loss, stranger),
        ):
            pytest.fail("the block was entered")


def fill(model: nn.Module) -> None:
    model.load_state_dict({"weight": torch.full((1, 2), 5.0), "bias": torch.full((1,), 5.0)})


@torch.no_grad()
def write(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.fill_(5.0)


def initialise(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 5.0)


def assign_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 5.0)


def write_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(5.0)


def set_vector(model: nn.Module) -> None:
    torch.nn.utils.vector_to_parameters(torch.full((3,), 5.0), model.parameters())


@pytest.mark.parametrize("change", [fill, write, initialise, assign_data, write_data, set_vector])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_what_is_written_into_the_model_in_mid_training_stays(
    opt_level: str, change: Callable[[nn.Module], None]
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    inputs = torch.randn(4, 2)
    backward(model(inputs).sum() * 2.0**-8, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    change(model)
    backward(model(inputs).sum() * 0.0, optimizer)  # a step with zero gradients
    optimizer.step()
    for values in (model.parameters(), model.state_dict().values(), amp.master_params(optimizer)):
        assert all((value == 5.0).all() for value in values)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_parameters_that_are_views_of_one_buffer_stay_so_or_are_refused(opt_level: str) -> None:
    model = nn.Linear(2, 2)
    flat = torch.randn(6)
    model.weight.data, model.bias.data = flat[:4].view(2, 2), flat[4:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, bias = model.weight, model.bias
    amp.initialize(model, optimizer, opt_level=opt_level)
    assert model.weight is weight
    assert model.bias is bias
    if opt_level in ("O0", "O1", "O4"):
        assert model.weight.data_ptr() == flat.data_ptr()
    train_step(model, optimizer, (torch.randn(4, 2), torch.randn(4, 2)), factor=2.0**-8)
    if opt_level in ("O0", "O1", "O4"):
        assert_identical(flat, torch.cat([weight.detach().flatten(), bias.detach()]))


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_one_flat_parameter_behind_the_views_in_the_model_trains_or_is_refused(
    opt_level: str, scale: float
) -> None:
    model = nn.Linear(2, 2)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    flat.grad = torch.zeros_like(flat)
    model.weight.data, model.bias.data = flat.data[:4].view(2, 2), flat.data[4:]
    model.weight.grad, model.bias.grad = flat.grad[:4].view(2, 2), flat.grad[4:]
    optimizer = torch.optim.SGD([flat], lr=0.1)
    before = flat.detach().clone()
    try:
        amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=scale)
    except amp.AmpError as error:
        message = str(error)
        assert "view" in message or "storage" in message
        return
    backward(model(torch.ones(1, 2)).float().sum(), optimizer)
    optimizer.step()
    assert_identical(flat.detach(), before - 0.1)  # every gradient is 1
    assert_identical(model.weight.detach().float().flatten(), flat[:4].detach())


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_optimizer_without_parameters_of_the_model_trains_its_own(opt_level: str) -> None:
    model = net()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, **SMALL.get(opt_level, {}))
    loss = (model(batch()[0]).float() * temperature).square().mean()
    backward(loss, optimizer)
    optimizer.step()
    assert temperature.dtype is torch.float32
    assert temperature.item() != 1.0


@pytest.mark.parametrize("opt_level", LEVELS)
def test_groups_without_trained_parameters_are_no_obstacle(opt_level: str) -> None:
    model = net().requires_grad_(False)
    head = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(
        [{"params": list(model.parameters())}, {"params": list(head.parameters())}], lr=0.1
    )
    before = copy.deepcopy(dict(model.state_dict()))
    amp.initialize([model, head], optimizer, opt_level=opt_level)
    inputs, targets = batch()
    backward(F.mse_loss(head(model(inputs)), targets) * 2.0**-8, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    found = dict(model.state_dict())
    if opt_level == "O3":
        before = {name: value.half().float() for name, value in before.items()}
    assert_identical(found, before)


class Replaced(nn.Module):
    """A net whose head, with a norm in it, will be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.head = self.new_head()

    @staticmethod
    def new_head() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def replacing(library: Any, **options: Any) -> Any:
    """A new head, and then a new parameter in it, in mid-training."""
    model = Replaced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    library.initialize(model, optimizer, **options)
    losses = []
    for i in range(6):
        if i == 2:
            model.head = model.new_head()
            for parameter in model.head.parameters():
                optimizer.add_param_group({"params": [parameter]})
        if i == 4:
            model.head[1].weight = nn.Parameter(torch.full((3, 4), 0.125))
            optimizer.add_param_group({"params": [model.head[1].weight]})
        loss = F.mse_loss(model(torch.randn(8, 6)), torch.zeros(8, 3))
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [model], losses


@pytest.mark.parametrize("kept", [(), "head"], ids=["cast", "kept"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_layer_or_parameter_that_replaces_another_trains_as_in_fp32(
    opt_level: str, kept: Any
) -> None:
    assert_trains_as_in_fp32(
        lambda library, **options: replacing(library, keep_fp32=kept, **options), opt_level
    )


@pytest.mark.parametrize("opt_level", ["O2", "O5"])
def test_a_layer_that_replaces_another_is_cast_saved_guarded_and_given_back(opt_level: str) -> None:
    model = Replaced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale="dynamic")
    model.head = model.new_head()
    exact = copy.deepcopy(model.head.state_dict())
    optimizer.add_param_group({"params": list(model.head.parameters())})
    assert model.head[1].weight.dtype in (torch.float16, torch.bfloat16)
    assert model.head[0].weight.dtype is torch.float32
    assert optimizer.param_groups[1]["params"][2].dtype is torch.float32
    assert_identical(dict(model.head.state_dict()), dict(exact))
    loss = F.mse_loss(model(torch.full((8, 6), math.inf)), torch.zeros(8, 3))
    with pytest.warns(amp.AmpWarning, match="the loss itself"):
        backward(loss, optimizer)
    optimizer.step()
    assert_identical(dict(model.head.state_dict()), dict(exact))
    amp.uninitialize()
    assert_identical(dict(model.head.state_dict()), dict(exact))
    assert optimizer.param_groups[1]["params"][2] is model.head[1].weight
