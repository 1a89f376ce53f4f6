"""A training that the tools run by themselves: how to build it, feed it and compute its loss."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from amp_patch.api import initialize
from amp_patch.errors import AmpError
from amp_patch.slot import slot
from amp_patch.state import step_was_skipped
from amp_patch.tools.level_arguments import level_setup
from amp_patch.training import scale_loss

Loss = Callable[[nn.Module, Any], torch.Tensor]
Batches = Iterable[Any] | Callable[[], Iterable[Any]]

_PAIR = 2


@dataclass(frozen=True)
class Variant:
    """One way to train: a level, or a level with other arguments of `initialize`."""

    label: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: str | Mapping[str, Any]) -> Variant:
        """From the name of a level, or from arguments for `initialize`.

        Raises AmpError for what `initialize` would refuse whatever the model.
        """
        if isinstance(given, str):
            level_setup("opt_levels", opt_level=given)
            return cls(given, {"opt_level": given})
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise AmpError(
                "opt_levels: expected names of levels, as 'O1', or dicts of arguments for "
                f"initialize, found {given!r}"
            )
        level_setup("opt_levels", **given)
        others = {name: value for name, value in given.items() if name != "opt_level"}
        level = str(given.get("opt_level", "O1"))
        return cls(" ".join([level, *(f"{k}={v}" for k, v in others.items())]), dict(given))


@dataclass
class Training:
    """A model that is being trained under amp, one step at a time."""

    model: nn.Module
    optimizer: Any
    scheduler: Any
    loss: Loss

    def forward_and_backward(self, batch: Any) -> torch.Tensor:
        """The loss of `batch`; the gradients are where `scale_loss` leaves them."""
        loss = self.loss(self.model, batch)
        with scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()  # type: ignore[no-untyped-call]  # torch's own gap
        return loss

    def step(self, batch: Any) -> float:
        """One whole step of training; a skipped one holds the scheduler. Returns the loss.

        Waits for the device.
        """
        loss = self.forward_and_backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None and not step_was_skipped(self.optimizer):
            self.scheduler.step()
        return float(loss.item())


@dataclass(frozen=True)
class Job:
    """What a user gives a tool to train: see `compare` for what each part has to be."""

    build: Callable[[], Any]
    batches: Batches
    loss: Loss | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be a part of a training."""
        if not callable(self.build):
            raise AmpError(f"build: expected a function, found {self.build!r}")
        if not callable(self.batches) and not isinstance(self.batches, Iterable):
            raise AmpError(
                "batches: expected an iterable of batches, or a function that returns one, found "
                f"{type(self.batches).__name__}"
            )
        if self.loss is not None and not callable(self.loss):
            raise AmpError(f"loss: expected a function loss(model, batch), found {self.loss!r}")

    def built(self, seed: int) -> Training:
        """Build anew, with every generator of random numbers at `seed`."""
        seed_everything(seed)
        made = self.build()
        if not isinstance(made, (tuple, list)) or len(made) not in (_PAIR, _PAIR + 1):
            raise AmpError(
                "build: expected a function that returns (model, optimizer) or (model, optimizer, "
                f"scheduler), found that it returns {type(made).__name__}"
            )
        model, optimizer, *rest = made
        if not isinstance(model, nn.Module) or not hasattr(optimizer, "param_groups"):
            raise AmpError(
                "build: expected it to return a torch.nn.Module and an optimizer, found "
                f"{type(model).__name__} and {type(optimizer).__name__}"
            )
        return Training(model, optimizer, rest[0] if rest else None, self.loss or default_loss)

    def started(self, variant: Variant, seed: int) -> Training:
        """Build anew and initialize as `variant` says. The caller has to `uninitialize`."""
        training = self.built(seed)
        self.initialized(training, variant)
        return training

    def initialized(self, training: Training, variant: Variant) -> None:
        """Initialize what was built as `variant` says. The caller has to `uninitialize`."""
        initialize(training.model, training.optimizer, **{"verbosity": 0, **variant.arguments})

    def stream(self, count: int) -> Iterator[Any]:
        """The first `count` batches; from the start again where there are fewer."""
        given = 0
        while given < count:
            before = given
            source = self.batches() if callable(self.batches) else self.batches
            for batch in itertools.islice(source, count - given):
                given += 1
                yield batch
            if given == before:
                raise AmpError("batches: expected at least one batch, found none")

    def with_lasting_batches(self, count: int) -> Job:
        """The same job, with batches that can be gone through more than once."""
        if not callable(self.batches) and iter(self.batches) is self.batches:
            return Job(self.build, list(itertools.islice(self.batches, count)), self.loss)
        return self


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """What most models want: the loss that the model itself returns, or one against targets.

    A batch that is a mapping goes in by keywords, a tuple `(inputs, targets)` as `model(inputs)`;
    the output is compared with the targets by cross entropy if those are integers, else by the mean
    squared error. An output with a `loss`, and one that is a single number, is the loss.
    """
    if isinstance(batch, Mapping):
        output, targets = model(**batch), None
    elif isinstance(batch, (tuple, list)) and len(batch) == _PAIR:
        output, targets = model(batch[0]), batch[1]
    else:
        output, targets = model(batch), None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(found, torch.Tensor) and found.dim() == 0:
        return found
    if not isinstance(found, torch.Tensor) or targets is None:
        raise AmpError(
            "loss: expected a function loss(model, batch), since the model returns no loss itself "
            f"and the batch is no pair (inputs, targets); found None and {type(batch).__name__}"
        )
    if targets.is_floating_point():
        return functional.mse_loss(found, targets)
    return functional.cross_entropy(found, targets)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, torch and, where it is loaded, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def check_count(name: str, value: Any) -> None:
    """Refuse anything but an integer of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise AmpError(f"{name}: expected an integer of at least 1, found {value!r}")


def refuse_open_session(caller: str) -> None:
    """Raise AmpError where models of this process are under amp, which a tool would disturb."""
    if slot.session is not None and not slot.session.is_idle:
        raise AmpError(
            f"{caller}: expected a process in which amp is not in use, since it initializes and "
            "uninitializes by itself; found an earlier amp.initialize. Call uninitialize() first"
        )
