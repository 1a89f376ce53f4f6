"""Train on N ranks, then on one with the N-fold batch, and compare.

    torchrun --nproc-per-node 4 -m benchmarks.ranks

Each rank reads its share of every batch in `DistributedDataParallel`; afterwards the first rank
trains alone on whole batches, from the same weights. Without scikit-learn the scans are synthetic.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import amp_patch as amp

BATCH_OF_A_RANK = 16
LEARNING_RATE = 0.05
MOMENTUM = 0.9
# One rank divides the gradient of a scan by the N-fold batch, N ranks by their share of it: theirs
# overflow at a scale N times smaller. From here neither do, so that both make the same steps.
START_SCALE = 2.0**10
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
LEVELS = tuple(amp.OPT_LEVELS)
# How far the two runs may end apart, relative to how far the weights have moved. In FP32 they sum
# the same numbers in another order. In half precision they also round otherwise, about as much as
# half precision rounds anyway: twice as far from each other as from FP32, where both are off.
FP32_TOLERANCE = 1e-3
ROUNDING_TOLERANCE = 2.0

CAPTION = """\
{data}. Batches of {batch} = {ranks} ranks x {share}, {steps} steps, on {device}.
Exact: all ranks hold the same bits, loss scale and skipped steps ("identical").
Within rounding: losses and weights, as sums over a batch are made in another order. "apart" is how
far the weights of the two runs are from each other, "rounding" how far those of the one rank are
from FP32's, both relative to how far training has moved them.
Without BatchNorm, whose statistics would be those of a rank's share (on GPUs: SyncBatchNorm)."""


@dataclass(frozen=True)
class Scans:
    """Images as float32 `(count, 1, 8, 8)`, labels as int64 `(count,)` in 0 to 9."""

    source: str
    images: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Run:
    """Where training has ended on this rank. `weights` are the optimizer's, in FP32."""

    weights: torch.Tensor
    losses: list[float]
    skipped: list[int]
    loss_scale: float
    seconds: float


def load_scans(device: torch.device) -> Scans:
    """Return the demo's training scans, or synthetic ones where scikit-learn is missing."""
    try:
        from amp_patch.tools.digits import load_digit_split  # noqa: PLC0415 (needs scikit-learn)
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (1198,), generator=generator)
        patterns = torch.rand(10, 1, 8, 8, generator=generator)
        noise = torch.rand(1198, 1, 8, 8, generator=generator)
        images = (patterns[labels] + noise) / 2
        return Scans("Synthetic scans", images.to(device), labels.to(device))
    digits = load_digit_split(device)
    return Scans("Handwritten digits of scikit-learn", digits.train_images, digits.train_labels)


def make_network() -> nn.Module:
    """Return the demo's network with GroupNorm, which knows no batch, in place of BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2, bias=False),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def train(opt_level: str, scans: Scans, steps: int, batch_size: int, ranks: int, rank: int) -> Run:
    """Train at `opt_level` on the part of each batch that is `rank`'s among `ranks`."""
    torch.manual_seed(0)
    model = make_network().to(scans.images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses, skipped = [], []
    try:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=opt_level, verbosity=0, max_loss_scale=START_SCALE
        )
        forward = DistributedDataParallel(model) if ranks > 1 else model
        started = time.perf_counter()
        for step in range(steps):
            whole = torch.arange(step * batch_size, (step + 1) * batch_size) % len(scans.labels)
            own = whole.chunk(ranks)[rank].to(scans.labels.device)
            loss = functional.cross_entropy(forward(scans.images[own]), scans.labels[own])
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if amp.step_was_skipped(optimizer):
                skipped.append(step)
        seconds = time.perf_counter() - started
        masters = [p.detach().float().flatten() for p in amp.master_params(optimizer)]
        return Run(torch.cat(masters).cpu(), losses, skipped, amp.loss_scale(), seconds / steps)
    finally:
        amp.uninitialize()


def first_weights(device: torch.device) -> torch.Tensor:
    """Return the weights from which every run starts."""
    torch.manual_seed(0)
    return torch.cat([p.detach().flatten() for p in make_network().to(device).parameters()]).cpu()


def are_ranks_identical(run: Run) -> bool:
    """Whether all ranks have the same bits, the same loss scale and the same skipped steps."""
    bits = hashlib.sha256(run.weights.numpy().tobytes()).hexdigest()
    mine = (bits, run.loss_scale, run.skipped)
    everybody: list[tuple[str, float, list[int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return all(other == mine for other in everybody)


def mean_of_ranks(value: float, device: torch.device) -> float:
    """Return the mean of `value` over the ranks."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def compare(
    opt_level: str, scans: Scans, steps: int, batch_size: int, exact: torch.Tensor
) -> tuple[str, bool]:
    """Return a line of the table, and whether it is as it must be. Every rank calls this.

    `exact` are the weights of one rank in FP32.
    """
    device = scans.images.device
    together = train(opt_level, scans, steps, batch_size, dist.get_world_size(), dist.get_rank())
    is_identical = are_ranks_identical(together)
    loss = mean_of_ranks(together.losses[-1], device)
    # All ranks make the second run, so that none waits longer than a collective may take.
    alone = train(opt_level, scans, steps, batch_size, ranks=1, rank=0)
    moved = (exact - first_weights(device)).norm()
    apart = ((together.weights - alone.weights).norm() / moved).item()
    rounding = ((alone.weights - exact).norm() / moved).item()
    allowed = max(FP32_TOLERANCE, ROUNDING_TOLERANCE * rounding)
    is_right = is_identical and apart < allowed and together.skipped == alone.skipped
    skipped = f"{len(together.skipped):3} / {len(alone.skipped):<3}"
    line = (
        f"{opt_level:5}  {'yes' if is_identical else 'NO':9}  {apart:8.1e}  {rounding:8.1e}"
        f"  {loss:8.5f}  {alone.losses[-1]:9.5f}  {skipped}  {together.loss_scale:7g}"
        f"  {together.seconds * 1000:7.1f}"
    )
    return line, is_right


HEADER = "level  identical  apart     rounding  loss, N   loss, one   skipped    scale  ms/step"


def run(opt_levels: Sequence[str], steps: int) -> bool:
    """Print the table on the first rank. Return whether all of it is as it must be."""
    is_first, ranks = dist.get_rank() == 0, dist.get_world_size()
    device = torch.device("cuda", dist.get_rank()) if has_gpus() else torch.device("cpu")
    scans = load_scans(device)
    batch_size = BATCH_OF_A_RANK * ranks
    exact = train("O0", scans, steps, batch_size, ranks=1, rank=0).weights
    if is_first:
        print(HEADER, flush=True)
    is_right = True
    for opt_level in opt_levels:
        line, is_level_right = compare(opt_level, scans, steps, batch_size, exact)
        is_right &= is_level_right
        if is_first:
            print(line if is_level_right else f"{line}  <- expected the same result", flush=True)
    if is_first:
        print(
            CAPTION.format(
                data=scans.source,
                batch=batch_size,
                ranks=ranks,
                share=BATCH_OF_A_RANK,
                steps=steps,
                device=device.type,
            )
        )
    return is_right


def has_gpus() -> bool:
    """Whether every rank on this machine has a GPU of its own."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= dist.get_world_size()


def main() -> int:
    """Read the command line and run under torchrun. Return the exit status."""
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("expected to be started by torchrun --nproc-per-node N -m benchmarks.ranks")
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    if has_gpus():
        torch.cuda.set_device(dist.get_rank())
    try:
        return 0 if run(options.levels, options.steps) else 1
    finally:
        gc.collect()  # a DistributedDataParallel must not outlive its process group
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
