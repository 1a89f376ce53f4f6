"""The training problems of the benchmarks: a model, a batch, a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.erfnet import make_erfnet

VOCABULARY = 512
IMAGE_CLASSES = 10
PIXEL_CLASSES = 20
SQUARE = 16  # pixels


@dataclass(frozen=True)
class Batch:
    """Inputs of a model and the class of each of its outputs."""

    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Workload:
    """A batch, its size in words, and how many timed steps on it make one turn."""

    size: str
    make_batch: Callable[[], Batch]
    steps_a_turn: int


def loss_of_classes_last(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of `(N, ..., C)` logits."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def loss_of_classes_second(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of `(N, C, ...)` logits."""
    return functional.cross_entropy(logits, targets)


@dataclass(frozen=True)
class Problem:
    """A model with a batch of full size, and one that a CPU can do in float16 in little time."""

    name: str
    make_model: Callable[[], nn.Module]
    full: Workload
    small: Workload
    compute_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = loss_of_classes_last


class Gpt(nn.Module):
    """A decoder-only transformer with pre-norm blocks: `(N, T)` tokens to `(N, T, V)` logits."""

    def __init__(
        self, layers: int, width: int, heads: int, context: int, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each position."""
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))


class GptBlock(nn.Module):
    """Causal self-attention and a feed-forward net, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, `(N, T, width)` as they came."""
        hidden = hidden + self.attention_out(self.attend(self.attention_norm(hidden)))
        return hidden + self.feed_forward(hidden)

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mix the positions: each sees itself and those before it."""
        batch, length, width = hidden.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = self.queries_keys_values(hidden).view(shape).unbind(2)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
        )
        return mixed.transpose(1, 2).reshape(batch, length, width)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm beside a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the features of the images."""
        return functional.relu(self.convolutions(images) + self.shortcut(images))


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM and a linear layer: `(N, T)` tokens to `(N, T, V)` logits."""

    def __init__(self, layers: int, width: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each position."""
        hidden, _ = self.lstm(self.tokens(tokens))
        return self.head(hidden)


def make_mlp(layers: int = 5, width: int = 64) -> nn.Module:
    """Return linear layers with ReLU between them."""
    modules: list[nn.Module] = [nn.Linear(width, width)]
    for _ in range(layers - 1):
        modules += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*modules)


def make_resnet() -> nn.Module:
    """Return ResNet-20 for 32 x 32 images (He et al., arXiv:1512.03385, section 4.2)."""
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [
        ResidualBlock(before, after, stride=1 if before == after else 2)
        for before, after in pairwise(widths)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, IMAGE_CLASSES),
    )


def make_gpt() -> nn.Module:
    """Return a GPT of 4 layers, width 256 and 4 heads."""
    return Gpt(layers=4, width=256, heads=4, context=128)


def make_lstm() -> nn.Module:
    """Return an LSTM language model of 2 layers and width 128."""
    return LstmLanguageModel(layers=2, width=128)


def vectors(count: int, width: int = 64) -> Batch:
    """Return `count` random vectors with one of `width` classes each."""
    return Batch(torch.randn(count, width), torch.randint(width, (count,)))


def images(count: int, side: int = 32, classes: int = IMAGE_CLASSES) -> Batch:
    """Return `count` random square images of three colours with a class each."""
    return Batch(torch.randn(count, 3, side, side), torch.randint(classes, (count,)))


def scenes(count: int, height: int, width: int) -> Batch:
    """Return `count` images of three colours, in noise, with a class for each pixel.

    Squares of one class have one colour. Where each pixel had a class of its own, gradients would
    be sums of noise that cancel, and in half precision nothing but roundings.
    """
    squares = torch.randint(PIXEL_CLASSES, (count, height // SQUARE, width // SQUARE))
    targets = squares.repeat_interleave(SQUARE, 1).repeat_interleave(SQUARE, 2)
    colours = torch.randn(PIXEL_CLASSES, 3)[targets].permute(0, 3, 1, 2)
    return Batch(colours + 0.5 * torch.randn(count, 3, height, width), targets)


def texts(count: int, length: int, vocabulary: int = VOCABULARY) -> Batch:
    """Return `count` random texts of `length` tokens and the token that follows each."""
    tokens = torch.randint(vocabulary, (count, length + 1))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


PROBLEMS = {
    "mlp": Problem(
        "MLP, 5 layers of 64",
        make_mlp,
        full=Workload("32 vectors", lambda: vectors(32), steps_a_turn=100),
        small=Workload("32 vectors", lambda: vectors(32), steps_a_turn=100),
    ),
    "gpt": Problem(
        "GPT, 4 layers of 256",
        make_gpt,
        full=Workload("8 x 128 tokens", lambda: texts(8, 128), steps_a_turn=3),
        small=Workload("1 x 16 tokens", lambda: texts(1, 16), steps_a_turn=3),
    ),
    "resnet": Problem(
        "ResNet-20",
        make_resnet,
        full=Workload("32 images", lambda: images(32), steps_a_turn=4),
        small=Workload("4 images", lambda: images(4), steps_a_turn=3),
    ),
    "erfnet": Problem(
        "ERFNet",
        lambda: make_erfnet(PIXEL_CLASSES),
        full=Workload("1 x 3 x 128 x 256", lambda: scenes(1, 128, 256), steps_a_turn=3),
        small=Workload("1 x 3 x 32 x 64", lambda: scenes(1, 32, 64), steps_a_turn=3),
        compute_loss=loss_of_classes_second,
    ),
    "lstm": Problem(
        "LSTM, 2 layers of 128",
        make_lstm,
        full=Workload("16 x 32 tokens", lambda: texts(16, 32), steps_a_turn=10),
        small=Workload("4 x 8 tokens", lambda: texts(4, 8), steps_a_turn=10),
    ),
}
