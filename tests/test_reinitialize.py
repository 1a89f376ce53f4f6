"""A second call of initialize: new objects, the same objects at another level, the same level."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from networks import (
    LEVELS,
    MASTER_LEVELS,
    OPTIMIZERS,
    assert_identical,
    assert_same_objects,
    attributes_of,
    mlp,
    normalised_mlp,
    snapshot,
    state_of,
    train_step,
)
from process_state import ProcessState
from torch import nn

import amp_patch as amp


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def new_pair() -> tuple[nn.Module, Any]:
    model = normalised_mlp()
    return model, OPTIMIZERS["adam"](model.parameters())


def scale_for(opt_level: str) -> dict[str, Any]:
    """No overflow in the first steps."""
    return {"loss_scale": 128.0} if opt_level in ("O1", "O2") else {}


@pytest.mark.parametrize("levels", [*permutations(LEVELS, 2), *zip(LEVELS, LEVELS, strict=True)])
def test_new_objects_are_added_and_both_train_as_they_do_alone(levels: tuple[str, str]) -> None:
    pairs = [new_pair(), new_pair()]
    batches = [batch() for _ in range(3)]
    expected = []
    for level, pair in zip(levels, copy.deepcopy(pairs), strict=True):
        model, optimizer = pair
        amp.initialize(model, optimizer, opt_level=level, **scale_for(level))
        losses = [train_step(model, optimizer, one) for one in batches]
        expected.append((losses, snapshot(model, optimizer)))
        amp.uninitialize()
    for level, (model, optimizer) in zip(levels, pairs, strict=True):
        amp.initialize(model, optimizer, opt_level=level, **scale_for(level))
    losses = [[train_step(*pair, one) for pair in pairs] for one in batches]
    for i, pair in enumerate(pairs):
        assert_identical(([row[i] for row in losses], snapshot(*pair)), expected[i])


def test_each_call_has_scalers_of_its_own_and_the_newest_comes_first() -> None:
    first, second = new_pair(), new_pair()
    amp.initialize(*first, opt_level="O1")
    amp.initialize(*second, opt_level="O2", loss_scale=128.0)
    assert [one["loss_scale"] for one in amp.state_dict().values()] == [128.0, 2.0**16]
    assert amp.loss_scale() == 128.0
    train_step(*first, batch(), float("inf"))
    assert amp.step_was_skipped(first[1])
    assert not amp.step_was_skipped(second[1])
    assert [one["loss_scale"] for one in amp.state_dict().values()] == [128.0, 2.0**15]


@pytest.mark.filterwarnings("ignore:.*gave its weights no master:amp_patch.AmpWarning")
@pytest.mark.parametrize(("before", "after"), list(permutations(LEVELS, 2)))
def test_another_level_on_the_same_objects_undoes_the_first_one(before: str, after: str) -> None:
    model, optimizer = new_pair()
    amp.initialize(model, optimizer, opt_level=before, **scale_for(before))
    for _ in range(3):
        train_step(model, optimizer, batch())
    # What the FP32 script would hold now, brought under the new level from the start.
    twin, twin_optimizer = new_pair()
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    amp.initialize(model, optimizer, opt_level=after, **scale_for(after))
    batches = [batch() for _ in range(3)]
    losses = [train_step(model, optimizer, one) for one in batches]
    found = snapshot(model, optimizer)
    kinds = process_kinds()
    amp.uninitialize()
    amp.initialize(twin, twin_optimizer, opt_level=after, **scale_for(after))
    assert losses == [train_step(twin, twin_optimizer, one) for one in batches]
    assert_identical(found, snapshot(twin, twin_optimizer))
    assert kinds == process_kinds()


def process_kinds() -> tuple[bool, torch.dtype]:
    """Whether operations are patched, and what a product comes in."""
    return hasattr(torch.mm, "__wrapped__"), torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype


@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_same_level_on_the_same_objects_changes_nothing(opt_level: str) -> None:
    model, optimizer = new_pair()
    amp.initialize(model, optimizer, opt_level=opt_level)
    train_step(model, optimizer, batch())
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}})
    process, attributes = ProcessState.capture(), attributes_of(model)
    instance, scales = dict(vars(optimizer)), amp.state_dict()
    masters, trained = list(amp.master_params(optimizer)), snapshot(model, optimizer)
    amp.initialize(model, optimizer, opt_level=opt_level)
    assert process.differences(ProcessState.capture()) == []
    assert_same_objects(attributes_of(model), attributes)
    assert vars(optimizer).keys() == instance.keys()
    assert optimizer.step is instance.get("step", optimizer.step) or (
        optimizer.step == instance["step"]
    )
    assert amp.state_dict() == scales
    assert all(a is b for a, b in zip(amp.master_params(optimizer), masters, strict=True))
    assert_identical(snapshot(model, optimizer), trained)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_notebook_that_runs_its_cell_five_times_trains_the_same_each_time(
    opt_level: str,
) -> None:
    plain = torch.nn.functional.linear
    batches = [batch() for _ in range(4)]
    rounds = []
    for _ in range(5):
        torch.manual_seed(5)
        model, optimizer = new_pair()
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
        losses = [train_step(model, optimizer, one) for one in batches]
        rounds.append((losses, amp.loss_scale(), snapshot(model, optimizer)))
        # One wrapper around the original, not a pile of them.
        patched = torch.nn.functional.linear
        assert (patched if patched is plain else patched.__wrapped__) is plain
    for one in rounds[1:]:
        assert_identical(one, rounds[0])


@pytest.mark.parametrize("opt_level", LEVELS)
def test_five_calls_for_the_same_objects_train_as_one_call_does(opt_level: str) -> None:
    batches = [batch() for _ in range(3)]
    results = []
    for calls in (1, 5):
        torch.manual_seed(5)
        model, optimizer = new_pair()
        for _ in range(calls):
            amp.initialize(model, optimizer, opt_level=opt_level)
        losses = [train_step(model, optimizer, one) for one in batches]
        results.append((losses, snapshot(model, optimizer)))
        amp.uninitialize()
    assert_identical(results[1], results[0])


def test_a_new_optimizer_for_the_same_model_takes_over_its_masters() -> None:
    model, optimizer = new_pair()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    train_step(model, optimizer, batch())
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    amp.uninitialize()
    fresh = OPTIMIZERS["sgd"](model.parameters())
    amp.initialize(model, fresh, opt_level="O2", loss_scale=128.0)
    masters = [master.detach() for master in amp.master_params(fresh)]
    assert_identical(masters, [saved[name] for name, _ in model.named_parameters()])
    train_step(model, fresh, batch())
    assert all(state_of(fresh))


@pytest.mark.parametrize("opt_level", MASTER_LEVELS)
def test_a_new_optimizer_on_a_model_under_the_same_level_starts_from_exact_masters(
    opt_level: str,
) -> None:
    model, optimizer = new_pair()
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0)
    train_step(model, optimizer, batch())
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    fresh = OPTIMIZERS["sgd"](model.parameters())  # as a notebook cell that is run again does it
    amp.initialize(model, fresh, opt_level=opt_level, loss_scale=128.0)
    masters = [master.detach() for master in amp.master_params(fresh)]
    assert_identical(masters, [saved[name] for name, _ in model.named_parameters()])
    one = batch()
    losses = [train_step(model, fresh, one) for _ in range(6)]
    assert losses[-1] < losses[0]


class Sharing(nn.Module):
    """A head on a body that others may use as well."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("opt_level", [*MASTER_LEVELS, "O3"])
@pytest.mark.parametrize("calls", [1, 2])
def test_models_that_share_a_part_have_exact_masters_and_come_back_in_fp32(
    opt_level: str, calls: int
) -> None:
    body = mlp()
    models = [body, Sharing(body)]
    original = {name: t.clone() for name, t in models[1].state_dict().items()}
    optimizer = OPTIMIZERS["sgd"](models[1].parameters())
    if calls == 1:
        amp.initialize(models, optimizer, opt_level=opt_level, **scale_for(opt_level))
    else:
        amp.initialize(models[0], opt_level=opt_level, **scale_for(opt_level))
        amp.initialize(models[1], optimizer, opt_level=opt_level, **scale_for(opt_level))
    if opt_level in MASTER_LEVELS and calls == 1:
        masters = [master.detach() for master in amp.master_params(optimizer)]
        assert_identical(masters, list(original.values()))
        assert_identical(dict(models[1].state_dict()), original)
    one = batch()
    losses = [train_step(models[1], optimizer, one) for _ in range(6)]
    assert losses[-1] < losses[0]
    saved = {name: t.clone() for name, t in models[1].state_dict().items()}
    assert {t.dtype for t in saved.values()} == {torch.float32}
    amp.uninitialize()
    assert_identical(dict(models[1].state_dict()), saved)
    assert {p.dtype for p in models[1].parameters()} == {torch.float32}


def test_enabled_false_after_a_session_leaves_the_first_objects_in_force() -> None:
    first, second = new_pair(), new_pair()
    amp.initialize(*first, opt_level="O2")
    amp.initialize(*second, enabled=False)
    train_step(*first, batch())
    train_step(*second, batch())
    assert {p.dtype for p in second[0].parameters()} == {torch.float32}


def test_models_without_optimizers_can_be_added() -> None:
    amp.initialize(*new_pair(), opt_level="O1")
    model = mlp()
    assert amp.initialize(model, opt_level="O2") is model
    assert model(batch()[0]).dtype is torch.float32
    assert model[0].weight.dtype is torch.float16


@pytest.mark.filterwarnings("ignore:.*gave its weights no master")  # those of the second half
@pytest.mark.parametrize("is_trained_between", [False, True])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_optimizer_of_other_parameters_of_a_model_is_added(
    opt_level: str, is_trained_between: bool
) -> None:
    options = {} if opt_level in ("O0", "O3", "O4", "O5") else {"loss_scale": 128.0}
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    first, second = (torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9) for half in model)
    amp.initialize(model, first, opt_level=opt_level, **options)
    inputs = torch.randn(2, 4)
    if is_trained_between:
        with amp.scale_loss(model(inputs).float().sum(), first) as scaled_loss:
            scaled_loss.backward()
        first.step()
    model.zero_grad()
    momenta = copy.deepcopy([state["momentum_buffer"] for state in first.state.values()])
    amp.initialize(model, second, opt_level=opt_level, **options)
    assert_identical([state["momentum_buffer"] for state in first.state.values()], momenta)
    before = copy.deepcopy(model.state_dict())
    with amp.scale_loss(model(inputs).float().sum(), [first, second]) as scaled_loss:
        scaled_loss.backward()
    for optimizer in (first, second):
        optimizer.step()
        assert {p.dtype for p in amp.master_params(optimizer)} == {
            torch.float16 if opt_level == "O3" else torch.float32
        }
    after = model.state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before)
