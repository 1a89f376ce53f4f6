"""Presets of cast rules, what a user adds to one of them, and the rules in force as a table."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from amp_patch.casts.rules import (
    DEFAULT_OPERATIONS,
    OP_RULES,
    SAFEGUARDS,
    CastRule,
    OpRule,
    expand,
    table,
)
from amp_patch.casts.spellings import operation_name
from amp_patch.errors import AmpError

_CONVOLUTION = "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
_CELLS = "_VF.lstm_cell _VF.gru_cell _VF.rnn_tanh_cell _VF.rnn_relu_cell"
_SEQUENCES = "_VF.lstm _VF.gru _VF.rnn_tanh _VF.rnn_relu"
_LOSSES_IN_ALL = (
    "l1_loss smooth_l1_loss mse_loss nll_loss poisson_nll_loss kl_div hinge_embedding_loss "
    "cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits"
)
_UPSAMPLE = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
_STEEP = "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow"

# The lists of NVIDIA's apex before it was retired, for a CUDA build of 9.1 or later. Arithmetic and
# comparisons, which apex promotes, promote by themselves today.
_APEX: Mapping[str, CastRule] = table(
    (CastRule.HALF, f"{_CONVOLUTION} linear prelu addmm addmv addr matmul mm mv"),
    (CastRule.HALF, f"addbmm baddbmm bmm {_CELLS} {_SEQUENCES}"),
    (CastRule.FLOAT, f"{_STEEP} cumprod cumsum dist norm prod std sum var renorm"),
    (CastRule.FLOAT, "interpolate grid_sample softplus softmin log_softmax softmax gelu"),
    (CastRule.FLOAT, "layer_norm group_norm local_response_norm normalize cosine_similarity"),
    (CastRule.FLOAT, f"{_LOSSES_IN_ALL} cross_entropy multilabel_soft_margin_loss ctc_loss"),
    (CastRule.FLOAT, "Tensor.cpu"),
    (CastRule.PROMOTE, "addcdiv addcmul atan2 cross bilinear dot cat stack"),
    (CastRule.REFUSED, "binary_cross_entropy"),
    (
        CastRule.REFUSED,
        "acos_ asin_ cosh_ erfinv_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_",
    ),
    (CastRule.REFUSED, "sinh_ tan_ pow_ cumprod_ cumsum_ renorm_"),
)
# torch 2.13, torch/csrc/autocast_mode.h: the names that a Python program can reach.
_CUDA: Mapping[str, CastRule] = table(
    (CastRule.HALF, f"{_CONVOLUTION} convolution prelu addmm addmv addr matmul einsum mm mv"),
    (CastRule.HALF, "linalg.vecdot linear addbmm baddbmm bmm chain_matmul linalg.multi_dot"),
    (CastRule.HALF, f"{_CELLS} {_SEQUENCES} scaled_dot_product_attention"),
    (CastRule.FLOAT, f"{_STEEP} log1p softplus layer_norm native_layer_norm rms_norm group_norm"),
    (CastRule.FLOAT, f"frobenius_norm nuclear_norm cosine_similarity {_LOSSES_IN_ALL} huber_loss"),
    (CastRule.FLOAT, f"dist pdist cdist renorm logsumexp {_UPSAMPLE}"),
    (CastRule.FLOAT, "prod softmax log_softmax cumprod cumsum sum norm"),
    (CastRule.FLOAT, "linalg.vector_norm linalg.matrix_norm"),
    (CastRule.FLOAT, "cross_entropy"),  # made of log_softmax and nll_loss, out of Python's sight
    (CastRule.PROMOTE, "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put"),
    (CastRule.PROMOTE, "tensordot scatter_add"),
    (CastRule.REFUSED, "binary_cross_entropy"),
)
_CPU: Mapping[str, CastRule] = table(
    (CastRule.HALF, f"{_CONVOLUTION} bmm mm linalg.vecdot baddbmm addmm _addmm_activation addbmm"),
    (CastRule.HALF, "linear matmul prelu scaled_dot_product_attention _VF.lstm"),
    (CastRule.PROMOTE, "cat stack index_copy"),
    (CastRule.FLOAT, "avg_pool3d adaptive_avg_pool3d _C._nn.adaptive_max_pool3d max_pool3d"),
    (CastRule.FLOAT, "_C._nn.max_unpool2d _C._nn.max_unpool3d _C._nn.fractional_max_pool2d"),
    (
        CastRule.FLOAT,
        "_C._nn.fractional_max_pool3d _C._nn.reflection_pad1d _C._nn.reflection_pad2d",
    ),
    (CastRule.FLOAT, "_C._nn.replication_pad1d _C._nn.replication_pad2d _C._nn.replication_pad3d"),
    (CastRule.FLOAT, "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d"),
    (CastRule.FLOAT, f"{_LOSSES_IN_ALL} binary_cross_entropy huber_loss cross_entropy ctc_loss"),
    (CastRule.FLOAT, "prod trace quantile nanquantile cdist polar view_as_complex stft"),
    (CastRule.FLOAT, "fft.fft fft.ifft fft.fft2 fft.ifft2 fft.fftn fft.ifftn fft.rfft fft.irfft"),
    (CastRule.FLOAT, "fft.rfft2 fft.irfft2 fft.rfftn fft.irfftn fft.hfft fft.ihfft"),
    (CastRule.FLOAT, "cholesky cholesky_inverse cholesky_solve inverse pinverse lu_solve"),
    (CastRule.FLOAT, "_lu_with_info qr orgqr ormqr geqrf svd triangular_solve"),
    (CastRule.FLOAT, "fake_quantize_per_tensor_affine linalg.cholesky_ex linalg.cond linalg.eig"),
    (CastRule.FLOAT, "linalg.eigh linalg.eigvals linalg.eigvalsh linalg.householder_product"),
    (CastRule.FLOAT, "linalg.inv linalg.inv_ex linalg.lstsq linalg.matrix_rank linalg.solve"),
    (CastRule.FLOAT, "linalg.svdvals linalg.tensorinv linalg.tensorsolve"),
)

PRESETS: Mapping[str, Mapping[str, CastRule]] = MappingProxyType(
    {
        "default": DEFAULT_OPERATIONS,
        "apex-2019": {**SAFEGUARDS, **_APEX},
        "torch-cuda": {**SAFEGUARDS, **_CUDA},
        "torch-cpu": {**SAFEGUARDS, **_CPU},
    }
)
"""The rule of each operation, by the name of the preset. The others follow their inputs."""

REACHED_THROUGH: Mapping[str, str] = MappingProxyType(
    {
        "_convolution": "conv2d",
        "cudnn_convolution": "conv2d",
        "cudnn_convolution_transpose": "conv_transpose2d",
        "_thnn_fused_lstm_cell": "_VF.lstm_cell",
        "_thnn_fused_gru_cell": "_VF.gru_cell",
        "lstm_cell": "_VF.lstm_cell",
        "gru_cell": "_VF.gru_cell",
        "rnn_tanh_cell": "_VF.rnn_tanh_cell",
        "rnn_relu_cell": "_VF.rnn_relu_cell",
        "mkldnn_rnn_layer": "_VF.lstm",
        "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
        "cross_entropy_loss": "cross_entropy",
        "nll_loss2d": "nll_loss",
        "multilabel_margin_loss_forward": "multilabel_margin_loss",
        "_native_multi_head_attention": "scaled_dot_product_attention",
    }
)
"""Operations of torch's dispatcher that no Python name leads to, and the one that calls them."""

_HALF_ONLY: Mapping[CastRule, CastRule] = MappingProxyType(
    {
        CastRule.FLOAT: CastRule.FALLBACK,
        CastRule.FLOAT_THROUGHOUT: CastRule.FALLBACK,
        CastRule.NORM: CastRule.FALLBACK,
        CastRule.BANNED: CastRule.FALLBACK,
    }
)

Operation = str | Callable[..., Any]


def resolve_rules(
    preset: str = "default",
    *,
    half: Iterable[Operation] = (),
    float: Iterable[Operation] = (),  # noqa: A002 (the dtype, as in `torch.Tensor.float`)
    leave: Iterable[Operation] = (),
    half_only: bool = False,
) -> tuple[OpRule, ...]:
    """The rules of `preset` with the user's additions, a row for each spelling of each operation.

    Args:
        preset: one of `PRESETS`.
        half: operations to force to the half dtype, as "torch.matmul", "Tensor.exp",
            "torch.nn.functional.gelu" or the function itself. All spellings of one are meant.
        float: operations to force to float32.
        leave: operations to leave alone: they follow their inputs.
        half_only: no operation is cast to float32 for the sake of precision. Those that the preset
            would cast run as they come, and in float32 only where torch has no half kernel.

    Raises AmpError, for all that is wrong at once.

        >>> import torch
        >>> rules = resolve_rules("torch-cpu", float=["torch.softmax"], leave=[torch.prod])
        >>> [row.rule.name for row in rules if row.qualified_name == "torch:Tensor.softmax"]
        ['FLOAT']
    """
    if preset not in PRESETS:
        near = difflib.get_close_matches(str(preset), PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "take one of them"
        raise AmpError(f"preset: expected one of {', '.join(PRESETS)}, found {preset!r}; {hint}")
    names = _named({"half": half, "float": float, "leave": leave})
    if preset == "default" and not (any(names.values()) or half_only):
        return OP_RULES
    operations = PRESETS[preset]
    if half_only:
        operations = {name: _HALF_ONLY.get(rule, rule) for name, rule in operations.items()}
    rows = {(id(row.owner), row.name): row for row in expand(operations)}
    for names_of_one, rule in ((names["half"], CastRule.HALF), (names["float"], CastRule.FLOAT)):
        forced = expand(dict.fromkeys(names_of_one, rule))
        rows |= {(id(row.owner), row.name): row for row in forced}
    for row in expand(dict.fromkeys(names["leave"], CastRule.HALF)):
        rows.pop((id(row.owner), row.name), None)
    return tuple(rows.values())


def rules_table(rules: Iterable[OpRule] = OP_RULES) -> str:
    """`rules` as text to print: a paragraph for each `CastRule`, a line for each namespace.

    >>> print(rules_table(resolve_rules(half_only=True)[:3]))
    HALF: cast to the half dtype
      torch: matmul
      torch.Tensor: matmul
      torch.linalg: matmul
    """
    found: dict[CastRule, dict[str, list[str]]] = {}
    for row in rules:
        path, _, name = row.qualified_name.replace(":", ".").rpartition(".")
        found.setdefault(row.rule, {}).setdefault(path, []).append(name)
    lines = []
    for rule in (rule for rule in CastRule if rule in found):
        lines.append(f"{rule.name}: {rule.value}")
        for path, names in found[rule].items():
            text = f"{path}: {' '.join(names)}"
            lines += textwrap.wrap(text, 98, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _named(chosen: Mapping[str, Iterable[Operation]]) -> dict[str, list[str]]:
    """The names of the operations in each list; AmpError for what is none, or is in two lists."""
    wrong = []
    names: dict[str, list[str]] = {}
    for keyword, operations in chosen.items():
        if isinstance(operations, str) or not isinstance(operations, Iterable):
            wrong.append(f"{keyword}: expected a list of operations, found {operations!r}")
            continue
        found = {repr(operation): operation_name(operation, _DOTTED) for operation in operations}
        names[keyword] = [name for name in found.values() if name is not None]
        wrong += [
            f"{keyword}: expected operations of torch, as 'torch.matmul', 'Tensor.exp' or the "
            f"function itself, found {given}; for functions of your own there are "
            "half_function and float_function"
            for given, name in found.items()
            if name is None
        ]
    for name in sorted({name for one in names.values() for name in one}):
        keywords = [keyword for keyword, one in names.items() if name in one]
        if len(keywords) > 1:
            wrong.append(f"{name!r} is in {' and in '.join(keywords)}; leave it in one of them")
    if wrong:
        raise AmpError("; ".join(wrong))
    return names


_DOTTED = frozenset(name for preset in PRESETS.values() for name in preset if "." in name)
