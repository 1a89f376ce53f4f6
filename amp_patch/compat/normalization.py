"""Layer and RMS normalization under the names of apex, over torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from amp_patch.errors import AmpError

Shape = Any


def fused_layer_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer normalization without weights, in the dtype of `input`."""
    return F.layer_norm(input, _as_shape(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer normalization in the dtype of `input`, whatever that of the weights is.

    >>> fused_layer_norm_affine(torch.ones(2, 4).half(), torch.ones(4), torch.zeros(4), 4).dtype
    torch.float16
    """
    shape = _as_shape(normalized_shape)
    if weight is None or weight.dtype is input.dtype:
        return F.layer_norm(input, shape, weight, bias, eps)
    wide = F.layer_norm(input.float(), shape, *_floats(weight, bias), eps)
    return wide.to(input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer normalization in the dtype of the weights, whatever that of `input` is.

    >>> weight = torch.ones(4)
    >>> mixed_dtype_fused_layer_norm_affine(torch.ones(2, 4).half(), weight, weight, 4).dtype
    torch.float32
    """
    return F.layer_norm(input.to(weight.dtype), _as_shape(normalized_shape), weight, bias, eps)


def fused_rms_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS normalization without a weight, in the dtype of `input`."""
    return F.rms_norm(input, _as_shape(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS normalization in the dtype of `input`, whatever that of the weight is."""
    shape = _as_shape(normalized_shape)
    if weight is None or weight.dtype is input.dtype:
        return F.rms_norm(input, shape, weight, eps)
    return F.rms_norm(input.float(), shape, weight.float(), eps).to(input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS normalization in the dtype of the weight, whatever that of `input` is."""
    return F.rms_norm(input.to(weight.dtype), _as_shape(normalized_shape), weight, eps)


def manual_rms_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Shape,
    weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """RMS normalization with its arguments in another order."""
    return fused_rms_norm_affine(input, weight, normalized_shape, eps)


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, whose result has the dtype of its input.

    >>> FusedLayerNorm(4)(torch.ones(2, 4)).sum().item()
    0.0
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer normalization whose result has the dtype of its weights."""

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        _refuse_without_weights(self, kwargs)
        super().__init__(normalized_shape, eps, **kwargs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, whose result has the dtype of its input.

    >>> FusedRMSNorm(4)(torch.ones(2, 4)).sum().round().item()
    8.0
    """

    eps: float

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS normalization whose result has the dtype of its weight."""

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        _refuse_without_weights(self, kwargs)
        super().__init__(normalized_shape, eps, **kwargs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps
        )


def _refuse_without_weights(module: nn.Module, kwargs: dict[str, Any]) -> None:
    if not kwargs.get("elementwise_affine", True):
        raise AmpError(
            f"{type(module).__name__}: expected elementwise_affine=True, since the weights say in "
            "which dtype the result is, found False"
        )


def _as_shape(normalized_shape: Shape) -> list[int]:
    if isinstance(normalized_shape, int):
        return [normalized_shape]
    return list(normalized_shape)


def _floats(
    weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (
        None if weight is None else weight.float(),
        None if bias is None else bias.float(),
    )
