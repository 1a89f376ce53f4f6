"""ERFNet, a network that gives each pixel of an image its class.

Romera, Álvarez, Bergasa and Arroyo, "ERFNet: Efficient Residual Factorized ConvNet for Real-Time
Semantic Segmentation", IEEE Transactions on Intelligent Transportation Systems 19 (2018): 16
encoder layers that end at an eighth of the resolution, and a small decoder.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

NORM_EPSILON = 1e-3
DILATIONS = (2, 4, 8, 16)


class Downsampler(nn.Module):
    """Half the resolution: a convolution and a max-pooling side by side."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(
            channels_in, channels_out - channels_in, 3, stride=2, padding=1
        )
        self.pool = nn.MaxPool2d(2)
        self.norm = nn.BatchNorm2d(channels_out, eps=NORM_EPSILON)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return `(N, channels_out, H / 2, W / 2)`."""
        features = torch.cat([self.convolution(images), self.pool(images)], dim=1)
        return functional.relu(self.norm(features))


class FactorizedBlock(nn.Module):
    """The non-bottleneck-1D block: two 3 x 3 convolutions, each as 3 x 1 and 1 x 3, and a shortcut.

    The second pair is dilated, so that the block sees far without losing resolution.
    """

    def __init__(self, channels: int, dropout: float = 0.0, dilation: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *factorized_pair(channels, 1), nn.ReLU(), *factorized_pair(channels, dilation)
        )
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return features of the same shape."""
        return functional.relu(self.dropout(self.residual(features)) + features)


class Upsampler(nn.Module):
    """Twice the resolution, by a transposed convolution."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.convolution = nn.ConvTranspose2d(
            channels_in, channels_out, 3, stride=2, padding=1, output_padding=1
        )
        self.norm = nn.BatchNorm2d(channels_out, eps=NORM_EPSILON)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return `(N, channels_out, 2 H, 2 W)`."""
        return functional.relu(self.norm(self.convolution(features)))


def factorized_pair(channels: int, dilation: int) -> list[nn.Module]:
    """Return a 3 x 1 and a 1 x 3 convolution, with ReLU between and BatchNorm behind."""
    return [
        nn.Conv2d(channels, channels, (3, 1), padding=(dilation, 0), dilation=(dilation, 1)),
        nn.ReLU(),
        nn.Conv2d(channels, channels, (1, 3), padding=(0, dilation), dilation=(1, dilation)),
        nn.BatchNorm2d(channels, eps=NORM_EPSILON),
    ]


def make_erfnet(
    classes: int, width: int = 16, blocks: tuple[int, int, int] = (5, 2, 2)
) -> nn.Module:
    """Return ERFNet: `(N, 3, H, W)` images to `(N, classes, H, W)` logits; H and W in eighths.

    `blocks` are those at a quarter of the resolution, the rounds of dilated ones, and those after
    each upsampler.
    """
    first, dilated, last = blocks
    middle, deep = 4 * width, 8 * width
    model = nn.Sequential(
        Downsampler(3, width),
        Downsampler(width, middle),
        *(FactorizedBlock(middle, dropout=0.03) for _ in range(first)),
        Downsampler(middle, deep),
        *(
            FactorizedBlock(deep, dropout=0.3, dilation=dilation)
            for dilation in dilated * DILATIONS
        ),
        Upsampler(deep, middle),
        *(FactorizedBlock(middle) for _ in range(last)),
        Upsampler(middle, width),
        *(FactorizedBlock(width) for _ in range(last)),
        nn.ConvTranspose2d(width, classes, 2, stride=2),
    )
    model.apply(initialize_weights)
    return model


def initialize_weights(module: nn.Module) -> None:
    """Start convolutions as He et al. (arXiv:1502.01852) do, and each block as its shortcut.

    From torch's own start, BatchNorm takes the biases off and blows up what is left, block after
    block, with its roundings: in half precision the gradients of so deep a network are noise then,
    and nothing could be said of a training step by its result. Goyal et al. (arXiv:1706.02677,
    section 5.1) start the last norm of a block at zero.
    """
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)
    if isinstance(module, FactorizedBlock):
        nn.init.zeros_(module.residual[-1].weight)
