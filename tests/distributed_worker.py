"""What every rank of the distributed tests runs: `torchrun ... distributed_worker.py RESULTS`.

Each scenario trains in step with the other ranks and returns figures. Rank 0 writes those of all
ranks to the JSON file RESULTS, as `{scenario: {case: [figures of rank 0, of rank 1, ...]}}`. What
the figures must be is in test_distributed.py.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import hashlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amp_patch as amp

# A rank that waits for another one gives up, and so does a worker whose launcher is gone.
COLLECTIVE_SECONDS = 30
WORKER_SECONDS = 80

STEPS = 50
WINDOWS = 6
INPUTS, OUTPUTS, BATCH = 6, 3, 4
LEARNING_RATE = 0.1
START_SCALE = 2.0**8  # small enough that nothing overflows by itself

Figures = dict[str, Any]
Cases = dict[str, Figures]
SCENARIOS: dict[str, Callable[[], Cases]] = {}


def scenario(function: Callable[[], Cases]) -> Callable[[], Cases]:
    SCENARIOS[function.__name__] = function
    return function


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` batches, alike on all ranks; the leading dimension of each is the rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (dist.get_world_size(), BATCH)
    return [
        (
            torch.randn(*shape, INPUTS, generator=generator),
            torch.randn(*shape, OUTPUTS, generator=generator),
        )
        for _ in range(count)
    ]


def initialize(model: nn.Module, level: str, **options: Any) -> Any:
    """An optimizer for `model`, both at `level`, with a dynamic scale that starts low."""
    options.setdefault("loss_scale", "dynamic")
    optimizer = make_optimizer(model)
    amp.initialize(
        model, optimizer, opt_level=level, max_loss_scale=START_SCALE, verbosity=0, **options
    )
    return optimizer


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss on this rank's share of `batch`."""
    inputs, targets = (part[dist.get_rank()] for part in batch)
    return F.mse_loss(model(inputs).float(), targets)


def backward(loss: torch.Tensor, optimizer: Any, poisoned: Any = None, **options: Any) -> None:
    """A block around backward; the gradient of `poisoned` gets an inf afterwards, on this rank."""
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()
        if poisoned is not None:
            poisoned.grad.view(-1)[0] = float("inf")


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal if and only if every bit of `tensors` is."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(local(tensor.detach()).contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([local(tensor.detach()).double().flatten() for tensor in tensors])


def everything(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Weights, masters and the optimizer's state."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    tensors = [*model.parameters(), *amp.master_params(optimizer), *state]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def train(
    model: nn.Module, optimizer: Any, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for batch in batches:
        backward(mean_loss(model, batch), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def figures(
    model: nn.Module, optimizer: Any, skipped: list[int], expected: torch.Tensor
) -> Figures:
    """Where a run has ended.

    `distance` is that from `expected`, the weights of plain FP32 training, relative to how far
    these have moved.
    """
    updated = list(amp.master_params(optimizer))
    moved = expected - flat(make_model().parameters())
    return {
        "digest": digest(everything(model, optimizer)),
        "is_finite": bool(flat(updated).isfinite().all()),
        "distance": ((flat(updated) - expected).norm() / moved.norm()).item(),
        "skipped": skipped,
        "state": amp.state_dict(),
    }


def plain_weights(
    batches: list[tuple[torch.Tensor, torch.Tensor]], windows: list[list[tuple[int, float]]]
) -> torch.Tensor:
    """What one process gets in FP32 by a step for each of `windows` on the batches of all ranks.

    A window lists the numbers of its batches and the weight of each.
    """
    model = make_model()
    optimizer = make_optimizer(model)
    for window in windows:
        for number, weight in window:
            inputs, targets = (part.flatten(0, 1) for part in batches[number])
            (F.mse_loss(model(inputs), targets) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.parameters())


@scenario
def fifty_steps() -> Cases:
    """Ranks begin with other weights; now and then the last one alone overflows."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before_averaging, after_averaging = 7, 23
    batches = make_batches(STEPS)
    taken = [i for i in range(STEPS) if i not in {before_averaging, after_averaging}]
    expected = plain_weights(batches, [[(i, 1.0)] for i in taken])
    cases = {}
    for level in amp.OPT_LEVELS:
        model = make_model(seed=rank)
        optimizer = initialize(model, level)
        wrapper = DistributedDataParallel(model)
        skipped = []
        for i, batch in enumerate(batches):
            factor = float("inf") if (rank, i) == (last, before_averaging) else 1.0
            poisoned = model[0].weight if (rank, i) == (last, after_averaging) else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", amp.AmpWarning)  # of the loss that is inf
                backward(mean_loss(wrapper, batch) * factor, optimizer, poisoned)
            optimizer.step()
            optimizer.zero_grad()
            skipped += [i] if amp.step_was_skipped(optimizer) else []
        cases[level] = figures(model, optimizer, skipped, expected)
        amp.uninitialize()
    return cases


@scenario
def default_scales() -> Cases:
    """Every level as it comes; at O0, O4 and O5 nothing is scaled or checked."""
    batches = make_batches(10)
    expected = plain_weights(batches, [[(i, 1.0)] for i in range(len(batches))])
    cases = {}
    for level in amp.OPT_LEVELS:
        model = make_model(seed=dist.get_rank())
        optimizer = initialize(model, level, loss_scale=None)
        train(DistributedDataParallel(model), optimizer, batches)
        cases[level] = figures(model, optimizer, [], expected)
        amp.uninitialize()
    return cases


def train_windows(
    level: str,
    expected: torch.Tensor,
    *,
    bucket_view: bool = False,
    syncs: tuple[bool, ...] = (False, False, True),
    delays: bool = False,
    poisoned: tuple[int, int] | None = None,
    is_left_for_backward: bool = False,
    **options: Any,
) -> Figures:
    """Accumulate over as many micro-batches as `syncs` has; DDP averages those that are True.

    `poisoned` is the window and the micro-batch in which rank 1 alone overflows.
    """
    model = make_model()
    optimizer = initialize(model, level, **options)
    wrapper = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    batches = iter(make_batches(WINDOWS * len(syncs)))
    skipped = []
    for window in range(WINDOWS):
        for i, is_synced in enumerate(syncs):
            is_hit = dist.get_rank() == 1 and poisoned == (window, i)
            block: dict[str, Any] = {
                "poisoned": model[0].weight if is_hit else None,
                "delay_unscale": delays and i + 1 < len(syncs),
            }
            with contextlib.nullcontext() if is_synced else wrapper.no_sync():
                loss = mean_loss(wrapper, next(batches))
                if not is_left_for_backward:
                    backward(loss, optimizer, **block)
            if is_left_for_backward:
                backward(loss, optimizer, **block)
        optimizer.step()
        optimizer.zero_grad()
        skipped += [window] if amp.step_was_skipped(optimizer) else []
    result = figures(model, optimizer, skipped, expected)
    amp.uninitialize()
    return result


def plain_windows(size: int, dropped: Iterable[tuple[int, int]] = ()) -> torch.Tensor:
    """The oracle of `train_windows` without the micro-batches in `dropped`."""
    windows = []
    for window in range(WINDOWS):
        kept = [i for i in range(size) if (window, i) not in set(dropped)]
        if kept:
            windows.append([(window * size + i, size / len(kept)) for i in kept])
    return plain_weights(make_batches(WINDOWS * size), windows)


@scenario
def accumulation() -> Cases:
    """Windows with and without no_sync, with and without delay_unscale, bucket views or not."""
    expected = plain_windows(3)
    return {
        f"{level}{', view' * view}{', delay' * delays}{', no_sync' * (not syncs[0])}": (
            train_windows(level, expected, bucket_view=view, syncs=syncs, delays=delays)
        )
        for level in amp.OPT_LEVELS
        for view in (False, True)
        for delays in (False, True)
        for syncs in ((True, True, True), (False, False, True))
    }


@scenario
def accumulation_at_scale_one() -> Cases:
    """no_sync where nothing is scaled, with masters (O5) and without."""
    expected = plain_windows(3)
    return {
        f"{level}{', view' * view}": train_windows(
            level, expected, bucket_view=view, loss_scale=None
        )
        for level in ("O0", "O4", "O5")
        for view in (False, True)
    }


@scenario
def odd_accumulation() -> Cases:
    """Blocks that average at odd moments."""
    expected = plain_windows(3)
    return {
        f"{name}, {level}": train_windows(level, expected, **options)
        for level in ("O1", "O2", "O5")
        for name, options in {
            "average twice": {"syncs": (False, True, True)},
            "average first": {"syncs": (True, False, True)},
            "backward outside no_sync": {"is_left_for_backward": True},
        }.items()
    }


@scenario
def overflow_inside_no_sync() -> Cases:
    """Rank 1 alone overflows in a block that DDP does not average."""
    whole = plain_windows(3, dropped=[(2, 0), (2, 1), (2, 2)])
    part = plain_windows(3, dropped=[(2, 0)])
    return {
        f"{drops}, {level}": train_windows(level, expected, poisoned=(2, 0), overflow_drops=drops)
        for level in ("O1", "O2", "O5")
        for drops, expected in (("window", whole), ("micro_batch", part))
    }


@scenario
def overflow_of_the_averaging_block() -> Cases:
    """It has the sum of the window: it can be dropped as a whole only."""
    whole = plain_windows(3, dropped=[(2, 0), (2, 1), (2, 2)])
    return {
        f"{drops}, {level}": train_windows(level, whole, poisoned=(2, 2), overflow_drops=drops)
        for level in ("O1", "O2")
        for drops in ("window", "micro_batch")
    }


@scenario
def delayed_check() -> Cases:
    """The check is left to the step; rank 1 alone overflows."""
    batches = make_batches(4)
    expected = plain_weights(batches, [[(i, 1.0)] for i in (0, 2, 3)])
    cases = {}
    for level in ("O1", "O2"):
        model = make_model()
        optimizer = initialize(model, level)
        wrapper = DistributedDataParallel(model)
        skipped = []
        for i, batch in enumerate(batches):
            poisoned = model[0].weight if (dist.get_rank(), i) == (1, 1) else None
            backward(mean_loss(wrapper, batch), optimizer, poisoned, delay_overflow_check=True)
            optimizer.step()
            optimizer.zero_grad()
            skipped += [i] if amp.step_was_skipped(optimizer) else []
        cases[level] = figures(model, optimizer, skipped, expected)
        amp.uninitialize()
    return cases


@contextlib.contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """Counts the reductions that Python code asks for. DDP's own are not among them."""
    sizes: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield sizes
    finally:
        dist.all_reduce = original


@scenario
def two_optimizers() -> Cases:
    """Rank 0 uses only the first of two models; rank 1 alone overflows in the second, once."""
    cases = {}
    for name, options in {
        "together": {"skip_together": True},
        "apart": {"skip_together": False},
        "not agreed": {"sync_overflow": False, "skip_together": False},
    }.items():
        models = [make_model(), make_model(seed=1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        amp.initialize(
            models,
            optimizers,
            opt_level="O1",
            loss_scale="dynamic",
            max_loss_scale=START_SCALE,
            verbosity=0,
            **options,
        )
        skipped = []
        with counted_reductions() as sizes:
            for i, batch in enumerate(make_batches(2)):
                used = models[: 1 + dist.get_rank()]
                loss = sum(mean_loss(model, batch) for model in used)
                poisoned = models[1][0].weight if (dist.get_rank(), i) == (1, 1) else None
                backward(loss, optimizers, poisoned)
                for optimizer in optimizers:
                    optimizer.step()
                skipped.append([amp.step_was_skipped(optimizer) for optimizer in optimizers])
                for optimizer in optimizers:
                    optimizer.zero_grad()
        cases[name] = {"skipped": skipped, "reductions": sizes, "state": amp.state_dict()}
        amp.uninitialize()
    return cases


@scenario
def no_gradients() -> Cases:
    """A block without any gradient is no clean one, on no rank: the scale must not grow by it."""
    cases = {}
    for name, users in {"on any rank": (), "but on rank 0": (0,)}.items():
        model, unused = make_model(), make_model(seed=1)
        optimizer = initialize(model, "O1")
        loss = mean_loss(unused, make_batches(1)[0])
        if dist.get_rank() in users:
            loss = loss + mean_loss(model, make_batches(1)[0])
        backward(loss, optimizer)
        cases[name] = {"state": amp.state_dict()}
        amp.uninitialize()
    return cases


@scenario
def log_lines() -> Cases:
    """Every rank overflows four times; how many lines it logs."""
    model = make_model()
    optimizer = make_optimizer(model)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("amp_patch")
    amp.initialize(model, optimizer, opt_level="O1", verbosity=1)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for batch in make_batches(4):
        backward(mean_loss(model, batch), optimizer, model[0].weight)
        optimizer.step()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    amp.uninitialize()
    return {"O1": {"lines": len(records)}}


@scenario
def resume() -> Cases:
    """Rank 0 saves; all ranks load that into new objects and go on as the first ones do."""
    cases = {}
    for level in ("O1", "O2", "O5"):
        saved: list[Any] = [None]
        first = train_from(saved, level)
        second = train_from(saved, level)
        cases[level] = {"first": first, "second": second}
    return cases


def train_from(saved: list[Any], level: str) -> list[str]:
    """Six steps, or the last three of them from what was `saved` in between. Returns digests of
    the state after three and after six.
    """
    model = make_model(seed=dist.get_rank())
    optimizer = initialize(model, level)
    wrapper = DistributedDataParallel(model)
    first, second = make_batches(6)[:3], make_batches(6)[3:]
    if saved[0] is None:
        train(wrapper, optimizer, first)
        state = {
            "model": wrapper.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        saved[0] = copy.deepcopy(state)
        dist.broadcast_object_list(saved, 0)
    else:
        wrapper.load_state_dict(saved[0]["model"])
        optimizer.load_state_dict(saved[0]["optimizer"])
        amp.load_state_dict(saved[0]["amp"])
    digests = [digest(everything(model, optimizer))]
    train(wrapper, optimizer, second)
    digests.append(digest(everything(model, optimizer)))
    amp.uninitialize()
    return digests


def shard(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


@scenario
def sharded() -> Cases:
    """FSDP2 with overflows on rank 1 only: in its loss, then in its shard of a gradient."""
    batches = make_batches(10)
    expected = plain_weights(batches, [[(i, 1.0)] for i in range(10) if i not in {3, 6}])
    cases = {}
    for level in ("O1", "O4"):
        model = shard(make_model())
        optimizer = initialize(model, level)
        skipped = []
        for i, batch in enumerate(batches):
            hit = i if dist.get_rank() == 1 else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", amp.AmpWarning)  # of the loss that is inf
                loss = mean_loss(model, batch) * (float("inf") if hit == 3 else 1.0)
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                    if hit == 6:
                        model[0].weight.grad.to_local()[0, 0] = float("inf")
            optimizer.step()
            optimizer.zero_grad()
            skipped += [i] if amp.step_was_skipped(optimizer) else []
        cases[level] = figures(model, optimizer, skipped, expected)
        amp.uninitialize()
    return cases


@scenario
def sharded_accumulation() -> Cases:
    """FSDP2 that sums unreduced gradients in its own buffers; the scale would grow each block."""
    expected = plain_windows(3)
    cases = {}
    for level in ("O1", "O4"):
        model = shard(make_model())
        optimizer = make_optimizer(model)
        scale = amp.DynamicLossScale(initial=4.0, growth_interval=1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
        batches = iter(make_batches(WINDOWS * 3))
        for _ in range(WINDOWS):
            for is_last in (False, False, True):
                model.set_requires_gradient_sync(is_last)
                backward(mean_loss(model, next(batches)), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        cases[level] = figures(model, optimizer, [], expected)
        amp.uninitialize()
    return cases


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except amp.AmpError as error:
        return str(error)
    finally:
        amp.uninitialize()
    return ""


@scenario
def refusals() -> Cases:
    """What initialize says to wrapped and sharded models."""
    wrapper = DistributedDataParallel(make_model())
    sharded_model = shard(make_model())
    cases = {
        f"wrapped, {level}": {
            "message": message_of(lambda level=level: initialize(wrapper, level)),
        }
        for level in ("O1", "O2", "O3")
    }
    for level in ("O2", "O3", "O5"):
        message = message_of(lambda level=level: initialize(sharded_model, level))
        cases[f"sharded, {level}"] = {
            "message": message,
            "dtypes": sorted({str(p.dtype) for p in sharded_model.parameters()}),
        }
    return cases


def gathered(cases: Cases) -> dict[str, list[Figures]]:
    """The figures of all ranks, by case."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, cases)
    return {name: [own[name] for own in everybody] for name in cases}


def main(results: Path) -> None:
    """Run all scenarios."""
    faulthandler.dump_traceback_later(WORKER_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    found = {name: gathered(function()) for name, function in SCENARIOS.items()}
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # now and then gloo's threads abort a process that tears itself down in full


if __name__ == "__main__":
    main(Path(sys.argv[1]))
