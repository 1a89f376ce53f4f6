"""Train the same small network on real scans at each opt level.

`train` is the example to copy: it holds the one line and the one block that mixed precision takes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import amp_patch as amp
from amp_patch.tools.digits import DigitSplit, load_digit_split, make_network
from amp_patch.tools.level_table import LevelRun, LevelSummary, make_table, summarize
from amp_patch.tools.machine import Machine, describe_machine

BATCH_SIZE = 32
PEAK_LEARNING_RATE = 0.1
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-3
WARM_UP_STEPS = 10

CAPTION = """\
Handwritten digits of scikit-learn, epochs: {options.epochs}, seeds: {options.seeds}, \
device: {options.device}.
{machine}.
Step times are medians, but the levels were trained one after another: whatever else the machine \
did meanwhile is in the ratio. For ratios to rely on, run python -m benchmarks.steps in the \
source tree."""
SEEDS_CAPTION = """
Accuracy and loss are means over the seeds, skipped steps their sum."""


@dataclass(frozen=True)
class DemoOptions:
    """What the demo trains: each level from each of the seeds 0 to `seeds` - 1."""

    levels: tuple[str, ...]
    seeds: int
    epochs: int
    device: torch.device


@dataclass
class StepLog:
    """What each training step took and gave."""

    started: float = 0.0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped_steps: int = 0

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches; the clock of a step starts when its batch is there."""
        for batch in batches:
            self.started = time.perf_counter()
            yield batch

    def add(self, loss: torch.Tensor, skipped: bool) -> None:
        """End a step. Reading the loss waits for the device, so that the step is really over."""
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - self.started)
        self.skipped_steps += skipped


def train(
    opt_level: str,
    seed: int,
    epochs: int,
    digits: DigitSplit,
    after_step: Callable[[], object] = lambda: None,
) -> LevelRun:
    """Train a new network at `opt_level`; its first weights and the order of scans follow `seed`.

    Seeds torch's global generator, and ends what amp_patch has switched on in the process.
    """
    torch.manual_seed(seed)
    model = make_network().to(digits.train_images.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=PEAK_LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    loader = make_loader(digits)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, total_steps=epochs * len(loader)
    )
    log = StepLog()
    try:
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
        for _ in range(epochs):
            for images, labels in log.timed(loader):
                loss = functional.cross_entropy(model(images), labels)
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()  # type: ignore[no-untyped-call]  # torch's own gap
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

                log.add(loss, skipped=amp.step_was_skipped(optimizer))
                after_step()
        return LevelRun(
            opt_level=opt_level,
            seed=seed,
            accuracy=measure_accuracy(model, digits),
            final_loss=statistics.fmean(log.losses[-len(loader) :]),
            step_seconds=statistics.median(log.seconds[WARM_UP_STEPS:]),
            weight_bytes=bytes_of(model.parameters()),
            master_bytes=bytes_of(only_masters(model, optimizer)),
            loss_scale=amp.loss_scale(),
            skipped_steps=log.skipped_steps,
        )
    finally:
        amp.uninitialize()


def make_loader(digits: DigitSplit) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return the training scans in batches; the order follows torch's global generator."""
    scans = TensorDataset(digits.train_images, digits.train_labels)
    return DataLoader(scans, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)


def measure_accuracy(model: nn.Module, digits: DigitSplit) -> float:
    """Return the percentage of the held-out scans that the model reads right."""
    model.eval()
    with torch.no_grad():
        guesses = model(digits.test_images).argmax(dim=1)
    right = int((guesses == digits.test_labels).sum())
    return 100.0 * right / len(guesses)


def only_masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return what the optimizer steps on that is not in the model itself."""
    weights = {id(weight) for weight in model.parameters()}
    return [master for master in amp.master_params(optimizer) if id(master) not in weights]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the elements of the tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def train_all(options: DemoOptions, console: Console) -> list[LevelSummary]:
    """Train every level from every seed, with a progress bar on `console`."""
    digits = load_digit_split(options.device)
    steps = options.epochs * len(make_loader(digits))
    runs = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=steps * options.seeds * len(options.levels))
        for seed in range(options.seeds):
            for level in options.levels:
                progress.update(task, description=f"{level}, seed {seed}")
                runs.append(
                    train(level, seed, options.epochs, digits, lambda: progress.advance(task))
                )
    return summarize(runs)


def run_demo(options: DemoOptions, json_file: Path | None, output: Console, news: Console) -> None:
    """Train, print the table to `output` and the progress to `news`, write the JSON file if any."""
    with single_threaded():
        summaries = train_all(options, news)
        machine = describe_machine()
    output.print(make_table(summaries, make_caption(options, machine)))
    if json_file is not None:
        data = make_data(summaries, options, machine)
        json_file.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def single_threaded() -> Iterator[None]:
    """Compute in one thread inside: with a network so small, several wait more than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_caption(options: DemoOptions, machine: Machine) -> str:
    """Return what a reader must know to read the table right."""
    caption = CAPTION.format(options=options, machine=machine)
    return caption + SEEDS_CAPTION if options.seeds > 1 else caption


def make_data(
    summaries: Sequence[LevelSummary], options: DemoOptions, machine: Machine
) -> dict[str, Any]:
    """Return the table, each run behind it and the machine as plain data."""
    return {
        **asdict(machine),
        "device": str(options.device),
        "epochs": options.epochs,
        "seeds": options.seeds,
        "levels": [summary.as_data() for summary in summaries],
    }
