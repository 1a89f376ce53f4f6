"""The cross entropy of apex.contrib, over torch's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class SoftmaxCrossEntropyLoss:
    """Called as `SoftmaxCrossEntropyLoss.apply(...)`: a loss for each sample, none for padding.

    >>> losses = SoftmaxCrossEntropyLoss.apply(torch.zeros(2, 4), torch.tensor([1, 0]))
    >>> [round(loss, 4) for loss in losses.tolist()]
    [1.3863, 0.0]
    """

    @staticmethod
    def apply(
        logits: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> torch.Tensor:
        """Losses of shape (samples,) of `logits` (samples, classes), computed in FP32.

        Zero where a label is `padding_idx`, which need not be a class. In the dtype of `logits`
        unless `half_to_float`.
        """
        losses = F.cross_entropy(
            logits.float(),
            labels,
            ignore_index=padding_idx,
            reduction="none",
            label_smoothing=smoothing,
        )
        return losses if half_to_float else losses.to(logits.dtype)
