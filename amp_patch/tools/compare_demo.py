"""The comparison on the handwritten digits: a perceptron that is wide enough to be arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from amp_patch.tools.digits import load_digit_split

BATCH_SIZE = 128
PIXELS, WIDTH, DIGITS = 64, 512, 10
LEARNING_RATE = 0.05
MOMENTUM = 0.9


def build() -> tuple[nn.Module, Any]:
    """The network, of 303,114 weights, and SGD with momentum."""
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(PIXELS, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, DIGITS),
    )
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scans and labels, in an order that follows torch's generator."""
    digits = load_digit_split(torch.device("cpu"))
    order = torch.randperm(len(digits.train_labels))
    for chosen in torch.split(order, BATCH_SIZE):
        yield digits.train_images[chosen], digits.train_labels[chosen]
