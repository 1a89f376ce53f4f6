"""The comparison on the handwritten digits: the network of the demo, in batches of 32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from amp_patch.tools.digits import load_digit_split, make_network

BATCH_SIZE = 32
LEARNING_RATE = 0.05
MOMENTUM = 0.9


def build() -> tuple[nn.Module, Any]:
    """The network, and SGD with momentum."""
    model = make_network()
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scans and labels, in an order that follows torch's generator."""
    digits = load_digit_split(torch.device("cpu"))
    for chosen in torch.randperm(len(digits.train_labels)).split(BATCH_SIZE):
        yield digits.train_images[chosen], digits.train_labels[chosen]
