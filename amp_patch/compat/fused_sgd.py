"""SGD under the name and with the keywords of apex."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import required

from amp_patch.compat.grouped_optimizer import Bucket, Group, GroupedOptimizer
from amp_patch.errors import AmpError


class FusedSGD(GroupedOptimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD` has it.

    `lr` may be left out where every group has one. With `wd_after_momentum` the weight decay is
    added to the step and not to the gradient. `materialize_master_grads` is kept for scripts that
    read it; masters always have gradients here.

        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = FusedSGD([{"params": [weight], "lr": 0.25}], momentum=0.9)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.item()
        0.5
    """

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise AmpError(
                f"FusedSGD: nesterov=True expects momentum above 0 and no dampening, found "
                f"momentum={momentum!r} and dampening={dampening!r}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads

    def _update(self, group: Group, bucket: Bucket, common: Any) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        weights, steps = bucket.weights, bucket.gradients
        if decay and not self.wd_after_momentum:
            steps = list(torch._foreach_add(steps, weights, alpha=decay))
        if momentum:
            steps = self._with_momentum(group, bucket, steps)
        if decay and self.wd_after_momentum:
            steps = list(torch._foreach_add(steps, weights, alpha=decay))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])

    def _with_momentum(
        self, group: Group, bucket: Bucket, steps: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        momentum, fresh = group["momentum"], 1 - group["dampening"]
        is_first = [not _has_momentum(self.state[p]) for p in bucket.parameters]
        buffers = self._kept(bucket, "momentum_buffer")
        for i, buffer in enumerate(buffers):
            if is_first[i]:  # begins with the gradient itself, without dampening
                buffer.copy_(steps[i])
            else:
                buffer.mul_(momentum).add_(steps[i], alpha=fresh)
        return (
            list(torch._foreach_add(steps, buffers, alpha=momentum))
            if group["nesterov"]
            else buffers
        )


def _has_momentum(state: dict[str, Any]) -> bool:
    if state.get("momentum_buffer") is None:  # torch saves None where there was no momentum yet
        state.pop("momentum_buffer", None)
    return "momentum_buffer" in state
