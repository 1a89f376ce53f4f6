"""Adam under the name and with the keywords of apex."""

from __future__ import annotations

from typing import Any

import torch

from amp_patch.compat.grouped_optimizer import Bucket, Group, GroupedOptimizer, corrections
from amp_patch.errors import AmpError


class FusedAdam(GroupedOptimizer):
    """Adam (Kingma & Ba, ICLR 2015), or AdamW (Loshchilov & Hutter, ICLR 2019) by `adam_w_mode`.

    The arithmetic and the moments are in FP32 for half parameters.

        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = FusedAdam([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> round(weight.item(), 4)
        0.9
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if capturable or master_weights:
            raise AmpError(
                "FusedAdam: expected capturable=False and master_weights=False, found True; for "
                "graphs use torch.optim.AdamW(capturable=True), for masters opt_level='O2'"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.adam_w_mode = int(adam_w_mode)

    def _update(self, group: Group, bucket: Bucket, common: Any) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        means = self._kept(bucket, "exp_avg")
        weights, gradients = bucket.weights, bucket.gradients
        if decay and not self.adam_w_mode:
            gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        denominators = self._adam_denominators(group, bucket, gradients)
        if decay and self.adam_w_mode:
            torch._foreach_mul_(weights, 1 - lr * decay)
        first, _ = corrections(group, beta1, beta2)
        torch._foreach_addcdiv_(weights, means, denominators, -lr / first)
