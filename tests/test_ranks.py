"""What ranks tell each other, seen from one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amp_patch as amp
from amp_patch.scaling.ranks import agreed, broadcast_, rank

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group with this process only; it needs no port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def other_rank(alone: None, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """A second rank that answers each reduction with the next of these numbers."""
    answers: list[list[float]] = []

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op is dist.ReduceOp.MAX
        answer = torch.tensor(answers.pop(0))
        assert answer.shape == tensor.shape
        tensor.copy_(torch.maximum(tensor, answer))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    return answers


def verdicts(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


def values(groups: list[list[torch.Tensor]]) -> list[list[float]]:
    return [[verdict.item() for verdict in group] for group in groups]


def test_process_without_others_is_the_first_rank() -> None:
    assert rank() == 0


def test_process_without_others_agrees_with_itself() -> None:
    assert values(agreed([verdicts(0.0, 1.0), []])) == [[0.0, 1.0], []]


def test_group_of_one_rank_talks_to_nobody(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_: pytest.fail("a collective call"))
    assert values(agreed([verdicts(1.0)])) == [[1.0]]


def test_overflow_of_the_other_rank_counts(other_rank: list[list[float]]) -> None:
    other_rank.append([1.0, 0.0])
    assert values(agreed([verdicts(0.0), verdicts(0.0)])) == [[1.0], [0.0]]


def test_overflow_of_this_rank_counts(other_rank: list[list[float]]) -> None:
    other_rank.append([0.0])
    assert values(agreed([verdicts(1.0)])) == [[1.0]]


def test_verdicts_of_several_devices_are_one(other_rank: list[list[float]]) -> None:
    other_rank.append([0.0])
    assert values(agreed([verdicts(0.0, 1.0)])) == [[1.0]]


def test_group_without_gradients_here_takes_the_verdict_of_the_other_rank(
    other_rank: list[list[float]],
) -> None:
    other_rank.append([0.0, 1.0])
    assert values(agreed([[], []])) == [[0.0], [1.0]]


def test_group_without_gradients_anywhere_has_a_negative_verdict(
    other_rank: list[list[float]],
) -> None:
    other_rank.append([-1.0])
    assert values(agreed([[]])) == [[-1.0]]


def test_no_groups_need_no_talk(other_rank: list[list[float]]) -> None:
    assert agreed([]) == []


def test_verdicts_that_were_given_are_left_alone(other_rank: list[list[float]]) -> None:
    other_rank.append([1.0])
    own = torch.tensor(0.0)
    agreed([[own]])
    assert own.item() == 0.0


def test_broadcast_of_the_first_rank_to_itself_changes_nothing(alone: None) -> None:
    weight = nn.Parameter(torch.ones(2))
    broadcast_([weight], dist.group.WORLD)
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("sync_overflow", [True, False])
def test_scale_loss_asks_the_other_rank_unless_told_not_to(
    other_rank: list[list[float]], sync_overflow: bool
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, sync_overflow=sync_overflow)
    other_rank.append([1.0])
    with amp.scale_loss(model(torch.randn(4, 6)).float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is sync_overflow
    assert other_rank == ([] if sync_overflow else [[1.0]])


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_scale_of_one_asks_nobody(other_rank: list[list[float]], level: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.randn(4, 6)).float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


def accumulated(wrapper: Any, optimizer: Any, blocks: list[bool]) -> list[torch.Tensor]:
    """The gradients after as many blocks, those that are False inside no_sync."""
    torch.manual_seed(3)
    for is_synced in blocks:
        with contextlib.nullcontext() if is_synced else wrapper.no_sync():
            loss = wrapper(torch.randn(4, 6)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
    return [p.grad.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("has_views", [False, True], ids=["gradients", "bucket-views"])
def test_wrapper_of_one_rank_accumulates_as_none_does(
    alone: None, level: str, has_views: bool
) -> None:
    results = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**8)
        if is_wrapped:
            wrapper = DistributedDataParallel(model, gradient_as_bucket_view=has_views)
            results.append(accumulated(wrapper, optimizer, [False, False, True]))
        else:
            results.append(accumulated(model, optimizer, [True, True, True]))
        amp.uninitialize()
    # At O2 the sum of the earlier blocks is rounded once, to go through DDP in half.
    torch.testing.assert_close(*results, rtol=2.0**-9, atol=1e-5)


def test_exception_in_the_averaging_block_gives_the_earlier_gradients_back(alone: None) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True)
    before = accumulated(wrapper, optimizer, [True, False])
    with pytest.raises(RuntimeError, match="interrupted"):
        loss = wrapper(torch.randn(4, 6)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            raise RuntimeError("interrupted")
    after = [p.grad for p in amp.master_params(optimizer)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_skipped_window_forgets_what_was_local(alone: None) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, overflow_drops="micro_batch")
    wrapper = DistributedDataParallel(model)
    accumulated(wrapper, optimizer, [False])
    optimizer.zero_grad()
    # Nothing of this rank alone is left: the second block can be dropped by itself.
    kept = accumulated(wrapper, optimizer, [True])
    loss = wrapper(torch.randn(4, 6)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        model[0].weight.grad[0, 0] = float("inf")
    after = [p.grad for p in amp.master_params(optimizer)]
    twice = [2 * gradient for gradient in kept]  # the first one stands for both
    torch.testing.assert_close(after, twice, rtol=0, atol=0)


def test_uninitialize_takes_note_of_wrappers_no_longer(alone: None) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp.uninitialize()
    assert not nn.modules.module._global_module_registration_hooks  # noqa: SLF001 (has no other name)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_distributed_wrapper_is_refused_with_the_right_order(alone: None, level: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(amp.AmpError) as caught:
        amp.initialize(DistributedDataParallel(model), optimizer, opt_level=level)
    assert str(caught.value) == (
        "models: expected the plain model, found it wrapped in DistributedDataParallel; wrap what "
        "initialize returns"
    )


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_distributed_part_is_refused_where_it_would_be_cast(alone: None, level: str) -> None:
    model = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(amp.AmpError, match="wrapped in DistributedDataParallel"):
        amp.initialize(model, optimizer, opt_level=level)


def test_distributed_part_made_before_initialize_averages_earlier_gradients(alone: None) -> None:
    part = DistributedDataParallel(nn.Linear(6, 3), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    amp.initialize(nn.Sequential(part), optimizer, opt_level="O1", verbosity=0)
    twin = nn.Linear(6, 3)
    twin.load_state_dict(part.module.state_dict())
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    amp.initialize(twin, twin_optimizer, opt_level="O1", verbosity=0)
    found = accumulated(part, optimizer, [True, True])
    expected = accumulated(twin, twin_optimizer, [True, True])
    torch.testing.assert_close(found, expected, rtol=2.0**-9, atol=1e-5)
