"""LAMB under the name and with the keywords of apex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amp_patch.compat.grouped_optimizer import Bucket, Group, GroupedOptimizer, corrections


class FusedLAMB(GroupedOptimizer):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2).

    All gradients together are first scaled down to the norm `max_grad_norm`. Parameters without
    weight decay take the plain Adam step, unless `use_nvlamb` gives them a trust ratio too.

        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = FusedLAMB([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> bool(weight.norm() < 5)
        True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.adam_w_mode = int(adam_w_mode)
        self.use_nvlamb = use_nvlamb

    def _common(self, buckets: Sequence[Bucket]) -> torch.Tensor | None:
        """What every gradient is divided by."""
        limit = self.defaults["max_grad_norm"]
        norms = [norm for bucket in buckets for norm in torch._foreach_norm(bucket.gradients)]
        if not norms or not limit:
            return None
        device = norms[0].device
        total = torch.stack([norm.to(device, torch.float32) for norm in norms]).norm()
        divisor: torch.Tensor = (total / limit).clamp(min=1.0)
        return divisor

    def _update(self, group: Group, bucket: Bucket, common: Any) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        updates = self._updates(group, bucket, common)
        if not decay and not self.use_nvlamb:
            torch._foreach_add_(bucket.weights, updates, alpha=-lr)
            return
        ratios = [
            torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0)
            for w_norm, u_norm in zip(
                torch._foreach_norm(bucket.weights), torch._foreach_norm(updates), strict=True
            )
        ]
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(bucket.weights, updates, alpha=-lr)

    def _updates(self, group: Group, bucket: Bucket, divisor: Any) -> list[torch.Tensor]:
        """The direction of Adam, with the weight decay in it, before the trust ratio."""
        beta1, beta2 = group["betas"]
        decay, gradients = group["weight_decay"], bucket.gradients
        means = self._kept(bucket, "exp_avg")
        if divisor is not None:
            divisor = divisor.to(gradients[0].device)
            gradients = [gradient / divisor for gradient in gradients]
        if decay and not self.adam_w_mode:
            gradients = list(torch._foreach_add(gradients, bucket.weights, alpha=decay))
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        first, _ = corrections(group, beta1, beta2)
        updates = list(torch._foreach_div(means, first))
        torch._foreach_div_(updates, self._adam_denominators(group, bucket, gradients))
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, bucket.weights, alpha=decay)
        return updates
