"""NovoGrad under the name and with the keywords of apex."""

from __future__ import annotations

import math
from typing import Any

import torch

from amp_patch.compat.grouped_optimizer import Bucket, Group, GroupedOptimizer, corrections
from amp_patch.errors import AmpError
from amp_patch.policy import HALF_DTYPES


class FusedNovoGrad(GroupedOptimizer):
    """NovoGrad (Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments",
    2019): the second moment is one number for each parameter tensor, the running norm of its
    gradients, the Euclidean (`norm_type=2`) or the largest absolute value (0).

    With `reg_inside_moment` the weight decay is part of the first moment. With `init_zero` the norm
    begins at zero, else at that of the first gradient.

        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = FusedNovoGrad([weight], lr=0.5, bias_correction=False)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> round(weight.item(), 4)
        0.95
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise AmpError(f"FusedNovoGrad: expected norm_type 2 or 0, found {norm_type!r}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.moment_mode = 0 if reg_inside_moment else 1

    def _update(self, group: Group, bucket: Bucket, common: Any) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        fresh = 1 - beta1 if group["grad_averaging"] else 1.0
        first, second = corrections(group, beta1, beta2)
        norms = self._norms(group, bucket, beta2)
        denominators = [norm / math.sqrt(second) + group["eps"] for norm in norms]
        means, weights = self._kept(bucket, "exp_avg"), bucket.weights
        torch._foreach_mul_(means, beta1)
        if self.moment_mode:
            torch._foreach_add_(means, bucket.gradients, alpha=fresh)
            steps = list(torch._foreach_div(torch._foreach_div(means, first), denominators))
            if decay:
                torch._foreach_add_(steps, weights, alpha=decay)
        else:
            scaled = list(torch._foreach_div(bucket.gradients, denominators))
            if decay:
                torch._foreach_add_(scaled, weights, alpha=decay)
            torch._foreach_add_(means, scaled, alpha=fresh)
            steps = list(torch._foreach_div(means, first))
        torch._foreach_add_(weights, steps, alpha=-lr)

    def _norms(self, group: Group, bucket: Bucket, beta2: float) -> list[torch.Tensor]:
        """The running norms, with those of the present gradients taken in."""
        is_largest = group["norm_type"] == 0
        order = math.inf if is_largest else 2
        norms = []
        for parameter, now in zip(
            bucket.parameters, torch._foreach_norm(bucket.gradients, order), strict=True
        ):
            state = self.state[parameter]
            if "exp_avg_sq" not in state:
                state["exp_avg_sq"] = torch.zeros_like(now) if group["init_zero"] else now.clone()
            old = state["exp_avg_sq"].to(now.dtype)
            if is_largest:
                norm = beta2 * old + (1 - beta2) * now
            else:
                norm = (beta2 * old.square() + (1 - beta2) * now.square()).sqrt()
            state["exp_avg_sq"] = norm
            norms.append(norm)
        return norms

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Old files have the norms in the groups: those of half parameters, then of the others."""
        super().__setstate__(state)
        for group in self.param_groups:
            for norms, is_half in zip(group.pop("exp_avg_sq", ()), (True, False), strict=False):
                owners = [p for p in group["params"] if (p.dtype in HALF_DTYPES) is is_half]
                for parameter, norm in zip(owners, () if norms is None else norms, strict=False):
                    self.state[parameter]["exp_avg_sq"] = norm.to(parameter.device)
