"""LARC: a learning rate of its own for each layer, around any optimizer."""

from __future__ import annotations

from typing import Any

import torch


class LARC:
    """Layer-wise adaptive rate control around `optimizer` (You et al., "Large Batch Training of
    Convolutional Networks", 2017).

    The rate of a parameter is `trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`. With
    `clip` the optimizer's own rate is its upper bound; without, the optimizer's own rate is
    multiplied by it. Parameters whose weights or gradients are all zero are left to the optimizer.

        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LARC(torch.optim.SGD([weight], lr=0.1), trust_coefficient=0.001)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> round(5.0 - weight.norm().item(), 4)
        0.005
    """

    def __init__(
        self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def state(self) -> Any:
        """That of the optimizer inside."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside."""
        return self.optim.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside."""
        return self.optim.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """That of the optimizer inside."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """That of the optimizer inside."""
        self.optim.add_param_group(param_group)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Scale the gradients, weight decay taken in, and let the optimizer step without decay."""
        groups = self.optim.param_groups
        decays = [group.get("weight_decay") for group in groups]
        try:
            for group, decay in zip(groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = 0
                self._adapt_gradients(group, decay or 0)
            return self.optim.step(*args, **kwargs)
        finally:
            for group, decay in zip(groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay

    @torch.no_grad()
    def _adapt_gradients(self, group: dict[str, Any], decay: float) -> None:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            weight_norm = torch.linalg.vector_norm(parameter, dtype=_wide(parameter))
            gradient_norm = torch.linalg.vector_norm(gradient, dtype=_wide(gradient))
            rate = self.trust_coefficient * weight_norm
            rate = rate / (gradient_norm + decay * weight_norm + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            is_adapted = (weight_norm != 0) & (gradient_norm != 0)
            adapted = (gradient.to(rate.dtype) + decay * parameter.to(rate.dtype)) * rate
            gradient.copy_(torch.where(is_adapted, adapted, gradient.to(rate.dtype)))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
