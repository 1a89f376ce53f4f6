"""The training problems of the GPU script, and tiny ones in their place where there is none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.erfnet import make_erfnet
from benchmarks.models import (
    PIXEL_CLASSES,
    Gpt,
    LstmLanguageModel,
    Problem,
    Workload,
    images,
    loss_of_classes_second,
    make_mlp,
    scenes,
    texts,
    vectors,
)

VOCABULARY = 50_257  # of GPT-2
WORDS = 10_000
CLASSES = 1_000


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions with BatchNorm beside a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        inner = channels_out // 4
        self.convolutions = nn.Sequential(
            *convolution(channels_in, inner, 1),
            nn.ReLU(),
            *convolution(inner, inner, 3, stride),
            nn.ReLU(),
            *convolution(inner, channels_out, 1),
        )
        nn.init.zeros_(self.convolutions[-1].weight)  # the block starts as its shortcut
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(*convolution(channels_in, channels_out, 1, stride))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features of the next layer."""
        return functional.relu(self.convolutions(features) + self.shortcut(features))


def convolution(channels_in: int, channels_out: int, side: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution that keeps the resolution, or divides it by `stride`, and its norm."""
    return [
        nn.Conv2d(channels_in, channels_out, side, stride, padding=side // 2, bias=False),
        nn.BatchNorm2d(channels_out),
    ]


def make_resnet(blocks: tuple[int, ...], width: int) -> nn.Module:
    """Return a ResNet of bottleneck blocks: (3, 4, 6, 3) and 256 make it ResNet-50."""
    widths = [width * 2**stage for stage, count in enumerate(blocks) for _ in range(count)]
    steps = [(before, after, 1 if before == after else 2) for before, after in pairwise(widths)]
    return nn.Sequential(
        *convolution(3, width // 4, 7, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        Bottleneck(width // 4, width, 1),
        *(Bottleneck(*step) for step in steps),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], CLASSES),
    )


def problem(
    name: str, make_model: Callable[[], nn.Module], load: Workload, **settings: Any
) -> Problem:
    """Return a problem that has one size only."""
    return Problem(name, make_model, full=load, small=load, **settings)


PROBLEMS = {
    "gpt": problem(
        "GPT-2 small",
        lambda: Gpt(layers=12, width=768, heads=12, context=1024, vocabulary=VOCABULARY),
        Workload("8 x 1024 tokens", lambda: texts(8, 1024, VOCABULARY), steps_a_turn=3),
    ),
    "resnet": problem(
        "ResNet-50",
        lambda: make_resnet((3, 4, 6, 3), 256),
        Workload("64 x 3 x 224 x 224", lambda: images(64, 224, CLASSES), steps_a_turn=3),
    ),
    "erfnet": problem(
        "ERFNet",
        lambda: make_erfnet(PIXEL_CLASSES),
        Workload("6 x 3 x 512 x 1024", lambda: scenes(6, 512, 1024), steps_a_turn=3),
        compute_loss=loss_of_classes_second,
    ),
    "lstm": problem(
        "LSTM, 2 layers of 1024",
        lambda: LstmLanguageModel(layers=2, width=1024, vocabulary=WORDS),
        Workload("64 x 128 tokens", lambda: texts(64, 128, WORDS), steps_a_turn=5),
    ),
    "mlp": problem(
        "MLP, 5 layers of 64",
        make_mlp,
        Workload("32 vectors", lambda: vectors(32), steps_a_turn=50),
    ),
}

# In their places, what a CPU without fast float16 arithmetic trains in no time.
TINY_PROBLEMS = {
    "gpt": problem(
        "tiny GPT",
        lambda: Gpt(layers=1, width=16, heads=2, context=8, vocabulary=32),
        Workload("1 x 8 tokens", lambda: texts(1, 8, 32), steps_a_turn=1),
    ),
    "resnet": problem(
        "tiny ResNet",
        lambda: make_resnet((1, 1), 16),
        Workload("2 x 3 x 16 x 16", lambda: images(2, 16, CLASSES), steps_a_turn=1),
    ),
    "erfnet": problem(
        "tiny ERFNet",
        lambda: make_erfnet(PIXEL_CLASSES, width=4, blocks=(1, 0, 1)),
        Workload("1 x 3 x 16 x 32", lambda: scenes(1, 16, 32), steps_a_turn=1),
        compute_loss=loss_of_classes_second,
    ),
    "lstm": problem(
        "tiny LSTM",
        lambda: LstmLanguageModel(layers=1, width=16, vocabulary=32),
        Workload("2 x 4 tokens", lambda: texts(2, 4, 32), steps_a_turn=1),
    ),
    "mlp": problem(
        "tiny MLP",
        lambda: make_mlp(layers=2, width=16),
        Workload("4 vectors", lambda: vectors(4, 16), steps_a_turn=1),
    ),
}
