"""Adagrad under the name and with the keywords of apex."""

from __future__ import annotations

from typing import Any

import torch

from amp_patch.compat.grouped_optimizer import Bucket, Group, GroupedOptimizer


class FusedAdagrad(GroupedOptimizer):
    """Adagrad (Duchi et al., JMLR 2011), its weight decay decoupled by `adagrad_w_mode`.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = FusedAdagrad([weight], lr=0.25)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> weight.item()
    0.75
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.adagrad_w_mode = int(adagrad_w_mode)

    def _update(self, group: Group, bucket: Bucket, common: Any) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        weights, gradients = bucket.weights, bucket.gradients
        if decay and not self.adagrad_w_mode:
            gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
        sums = self._kept(bucket, "sum")
        torch._foreach_addcmul_(sums, gradients, gradients)
        denominators = torch._foreach_sqrt(sums)
        torch._foreach_add_(denominators, group["eps"])
        if decay and self.adagrad_w_mode:
            torch._foreach_mul_(weights, 1 - lr * decay)
        torch._foreach_addcdiv_(weights, gradients, denominators, -lr)
