"""What the optimizers of apex share: grouped arithmetic in FP32, and their layout of state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from amp_patch.errors import AmpError
from amp_patch.policy import HALF_DTYPES

Group = dict[str, Any]


class Bucket(NamedTuple):
    """Parameters of one group, device and dtype that have a gradient.

    `weights` and `gradients` are in FP32 where the parameters are half, else they are the
    parameters and gradients themselves.
    """

    parameters: list[torch.Tensor]
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]


class GroupedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` is a few grouped calls, and whose step count is in its groups.

    Subclasses say in `_update` what happens to one bucket. Sparse gradients are refused.
    """

    computes_in_fp32 = True  # half parameters too

    def __init__(self, params: Any, defaults: Group, *, set_grad_none: bool) -> None:
        if defaults.pop("amsgrad", False):
            raise AmpError(
                f"{type(self).__name__}: expected amsgrad=False, found True; use torch.optim.Adam"
            )
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: to None if `set_grad_none`, or the argument, says so."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **retired: Any) -> Any:
        """Update the parameters. Returns the loss of `closure`, or None."""
        if any(value is not None for value in retired.values()):
            raise AmpError(
                f"{type(self).__name__}.step: expected a closure at most, found "
                f"{', '.join(sorted(retired))}; gradients are taken from the parameters, and "
                "scale_loss unscales them"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, bucket) for group in self.param_groups for bucket in _buckets(group)]
        common = self._common([bucket for _, bucket in work])
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for group, bucket in work:
            self._update(group, bucket, common)
            if bucket.weights is not bucket.parameters:
                torch._foreach_copy_(bucket.parameters, bucket.weights)
        return loss

    def _common(self, buckets: Sequence[Bucket]) -> Any:
        """What all updates of one step share."""
        return None

    def _update(self, group: Group, bucket: Bucket, common: Any) -> None:
        """Update `bucket.weights` in place."""
        raise NotImplementedError

    def _kept(self, bucket: Bucket, name: str) -> list[torch.Tensor]:
        """The state `name` of each parameter, zeros at first, in the dtype of the arithmetic."""
        found = []
        for parameter, weight in zip(bucket.parameters, bucket.weights, strict=True):
            state = self.state[parameter]
            if name not in state:
                state[name] = torch.zeros_like(weight)
            elif state[name].dtype is not weight.dtype:  # a state dict was loaded
                state[name] = state[name].to(weight.dtype)
            found.append(state[name])
        return found

    def _adam_denominators(
        self, group: Group, bucket: Bucket, gradients: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The square roots of the second moments, with the squares of `gradients` taken in."""
        beta1, beta2 = group["betas"]
        squares = self._kept(bucket, "exp_avg_sq")
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = list(torch._foreach_sqrt(squares))
        _, second = corrections(group, beta1, beta2)
        torch._foreach_div_(denominators, math.sqrt(second))
        torch._foreach_add_(denominators, group["eps"])
        return denominators

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state of any age: step counts beside the moments go to their group."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            steps = [
                int(entry.pop("step"))
                for entry in (self.state.get(p, {}) for p in group["params"])
                if "step" in entry
            ]
            if steps:
                group["step"] = max(steps)


def corrections(group: Mapping[str, Any], beta1: float, beta2: float) -> tuple[float, float]:
    """By what the moments are divided for having begun at zero (Kingma & Ba 2015, section 3)."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    step: int = group["step"]
    return 1.0 - beta1**step, 1.0 - beta2**step


def _buckets(group: Group) -> list[Bucket]:
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        if parameter.grad.layout is not torch.strided:
            raise AmpError(
                "step: expected dense gradients, found a sparse one; use torch.optim.SparseAdam"
            )
        found[parameter.device, parameter.dtype].append(parameter)
    return [_bucket(parameters, dtype) for (_, dtype), parameters in found.items()]


def _bucket(parameters: list[torch.Tensor], dtype: torch.dtype) -> Bucket:
    is_half = dtype in HALF_DTYPES
    weights = [parameter.float() for parameter in parameters] if is_half else parameters
    gradients = _in_dtype((p.grad for p in parameters), weights[0].dtype)
    return Bucket(parameters, weights, gradients)


def _in_dtype(gradients: Iterable[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
    return [gradient.to(dtype) for gradient in gradients if gradient is not None]
