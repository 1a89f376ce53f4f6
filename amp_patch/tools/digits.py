"""The handwritten digits that ship inside scikit-learn, and a small network that reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

HELD_OUT_FRACTION = 1 / 3
SPLIT_SEED = 0
BRIGHTEST_PIXEL = 16.0


@dataclass(frozen=True)
class DigitSplit:
    """Scans as float32 `(count, 1, 8, 8)` in [0, 1], labels as int64 `(count,)` in 0 to 9."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def split_indices(labels: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the indices of the training scans and of the held-out scans, the same in each run.

    Each digit has the same share in both parts (a stratified split).
    """
    train, test = train_test_split(
        range(len(labels)),
        test_size=HELD_OUT_FRACTION,
        stratify=labels.numpy(),
        random_state=SPLIT_SEED,
    )
    return train, test


def load_digit_split(device: torch.device) -> DigitSplit:
    """Return all 1,797 scans on `device`: 1,198 to train on, 599 held out. Needs no network."""
    scans = load_digits()
    images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / BRIGHTEST_PIXEL
    labels = torch.tensor(scans.target, dtype=torch.int64)
    train, test = split_indices(labels)
    return DigitSplit(
        train_images=images[train].to(device),
        train_labels=labels[train].to(device),
        test_images=images[test].to(device),
        test_labels=labels[test].to(device),
    )


def make_network() -> nn.Module:
    """Return a convolutional network of 6,138 weights: `(N, 1, 8, 8)` scans to `(N, 10)` logits.

    So small because float16 convolutions run backward very slowly on most CPUs.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )
