"""Small networks and the loops around them, shared by the tests. Tiny: float16 is slow on CPUs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp

# The largest relative error of one rounding to nearest: half a unit in the last place.
ROUNDING_UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
LEVELS = tuple(amp.OPT_LEVELS)
HALF_LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}
MASTER_LEVELS = {"O2": torch.float16, "O5": torch.bfloat16}

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


class LastOfSequence(nn.Module):
    """An LSTM over a sequence and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class EncodedMean(nn.Module):
    """A transformer encoder and a linear layer on the mean of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


@dataclass(frozen=True)
class Network:
    """How to build a model that gives 3 numbers an example, and what to feed it.

    `depth` counts the operations with half operands on the longest path through it.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    depth: int

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, other ones at each call."""
        return torch.randn(self.shape), torch.randn(self.shape[0], 3)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def normalised_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def dropping_mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


NETWORKS: Mapping[str, Network] = {
    "mlp": Network(mlp, (4, 6), depth=3),
    "cnn": Network(cnn, (4, 1, 6, 6), depth=3),
    "lstm": Network(LastOfSequence, (4, 3, 5), depth=7),  # two matmuls a step, and the head
    # a layer: input projection, scores, attention, output projection and two linears
    "encoder": Network(EncodedMean, (4, 3, 8), depth=13),
}

OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-4, foreach=False),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-4, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-4, fused=True),
}


class _GradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None


def with_gradient_times(tensor: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """`tensor` as it is, whose gradient will be multiplied by `factor`; inf makes an overflow.

    The loss itself stays finite, as it does in an overflow that a smaller loss scale prevents.
    """
    return _GradientTimes.apply(tensor, torch.as_tensor(factor, dtype=torch.float32))


def backward(loss: torch.Tensor, optimizer: Any, **options: Any) -> None:
    """The block around backward."""
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def train_step(
    model: nn.Module, optimizer: Any, batch: tuple[torch.Tensor, torch.Tensor], factor: float = 1.0
) -> float:
    """One iteration of a user's loop. A `factor` of inf makes it overflow. Returns the loss."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    backward(with_gradient_times(loss, factor), optimizer)
    optimizer.step()
    return loss.item()


def plain_step(model: nn.Module, optimizer: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The same iteration as it was before amp_patch came."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def gradients(optimizer: Any) -> list[torch.Tensor]:
    """Copies of the gradients that the next step will use."""
    return [p.grad.detach().clone() for p in amp.master_params(optimizer) if p.grad is not None]


def state_of(optimizer: Any) -> list[dict[str, Any]]:
    """The optimizer's own tensors and counts, a dict a parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {name: value for name, value in optimizer.state.get(p, {}).items() if value is not None}
        for p in parameters
    ]


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """A copy of every parameter, master and optimizer state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy(
        {
            "model": {name: p.detach() for name, p in model.named_parameters()},
            "updated": [p.detach() for p in parameters],
            "state": state_of(optimizer),
        }
    )


def assert_identical(found: Any, expected: Any) -> None:
    """Same dtypes, same values, bit for bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What every module in `model` carries: hooks, parameters, buffers, methods, by identity."""
    return {
        path: {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(module).items()
        }
        for path, module in model.named_modules()
    }


def assert_same_objects(found: Any, expected: Any) -> None:
    """The same keys, and under each the very same object."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same_objects(found[name], value)
        else:
            assert found[name] is value or found[name] == value, name
