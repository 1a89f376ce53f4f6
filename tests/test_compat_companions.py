"""The companions that are thin faces over torch: normalization, losses, clipping, multi-tensor."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from amp_patch import AmpError
from amp_patch.compat.cross_entropy import SoftmaxCrossEntropyLoss
from amp_patch.compat.installer import install_as_apex
from amp_patch.compat.multi_tensor import multi_tensor_applier


@pytest.fixture
def normalization() -> Iterator[ModuleType]:
    undo = install_as_apex()
    yield importlib.import_module("apex.normalization")
    undo()


def oracle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Layer normalization, or RMS normalization without a bias, in FP64."""
    x, weight = x.double(), weight.double()
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    normal = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return normal * weight + (0 if bias is None else bias.double())


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_mixed", [False, True], ids=["input's dtype", "weights' dtype"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_normalization_has_the_dtype_that_its_name_says(
    normalization: ModuleType,
    kind: str,
    is_mixed: bool,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> None:
    module = getattr(normalization, f"{'Mixed' if is_mixed else ''}Fused{kind}")(6)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 1.5, 6))
    module.to(weight_dtype)
    x = torch.randn(3, 6).to(dtype)
    result = module(x)
    assert result.dtype is (weight_dtype if is_mixed else dtype)
    expected = oracle(x, module.weight, getattr(module, "bias", None))
    tolerance = 1e-5 if {dtype, weight_dtype} == {torch.float32} else 5e-3  # half an ulp near 2
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_functional_forms_agree_with_the_modules(normalization: ModuleType) -> None:
    x, weight, bias = torch.randn(3, 6), torch.rand(6), torch.rand(6)
    affine = normalization.fused_layer_norm_affine(x, weight, bias, (6,), 1e-5)
    torch.testing.assert_close(affine.double(), oracle(x, weight, bias))
    mixed = normalization.mixed_dtype_fused_layer_norm_affine(x.half(), weight, bias, (6,))
    assert mixed.dtype is torch.float32
    rms = normalization.fused_rms_norm_affine(x, weight, 6, 1e-5)
    torch.testing.assert_close(rms.double(), oracle(x, weight, None))
    assert torch.equal(normalization.manual_rms_norm(x, 6, weight, 1e-5), rms)
    assert normalization.fused_layer_norm.fused_layer_norm(x, 6).mean().abs() < 1e-6
    assert normalization.fused_rms_norm(x.half(), 6).dtype is torch.float16
    assert normalization.mixed_dtype_fused_rms_norm_affine(x.half(), weight, 6).dtype == x.dtype


def test_mixed_normalization_needs_weights(normalization: ModuleType) -> None:
    for name in ("MixedFusedLayerNorm", "MixedFusedRMSNorm"):
        with pytest.raises(AmpError, match="elementwise_affine=True"):
            getattr(normalization, name)(4, elementwise_affine=False)
    plain = normalization.FusedLayerNorm(4, elementwise_affine=False)
    assert plain(torch.ones(1, 4)).sum() == 0


@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_zero_for_padding(smoothing: float, half_to_float: bool) -> None:
    logits, labels = torch.randn(4, 5).half(), torch.tensor([1, 0, 4, 0])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 0, half_to_float)
    assert losses.dtype is (torch.float32 if half_to_float else torch.float16)
    logs = F.log_softmax(logits.double(), -1)
    expected = -(1 - smoothing) * logs.gather(1, labels[:, None])[:, 0] - smoothing * logs.mean(1)
    expected[labels == 0] = 0
    torch.testing.assert_close(losses.double(), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("padding", [-1, -100, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_of_the_cross_entropy_need_not_be_a_class(padding: int, smoothing: float) -> None:
    logits = torch.randn(3, 4, dtype=torch.float64).float().requires_grad_()
    labels = torch.tensor([1, padding, 0])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding)
    kept = logits.detach().double()[[0, 2]]
    logs = F.log_softmax(kept, -1)
    expected = -(1 - smoothing) * logs[[0, 1], [1, 0]] - smoothing * logs.mean(1)
    assert losses[1] == 0
    torch.testing.assert_close(losses[[0, 2]].double(), expected, rtol=1e-5, atol=1e-6)
    losses.sum().backward()
    assert not logits.grad[1].any()
    target = F.one_hot(torch.tensor([1, 0]), 4) * (1 - smoothing) + smoothing / 4
    torch.testing.assert_close(
        logits.grad[[0, 2]].double(), logs.exp() - target, rtol=1e-5, atol=1e-6
    )


def test_applier_has_no_kernels_and_calls_functions_of_the_user() -> None:
    assert not multi_tensor_applier.available
    with pytest.raises(AmpError, match="_foreach_"):
        multi_tensor_applier(None, None, [])
    calls: list[object] = []
    multi_tensor_applier(lambda *args: calls.append(args), "flag", [[1]], 2.0)
    assert calls == [(2048 * 32, "flag", [[1]], 2.0)]


def test_small_names_do_their_work() -> None:
    undo = install_as_apex()
    clip = importlib.import_module("apex.contrib.clip_grad").clip_grad_norm_
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert clip([weight], 1.0).item() == 5.0
    importlib.import_module("apex.pyprof.nvtx").init()
    assert importlib.import_module("apex.amp.__version__").VERSION == (0, 1, 0)
    undo()
