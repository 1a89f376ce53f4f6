"""Whatever a loop does between two forwards, casts from the cache give what fresh casts give."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import assert_identical
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import amp_patch as amp
from amp_patch.casts.cache import CastCache
from amp_patch.slot import slot

LEVELS = ["O1", "O4"]


def cast_afresh(cache: CastCache, weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """In place of `CastCache.cast`: casts every weight at every use."""
    return weight.to(dtype)


class Run:
    """A model, optimizers of three kinds, and all that came out of them so far."""

    def __init__(self, opt_level: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.x = torch.randn(2, 3)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.25)
        self.foreach = torch.optim.Adam(self.model.parameters(), lr=0.25, eps=1e-3, foreach=True)
        self.fused = torch.optim.Adam(self.model.parameters(), lr=0.25, eps=1e-3, fused=True)
        amp.initialize(self.model, self.sgd, opt_level=opt_level, verbosity=0, loss_scale=1.0)
        self.pending: list[torch.Tensor] = []
        self.seen: list[Any] = []

    @property
    def weight(self) -> nn.Parameter:
        layer = self.model[0]
        return layer.weight_orig if prune.is_pruned(layer) else layer.weight

    def look(self, output: torch.Tensor) -> None:
        self.seen.append(output.detach().clone())
        self.seen.append(output.requires_grad)

    def end(self) -> list[Any]:
        for parameter in self.model.parameters():
            self.seen.append(parameter.detach().clone())
            self.seen.append(None if parameter.grad is None else parameter.grad.clone())
        return self.seen


def forward(run: Run) -> None:
    output = run.model(run.x)
    run.look(output)
    if output.requires_grad:
        run.pending.append(output)


def forward_without_gradients(run: Run) -> None:
    with torch.no_grad():
        run.look(run.model(run.x))


def forward_in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.seen.append(run.model(run.x).clone())


def forward_without_casts(run: Run) -> None:
    with amp.disable_casts():
        run.look(run.model(run.x))


def part_alone(run: Run) -> None:
    run.look(run.model[0](run.x))


def part_alone_without_gradients(run: Run) -> None:
    with torch.no_grad():
        run.look(run.model[0](run.x))


def plain_backward(run: Run) -> None:
    if run.pending:
        run.pending.pop().float().square().sum().backward()


def scaled_backward(run: Run) -> None:
    if run.pending:
        with amp.scale_loss(run.pending.pop(0).float().square().sum(), run.sgd) as scaled_loss:
            scaled_loss.backward()


def gradients_of_an_input(run: Run) -> None:
    x = run.x.clone().requires_grad_()
    output = run.model(x).float().sum()
    run.seen.append(torch.autograd.grad(output, x)[0])


def load(run: Run) -> None:
    state = run.model.state_dict()
    run.model.load_state_dict({name: torch.randn_like(value) for name, value in state.items()})


def add_in_place(run: Run) -> None:
    with torch.no_grad():
        run.weight.add_(torch.randn_like(run.weight))


def copy_in_place(run: Run) -> None:
    with torch.no_grad():
        run.weight.copy_(torch.randn_like(run.weight))


def add_through_data(run: Run) -> None:
    run.weight.data.add_(torch.randn(run.weight.shape))


def copy_through_data(run: Run) -> None:
    run.weight.data.copy_(torch.randn(run.weight.shape))


def assign_data(run: Run) -> None:
    run.weight.data = torch.randn(run.weight.shape)


def write_at_an_index_of_data(run: Run) -> None:
    run.weight.data[0] = torch.randn(run.weight.shape[1:])


def write_all_from_a_vector(run: Run) -> None:
    vector = torch.nn.utils.parameters_to_vector(run.model.parameters())
    torch.nn.utils.vector_to_parameters(torch.randn_like(vector), run.model.parameters())


def initialise_anew(run: Run) -> None:
    nn.init.normal_(run.weight)


def replace_parameter(run: Run) -> None:
    name = "weight_orig" if prune.is_pruned(run.model[0]) else "weight"
    setattr(run.model[0], name, nn.Parameter(torch.randn(run.weight.shape)))


def toggle_requires_grad(run: Run) -> None:
    run.weight.requires_grad_(not run.weight.requires_grad)


def toggle_requires_grad_of_all(run: Run) -> None:
    run.model.requires_grad_(not run.weight.requires_grad)


def prune_or_end_pruning(run: Run) -> None:
    if prune.is_pruned(run.model[0]):
        prune.remove(run.model[0], "weight")
    else:
        prune.l1_unstructured(run.model[0], "weight", amount=0.5)


def convert_there_and_back(run: Run) -> None:
    run.model.double().float()


def bfloat16_there_and_back(run: Run) -> None:
    run.model.bfloat16().float()


ACTIONS: dict[str, Callable[[Run], Any]] = {
    "step": lambda run: run.sgd.step(),
    "step, foreach": lambda run: run.foreach.step(),
    "step, fused": lambda run: run.fused.step(),
    "zero_grad": lambda run: run.sgd.zero_grad(),
    "model.zero_grad": lambda run: run.model.zero_grad(),
    "clear_cache": lambda _: amp.clear_cache(),
    **{
        action.__name__: action
        for action in (
            forward,
            forward_without_gradients,
            forward_in_inference_mode,
            forward_without_casts,
            part_alone,
            part_alone_without_gradients,
            plain_backward,
            scaled_backward,
            gradients_of_an_input,
            load,
            add_in_place,
            copy_in_place,
            add_through_data,
            copy_through_data,
            assign_data,
            write_at_an_index_of_data,
            write_all_from_a_vector,
            initialise_anew,
            replace_parameter,
            toggle_requires_grad,
            toggle_requires_grad_of_all,
            prune_or_end_pruning,
            convert_there_and_back,
            bfloat16_there_and_back,
        )
    },
}
# Every second action is a forward: without one nothing shows.
LOOKS = ("forward", "forward_without_gradients", "part_alone", "part_alone_without_gradients")
SEQUENCES = st.lists(
    st.tuples(st.sampled_from(LOOKS), st.sampled_from(sorted(ACTIONS))), max_size=12
)


def run_with(cast: Any, opt_level: str, names: list[str]) -> list[Any]:
    """What the actions give with `cast` as the method of the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CastCache, "cast", cast)
        run = Run(opt_level, seed=0)
        for position, name in enumerate(names):
            torch.manual_seed(position)
            ACTIONS[name](run)
        found = run.end()
        amp.uninitialize()
    return found


def assert_same_without_the_cache(opt_level: str, names: list[str]) -> None:
    found = run_with(CastCache.cast, opt_level, names)
    assert_identical(found, run_with(cast_afresh, opt_level, names))


@pytest.mark.parametrize("opt_level", LEVELS)
@settings(max_examples=40)
@given(sequence=SEQUENCES)
def test_a_run_with_the_cache_is_the_run_without_it_bit_for_bit(
    opt_level: str, sequence: list[tuple[str, str]]
) -> None:
    names = [name for pair in sequence for name in pair] + ["forward"]
    assert_same_without_the_cache(opt_level, names)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_between_forwards_is_seen(action: str) -> None:
    names = [
        *("part_alone_without_gradients", "forward", "plain_backward", "part_alone", action),
        *("part_alone_without_gradients", action, "part_alone", "forward", "plain_backward"),
    ]
    assert_same_without_the_cache("O4", names)


def test_the_property_can_fail() -> None:
    kept: dict[int, torch.Tensor] = {}

    def cast_once(cache: CastCache, weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        return kept.setdefault(id(weight), weight.to(dtype))

    names = ["forward", "add_through_data", "forward"]
    stale, true = run_with(cast_once, "O4", names), run_with(cast_afresh, "O4", names)
    assert not torch.equal(stale[2], true[2])


# -- the modes that users can switch --------------------------------------------------------------


class CastCounter(TorchDispatchMode):
    """Counts conversions of dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


def half_input(opt_level: str) -> torch.Tensor:
    return torch.ones(2, 3, dtype=amp.OPT_LEVELS[opt_level].half_dtype)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_inference_that_keeps_casts_casts_each_weight_once_in_all(opt_level: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    with torch.no_grad(), amp.keep_casts():
        counts = []
        for _ in range(4):
            with CastCounter() as counter:
                model(half_input(opt_level))
            counts.append(counter.count)
    assert counts == [4, 0, 0, 0]  # two weights and two biases, and then none
    with torch.no_grad(), CastCounter() as counter:
        model(half_input(opt_level))
    assert counter.count == 4  # empty again after the block


def test_casts_are_kept_until_the_outermost_block_ends_and_by_an_exception_no_longer() -> None:
    model = amp.initialize(nn.Linear(3, 3), opt_level="O4", verbosity=0)
    assert slot.session is not None
    cache = slot.session.context.cache
    with torch.no_grad():
        with amp.keep_casts():
            with amp.keep_casts():
                model(torch.ones(1, 3))
            assert len(cache) == 2
        assert len(cache) == 0
        with pytest.raises(ValueError, match="inside"), amp.keep_casts():
            model(torch.ones(1, 3))
            raise ValueError("inside")
    assert len(cache) == 0


def test_weights_that_are_loaded_inside_keep_casts_are_seen() -> None:
    model = amp.initialize(nn.Linear(3, 3), opt_level="O4", verbosity=0)
    with torch.no_grad(), amp.keep_casts():
        model(torch.ones(1, 3))
        model.load_state_dict({"weight": torch.zeros(3, 3), "bias": torch.zeros(3)})
        assert torch.count_nonzero(model(torch.ones(1, 3))) == 0


def test_modes_do_nothing_without_a_session() -> None:
    with amp.keep_casts(), amp.verify_casts():
        assert F.linear(torch.ones(1, 3), torch.ones(2, 3)).dtype is torch.float32


def test_verification_finds_a_write_that_torch_does_not_count() -> None:
    model = amp.initialize(nn.Linear(3, 3), opt_level="O4", verbosity=0)
    model(torch.ones(1, 3))
    model.weight.detach().numpy().fill(7)
    model(torch.ones(1, 3))  # unseen
    with amp.verify_casts(), pytest.raises(amp.AmpError, match=r"stale.*clear_cache"):
        model(torch.ones(1, 3))
    amp.clear_cache()
    with amp.verify_casts():
        result = model(torch.ones(1, 3))
    assert torch.allclose(result.float(), 21 + model.bias, rtol=1e-2)


def test_verification_passes_where_all_is_well_also_with_nan_weights() -> None:
    model = amp.initialize(nn.Linear(3, 3), opt_level="O4", verbosity=0)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with amp.verify_casts():
        with amp.verify_casts():
            model(torch.ones(1, 3))
        model(torch.ones(1, 3))


# -- leaks ----------------------------------------------------------------------------------------


def live_tensors() -> int:
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("keeps", [False, True], ids=["plain", "keep_casts"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_grows_by_nothing_with_the_garbage_collector_off(
    mode: Callable[[], Any], keeps: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    amp.initialize(model, opt_level="O4", verbosity=0)
    x = torch.ones(2, 3)
    with mode(), amp.keep_casts() if keeps else torch.no_grad():
        model(x)
        gc.collect()
        gc.disable()
        try:
            before = live_tensors()
            collections_before = [one["collections"] for one in gc.get_stats()]
            for _ in range(200):
                model(x)
            assert live_tensors() == before
            assert [one["collections"] for one in gc.get_stats()] == collections_before
        finally:
            gc.enable()
