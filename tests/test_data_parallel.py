"""Models that run as replicas: `torch.nn.DataParallel`, and what stands in for it on a CPU."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import HALF_LEVELS, LEVELS, MASTER_LEVELS, ROUNDING_UNIT, assert_identical, mlp
from torch import nn

import amp_patch as amp

REPLICAS = 3
HALF_DTYPES = {**HALF_LEVELS, **MASTER_LEVELS, "O3": torch.float16}


class Broadcast(torch.autograd.Function):
    """A copy of a weight for each replica, as DataParallel makes them on the devices."""

    @staticmethod
    def forward(_: Any, weight: torch.Tensor, copies: int) -> tuple[torch.Tensor, ...]:
        return tuple(weight.clone() for _ in range(copies))

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.stack(gradients).sum(0), None


def replicate(model: nn.Module, copies: int) -> list[nn.Module]:
    """What `torch.nn.parallel.replicate` does, with all replicas on one device.

    As there, the weights of a replica are plain attributes and no leaves.
    """
    modules = list(model.modules())
    twins = [[one._replicate_for_data_parallel() for one in modules] for _ in range(copies)]
    for number, module in enumerate(modules):
        for name, child in module.named_children():
            for own in twins:
                own[number]._modules[name] = own[modules.index(child)]
        for name, weight in module.named_parameters(recurse=False):
            for own, twin in zip(twins, Broadcast.apply(weight, copies), strict=True):
                setattr(own[number], name, twin)
    return [own[0] for own in twins]


def run_in_threads(models: Sequence[nn.Module], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run each model on its inputs at the same time. The results, one below the other."""
    results: list[Any] = [None] * len(models)
    start = threading.Barrier(len(models))

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = models[i](inputs[i])
        except Exception as error:  # noqa: BLE001 (raised below, on the thread of the test)
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return torch.cat(results)


class Replicated(nn.DataParallel):
    """DataParallel with all replicas on the device of the module."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)  # not torch's own, which looks for devices
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return run_in_threads(replicate(self.module, REPLICAS), inputs.chunk(REPLICAS))


def new_pair(level: str) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**8)


@pytest.mark.parametrize("level", LEVELS)
def test_replica_runs_with_its_own_weights(level: str) -> None:
    model, _ = amp.initialize(
        linear := nn.Linear(4, 2), torch.optim.SGD(linear.parameters(), lr=0.1), opt_level=level
    )
    inputs = torch.ones(3, 4)
    before = model(inputs)
    replica = replicate(model, 1)[0]
    replica.weight, replica.bias = (torch.full_like(p, 5.0) for p in (model.weight, model.bias))
    assert_identical(replica(inputs).float(), torch.full((3, 2), 25.0))  # exact in every dtype
    assert_identical(model(inputs), before)


@pytest.mark.parametrize("level", LEVELS)
def test_shallow_copy_runs_with_its_own_weights(level: str) -> None:
    model, _ = amp.initialize(
        linear := nn.Linear(4, 2), torch.optim.SGD(linear.parameters(), lr=0.1), opt_level=level
    )
    replica = copy.copy(model)
    replica._parameters = {  # noqa: SLF001 (torch's own replicas are made so)
        name: torch.full_like(p, 5.0) for name, p in model.named_parameters()
    }
    assert_identical(replica(torch.ones(3, 4)).float(), torch.full((3, 2), 25.0))


@pytest.mark.parametrize("level", HALF_DTYPES)
def test_replicas_in_threads_run_in_half(level: str) -> None:
    model, _ = new_pair(level)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    Replicated(model)(torch.randn(6, 6))
    assert seen == [HALF_DTYPES[level]] * REPLICAS


@pytest.mark.parametrize("level", LEVELS)
def test_training_with_replicas_equals_training_without(level: str) -> None:
    # A row of the batch goes through the same operations. The gradients of the replicas are summed
    # in half where weights are half, those of the whole batch inside one product: a few roundings.
    unit = ROUNDING_UNIT[HALF_DTYPES.get(level, torch.float32)]
    batches = [(torch.randn(6, 6), torch.randn(6, 3)) for _ in range(10)]
    ends = []
    for wrap in (Replicated, lambda model: model):
        torch.manual_seed(0)
        model, optimizer = new_pair(level)
        wrapped = wrap(model)
        for inputs, targets in batches:
            loss = F.mse_loss(wrapped(inputs).float(), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach().clone() for p in amp.master_params(optimizer)])
        amp.uninitialize()
    torch.testing.assert_close(*ends, rtol=8 * unit, atol=8 * unit)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_replicas_follow_what_was_written_into_masters(level: str) -> None:
    model, optimizer = new_pair(level)
    wrapped, inputs = Replicated(model), torch.randn(6, 6)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.zero_()
    assert_identical(wrapped(inputs).float(), torch.zeros(6, 3))


@pytest.mark.parametrize("level", LEVELS)
def test_overflow_with_replicas_leaves_no_trace(level: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss = Replicated(model)(torch.randn(6, 6)).float().sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        model[0].weight.grad[0, 0] = float("inf")
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_identical(dict(model.state_dict()), before)


@pytest.mark.parametrize("level", LEVELS)
def test_disabled_casts_of_one_thread_leave_the_others_alone(level: str) -> None:
    model, _ = new_pair(level)
    inputs = torch.randn(2, 6)
    expected = model(inputs)
    with amp.disable_casts():
        found = run_in_threads([model, model], [inputs, inputs])
    assert_identical(found, torch.cat([expected, expected]))


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize(
    ("wrap", "right_order"),
    [
        (nn.DataParallel, "DataParallel; wrap what initialize returns"),
        (torch.compile, "OptimizedModule; call torch.compile on what initialize returns"),
    ],
    ids=["data-parallel", "compiled"],
)
def test_wrapped_model_is_refused_with_the_right_order(
    level: str, wrap: Any, right_order: str
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(amp.AmpError) as caught:
        amp.initialize(wrap(model), optimizer, opt_level=level)
    assert (
        str(caught.value) == f"models: expected the plain model, found it wrapped in {right_order}"
    )
    assert_identical(dict(model.state_dict()), before)


@pytest.mark.parametrize("level", LEVELS)
def test_model_with_a_replicated_part_trains(level: str) -> None:
    model = nn.Sequential(Replicated(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**8)
    inputs, targets = torch.randn(6, 6), torch.randn(6, 3)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(model(inputs).float(), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("level", LEVELS)
def test_data_parallel_without_devices_trains(level: str) -> None:
    model, optimizer = new_pair(level)
    wrapped = nn.DataParallel(model)  # on a machine without a GPU it passes the call on
    if wrapped.device_ids:
        pytest.skip("it would move the model to a GPU")
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    loss = wrapped(torch.randn(6, 6)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    after = list(amp.master_params(optimizer))
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert wrapped.state_dict().keys() == {f"module.{name}" for name in model.state_dict()}
    assert all(value.dtype is torch.float32 for value in wrapped.state_dict().values()) or (
        level == "O3"
    )


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_synchronised_batch_norm_stays_fp32(level: str) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert isinstance(model[1], nn.SyncBatchNorm)
    for tensor in (model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var):
        assert tensor.dtype is torch.float32
    assert model[0].weight.dtype is model[2].weight.dtype is MASTER_LEVELS[level]
    with amp.scale_loss(model(torch.randn(4, 6)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert model[1].running_mean.dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_batch_norm_that_is_converted_after_initialize_stays_fp32(level: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert model[1].weight.dtype is model[1].running_mean.dtype is torch.float32
    assert any(model[1].weight is p for group in optimizer.param_groups for p in group["params"])
    model.eval()  # among several ranks it trains on GPUs only
    assert model(torch.randn(4, 6)).isfinite().all()


def test_replicas_that_live_on_and_take_turns_gather_nothing() -> None:
    model, x = mlp(), torch.randn(4, 6)
    watchers = []
    for level in ("O1", "O4", "O2") * 2:
        amp.initialize(model, opt_level=level, verbosity=0)
        copies = [copy.copy(model) for _ in range(2)]
        for one in copies:
            one(x)
        before = [weakref.getweakrefcount(one) for one in copies]
        for one in copies * 20:
            one(x)
        assert [weakref.getweakrefcount(one) for one in copies] == before
        amp.uninitialize()
        del one, copies
        gc.collect()
        watchers.append(weakref.getweakrefcount(model))
    assert watchers[3:] == watchers[:3]
