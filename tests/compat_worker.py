"""What each rank does for test_compat_parallel.py.

It runs the script that its arguments name, and then compares with the whole batch in one process.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import amp_patch
from amp_patch.compat.parallel import DistributedDataParallel, Reducer, flat_dist_call
from amp_patch.compat.sync_batchnorm import SyncBatchNorm, create_syncbn_process_group

RANK_BATCH = 3


def main(results: Path) -> None:
    failures: list[str] = []
    checks = [check for name, check in globals().items() if name.startswith("check_")]
    for check in checks:
        torch.manual_seed(7)
        try:
            check()
        except Exception as error:  # noqa: BLE001 (the test shows all of them)
            failures.append(f"rank {dist.get_rank()}: {check.__name__}: {error}")
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, failures)
    if dist.get_rank() == 0:
        found = {check.__name__: "ran" for check in checks}
        flat = [failure for one in everywhere for failure in one]
        (results / "results.json").write_text(json.dumps({**found, "failures": flat}))
    dist.destroy_process_group()


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch, and the part of this rank."""
    whole = torch.randn(RANK_BATCH * dist.get_world_size(), *shape, dtype=torch.float64)
    return whole, whole.chunk(dist.get_world_size())[dist.get_rank()]


def compare_gradients(make: Callable[[torch.nn.Module], torch.nn.Module], factor: float) -> None:
    model = torch.nn.Linear(2, 1).double()
    whole, part = batch(2)
    alone = copy.deepcopy(model)
    alone(whole).square().mean().backward()
    wrapped = make(model)
    wrapped(part).square().mean().backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, factor * other.grad, rtol=1e-6, atol=1e-9)


def check_gradients_are_averaged() -> None:
    compare_gradients(DistributedDataParallel, 1.0)
    compare_gradients(
        lambda model: DistributedDataParallel(
            model, message_size=1000, gradient_predivide_factor=2.0, delay_allreduce=True
        ),
        1.0,
    )


def check_gradients_are_summed_on_request() -> None:
    compare_gradients(
        lambda model: DistributedDataParallel(model, gradient_average=False),
        float(dist.get_world_size()),
    )


def check_allreduce_can_be_disabled() -> None:
    model = torch.nn.Linear(2, 1).double()
    whole, part = batch(2)
    alone = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    wrapped.disable_allreduce()
    wrapped(part).sum().backward()
    alone(part).sum().backward()
    torch.testing.assert_close(model.weight.grad, alone.weight.grad)
    wrapped.enable_allreduce()
    wrapped(part).sum().backward()
    alone.zero_grad()
    (2 * alone(whole)).sum().backward()
    torch.testing.assert_close(model.weight.grad, alone.weight.grad / dist.get_world_size())


def check_batchnorm_takes_statistics_over_all_ranks() -> None:
    whole, part = batch(2, 2)
    whole.requires_grad_()
    part = part.detach().requires_grad_()
    plain, ours = torch.nn.BatchNorm1d(2).double(), SyncBatchNorm(2).double()
    weights = torch.randn(len(whole), 2, 2, dtype=torch.float64)
    own = weights.chunk(dist.get_world_size())[dist.get_rank()]
    (plain(whole) * weights).sum().backward()
    result = ours(part)
    (result * own).sum().backward()
    expected = whole.grad.chunk(dist.get_world_size())[dist.get_rank()]
    torch.testing.assert_close(part.grad, expected)
    torch.testing.assert_close(ours.running_mean, plain.running_mean)
    torch.testing.assert_close(ours.running_var, plain.running_var)
    total = ours.weight.grad.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, plain.weight.grad)


def check_reducer_averages_and_broadcasts() -> None:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(float(dist.get_rank()))
    reducer = Reducer(model)
    assert model.weight.tolist() == [[0.0, 0.0]]
    model.weight.grad = torch.full((1, 2), float(dist.get_rank()))
    reducer.reduce()
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
    tensors = [torch.ones(2) * dist.get_rank(), torch.ones(1).double() * dist.get_rank()]
    flat_dist_call(tensors, dist.broadcast, (1,))
    assert [one.sum().item() for one in tensors] == [2.0, 1.0]


def check_groups_of_neighbours() -> None:
    assert create_syncbn_process_group(0) is None
    group = create_syncbn_process_group(1)
    assert dist.get_world_size(group) == 1


if __name__ == "__main__":
    results, sys.argv = Path(sys.argv[1]), sys.argv[2:]
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    runpy.run_path(sys.argv[0], run_name="__main__")  # which makes the group
    dist.destroy_process_group = destroy
    amp_patch.uninitialize()
    main(results)
