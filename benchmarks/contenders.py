"""The ways to train that are compared: plain FP32, autocast, an opt level."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

import amp_patch as amp
from benchmarks.models import Batch, Problem, Workload

SEED = 0
LEARNING_RATE = 0.01
MOMENTUM = 0.9


@contextmanager
def initialized(model: Any, optimizer: Any, opt_level: str) -> Iterator[None]:
    """Initialize for the time inside, so that no patch is left in the way of others."""
    with warnings.catch_warnings():
        # That float16 is slow on this device is for the tables to say.
        warnings.simplefilter("ignore", amp.AmpWarning)
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    try:
        yield
    finally:
        amp.uninitialize()


class Contender(ABC):
    """A model, its optimizer and one way to do a training step.

    All contenders for a workload start from the same weights and train on the same batch.
    """

    def __init__(
        self, name: str, half_dtype: torch.dtype, problem: Problem, workload: Workload, device: str
    ) -> None:
        torch.manual_seed(SEED)
        self.name = name
        self.problem = problem
        self.half_dtype = half_dtype
        self.device = torch.device(device)
        with self.device:  # a large model is made much faster where it will live
            self.model = problem.make_model()
        batch = workload.make_batch()
        self.batch = Batch(batch.inputs.to(self.device), batch.targets.to(self.device))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )

    def active(self) -> AbstractContextManager[None]:
        """Have switched on inside what this way to train needs, and off for the others."""
        return nullcontext()

    @abstractmethod
    def step(self) -> torch.Tensor:
        """Train one step and return its loss."""

    def was_skipped(self) -> bool:
        """Whether the last step left the weights as they were, because gradients overflowed."""
        return False

    def flat_weights(self) -> torch.Tensor:
        """Return a copy of all weights as one FP32 vector."""
        return torch.cat([w.detach().float().flatten() for w in self.model.parameters()])

    def compute_loss(self) -> torch.Tensor:
        """Return the loss of the model on the batch."""
        return self.problem.compute_loss(self.model(self.batch.inputs), self.batch.targets)


class Plain(Contender):
    """PyTorch in FP32, without amp_patch."""

    def step(self) -> torch.Tensor:
        """Train one step and return its loss."""
        loss = self.compute_loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Autocast(Contender):
    """`torch.autocast`, in float16 with a `GradScaler` as PyTorch's documentation has it."""

    def __init__(
        self, name: str, half_dtype: torch.dtype, problem: Problem, workload: Workload, device: str
    ) -> None:
        super().__init__(name, half_dtype, problem, workload, device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half_dtype is torch.float16)
        self.scale_before = self.scaler.get_scale()

    def step(self) -> torch.Tensor:
        """Train one step and return its loss."""
        with torch.autocast(self.device.type, dtype=self.half_dtype):
            loss = self.compute_loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss

    def was_skipped(self) -> bool:
        """Whether the scale fell: the only sign of a skipped step that a GradScaler gives."""
        before, self.scale_before = self.scale_before, self.scaler.get_scale()
        return self.scale_before < before


class OptLevel(Contender):
    """amp_patch; the name of the contender is the opt level."""

    def active(self) -> AbstractContextManager[None]:
        """Initialize the model for the time inside."""
        return initialized(self.model, self.optimizer, self.name)

    def step(self) -> torch.Tensor:
        """Train one step and return its loss."""
        loss = self.compute_loss()
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def was_skipped(self) -> bool:
        """Whether the last step was skipped."""
        return amp.step_was_skipped(self.optimizer)
