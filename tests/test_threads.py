"""Casts in several threads: each has its own suspensions and scopes, all have one cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from networks import assert_identical
from torch import nn

import amp_patch as amp

FP32, HALF = torch.float32, torch.bfloat16


def all_of(*functions: Callable[[], Any]) -> list[Any]:
    """Run them at the same time, begun together; raises what one of them raises."""
    barrier = threading.Barrier(len(functions))

    def begin(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [one.result() for one in [pool.submit(begin, function) for function in functions]]


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_disable_casts_in_one_thread_leaves_the_other_alone() -> None:
    model, x = amp.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0), torch.ones(2, 4)

    def casting() -> set[torch.dtype]:
        return {model(x).dtype for _ in range(200)}

    def suspended() -> set[torch.dtype]:
        found = set()
        for _ in range(200):
            with amp.disable_casts():
                found.add(product())
                found.add(model(x).dtype)
        return found

    assert all_of(casting, suspended, casting) == [{HALF}, {FP32}, {HALF}]


def test_a_suspension_does_not_reach_threads_begun_inside_it() -> None:
    model = amp.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0)
    with amp.disable_casts():
        assert all_of(product) == [HALF]
        assert product() is FP32
    del model


def test_autocast_in_one_thread_leaves_the_other_alone() -> None:
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)

    def under_autocast() -> set[torch.dtype]:
        found = set()
        for _ in range(100):
            with torch.autocast("cpu", HALF):
                found.add(product())
        return found

    assert all_of(under_autocast, lambda: {product() for _ in range(100)}) == [
        {HALF},
        {torch.float16},
    ]
    del model


def test_models_of_two_levels_run_side_by_side() -> None:
    models = {level: nn.Linear(4, 4) for level in ("O1", "O4", "O0", "O5")}
    for level, model in models.items():
        amp.initialize(model, opt_level=level, verbosity=0)

    def run(model: nn.Module) -> Callable[[], Any]:
        return lambda: {model(torch.ones(1, 4)).dtype for _ in range(50)}

    found = all_of(*(run(model) for model in models.values()))
    assert found == [{torch.float16}, {HALF}, {FP32}, {FP32}]


def train(steps: int, during: Callable[[nn.Module], None] = lambda _: None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0, loss_scale=128.0)
    during(model)
    x = torch.randn(3, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_is_the_same_beside_a_thread_that_serves_the_same_model() -> None:
    alone = train(60)
    amp.uninitialize()
    stop, failures, served = threading.Event(), [], []

    def serve(model: nn.Module) -> None:
        try:
            with torch.no_grad():
                while not stop.is_set():
                    served.append(model(torch.ones(1, 4)).dtype)
        except BaseException as error:  # noqa: BLE001 (reported below, in the thread of the test)
            failures.append(error)

    threads: list[threading.Thread] = []

    def start_serving(model: nn.Module) -> None:
        threads.append(threading.Thread(target=serve, args=(model,)))
        threads[0].start()

    try:
        beside = train(60, start_serving)
    finally:
        stop.set()
        threads[0].join()
    assert failures == []
    assert set(served) == {HALF}
    assert_identical(beside, alone)


def test_two_models_train_in_two_threads_as_in_one() -> None:
    def train_one(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        model, optimizer = pairs[seed]
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4, generator=generator)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    results = []
    starts = (lambda: train_one(0), lambda: train_one(1))
    for run in (lambda: [start() for start in starts], lambda: all_of(*starts)):
        pairs = []
        for seed in range(2):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            amp.initialize(model, optimizer, opt_level="O4", verbosity=0, loss_scale=128.0)
            pairs.append((model, optimizer))
        results.append(run())
        amp.uninitialize()
    assert_identical(results[1], results[0])


def test_threads_share_a_cast_and_each_gets_gradients() -> None:
    model = amp.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0)

    def gradient() -> torch.Tensor:
        output = model(torch.ones(2, 4)).float().sum()
        return torch.autograd.grad(output, model.weight)[0]

    for found in all_of(*[gradient] * 4):
        assert_identical(found, torch.full((4, 4), 2.0))


class Replica(nn.Module):
    """What a replica of DataParallel is: a shallow copy whose weights are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_replicas_in_threads_cast_and_send_their_gradients_back() -> None:
    model = amp.initialize(Replica(), opt_level="O4", verbosity=0)
    replicas = [model._replicate_for_data_parallel() for _ in range(3)]
    for replica in replicas:
        linear = model.linear._replicate_for_data_parallel()
        linear.weight, linear.bias = model.linear.weight * 1, model.linear.bias * 1
        replica.linear = linear
        replica._modules = {"linear": linear}

    def run(replica: nn.Module) -> Callable[[], torch.Tensor]:
        return lambda: replica(torch.ones(1, 4))

    outputs = all_of(*(run(replica) for replica in replicas))
    assert {output.dtype for output in outputs} == {HALF}
    sum(output.float().sum() for output in outputs).backward()
    assert_identical(model.linear.weight.grad, torch.full((4, 4), 3.0))


def test_a_task_of_asyncio_has_its_own_suspension() -> None:
    model = amp.initialize(nn.Linear(4, 4), opt_level="O4", verbosity=0)

    async def suspended() -> torch.dtype:
        with amp.disable_casts():
            await asyncio.sleep(0)
            return product()

    async def casting() -> torch.dtype:
        await asyncio.sleep(0)
        return product()

    async def both() -> list[torch.dtype]:
        return list(await asyncio.gather(suspended(), casting(), suspended()))

    assert asyncio.run(both()) == [FP32, HALF, FP32]
    del model
