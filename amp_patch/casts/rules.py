"""Which operation runs in which precision. Data only: add an operation by adding its name.

A name stands for the operation in all its spellings: `softmax` is `torch.softmax`,
`Tensor.softmax` and `torch.special.softmax`, and `exp` is also `exp_`. A name with a dot, as
`linalg.norm`, is that one attribute of torch. The choices follow what NVIDIA's apex and
torch.amp agree on; where they differ, the comment says why it is as it is. Operations without a
rule follow their inputs, as plain torch does; `casts.follows` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch

from amp_patch.casts.spellings import is_in_place, spellings


class CastRule(Enum):
    """What happens to the float16, bfloat16 and float32 tensors among an operation's arguments.

    A given `dtype=` or `out=` is honoured by all of them. float64, complex and integer tensors
    are never cast.
    """

    HALF = "cast to the half dtype"
    FLOAT = "cast to float32"
    FLOAT_THROUGHOUT = "cast to float32, and no casts in the operations it is made of"
    NORM = "as FLOAT in float16; in bfloat16 the weights are cast to the input's dtype"
    STATISTICS = "weights and running statistics that do not fit the input are cast to float32"
    PROMOTE = "cast to the widest dtype among them, float32 if a number is beyond a half's range"
    FALLBACK = "left alone; where torch has no half kernel, computed in float32 and cast back"
    MATCH_SELF = "cast to the dtype of the first, and numbers are limited to its range"
    WRITE_BACK = "as FLOAT, and the result is written back into the first, in its dtype"
    RNN_CHECK = "shown in the weights' dtype to a check that compares dtypes"
    BANNED = "as FLOAT, with one warning that says what is better"
    REFUSED = "an AmpError if one of them is half"


IN_PLACE: Mapping[CastRule, CastRule] = MappingProxyType(
    {
        CastRule.HALF: CastRule.MATCH_SELF,
        CastRule.FLOAT: CastRule.WRITE_BACK,
        CastRule.FLOAT_THROUGHOUT: CastRule.WRITE_BACK,
        CastRule.NORM: CastRule.WRITE_BACK,
        CastRule.PROMOTE: CastRule.MATCH_SELF,
        CastRule.FALLBACK: CastRule.FALLBACK,
        CastRule.REFUSED: CastRule.REFUSED,
    }
)
"""The rule of the in-place spelling, `exp_` of `exp`: the dtype of its tensor cannot change."""


@dataclass(frozen=True, slots=True)
class OpRule:
    """One operation, reached as attribute `name` of `owner` (a module or a class)."""

    owner: Any
    name: str
    rule: CastRule
    hint: str = ""

    @property
    def qualified_name(self) -> str:
        """Where `pkgutil.resolve_name` finds the operation, as "torch:Tensor.matmul"."""
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"
        prefix = _ATTRIBUTE_NAMESPACES.get(id(self.owner), f"{self.owner.__name__}:")
        return prefix + self.name


# Namespaces that are reached as attributes of torch, since they are no importable modules.
_ATTRIBUTE_NAMESPACES = {
    id(torch._VF): "torch:_VF.",
    id(torch._C._nn): "torch:_C._nn.",
    id(torch.ops.aten): "torch:ops.aten.",
}


def expand(operations: Mapping[str, CastRule]) -> tuple[OpRule, ...]:
    """A row for each spelling of each of `operations`, in place ones included.

    An in-place spelling has the rule of `IN_PLACE` unless it is among `operations` itself.
    Operations that this torch does not have are rows of `torch`, for whoever installs them to see.
    """
    rows: dict[tuple[int, str], OpRule] = {}
    for operation, rule in operations.items():
        hint = HINTS.get(operation, "")
        if is_in_place(operation):
            rule = IN_PLACE.get(rule, rule)  # noqa: PLW2901 (what the user forces, as far as can be)
        found = [(*at, rule) for at in spellings(operation)] or [(torch, operation, rule)]
        if rule in IN_PLACE and f"{operation}_" not in operations:
            found += [(*at, IN_PLACE[rule]) for at in spellings(f"{operation}_")]
        for owner, name, its_rule in found:
            rows[id(owner), name] = OpRule(owner, name, its_rule, hint)
    return tuple(rows.values())


def table(*groups: tuple[CastRule, str]) -> dict[str, CastRule]:
    """The rule of each name in lists of names."""
    return {name: rule for rule, names in groups for name in names.split()}


def _in(namespace: str, names: str) -> str:
    return " ".join(f"{namespace}.{name}" for name in names.split())


# -- half: Tensor Cores and their kin work on these, nearly all of a network's arithmetic ----------
_GEMM = (
    "matmul mm mv bmm addmm addmv addr addbmm baddbmm linear bilinear "
    "einsum tensordot chain_matmul linalg.multi_dot grouped_mm scaled_dot_product_attention"
)
_CONVOLUTION = (
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution"
)
_RECURRENT = "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"

# -- float32: a small relative error, or a large argument, leaves float16's range ------------------
_STEEP = (
    "acos arccos acosh arccosh asin arcsin asinh arcsinh atanh arctanh cosh sinh tan erfinv erfc "
    "exp exp2 expm1 log log10 log2 log1p reciprocal rsqrt pow ldexp softplus "
    "lgamma digamma polygamma mvlgamma igamma igammac xlogy"
)
_SPECIAL = (
    "gammaln psi multigammaln gammainc gammaincc xlog1py entr erfcx i1 i1e zeta ndtri log_ndtr "
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 "
    "modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 "
    "spherical_bessel_j0 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v "
    "chebyshev_polynomial_w shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u "
    "shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w hermite_polynomial_h "
    "hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
)
# Long sums: 65,505 ones are more than float16 holds, and 256 squared is as well. torch.amp is of
# two minds about sums over vectors (dot, vecdot); the result is one number and belongs in FP32.
_REDUCTION = (
    "sum nansum prod cumsum cumprod logcumsumexp logsumexp norm dist renorm std var std_mean "
    "var_mean trace cov corrcoef nuclear_norm frobenius_norm norm_except_dim native_norm "
    "linalg.vector_norm linalg.matrix_norm dot vdot inner linalg.vecdot trapz trapezoid "
    "cumulative_trapezoid histc histogram histogramdd"
)
_SOFTMAX = "softmax log_softmax softmin gumbel_softmax"
_DISTANCE = "cdist pdist cosine_similarity pairwise_distance normalize local_response_norm"
# Half kernels are rare here, and errors grow with the condition number.
_LINALG = (
    "cholesky cholesky_inverse cholesky_solve inverse pinverse qr orgqr ormqr geqrf svd lu "
    "lu_solve triangular_solve det logdet slogdet matrix_exp matrix_power "
) + _in(
    "linalg",
    "cholesky_ex cond eig eigh eigvals eigvalsh householder_product inv inv_ex ldl_factor "
    "ldl_factor_ex ldl_solve lstsq lu_factor lu_factor_ex matrix_rank pinv solve solve_ex "
    "solve_triangular svdvals tensorinv tensorsolve vander",
)
_FOURIER = "stft istft complex polar view_as_complex " + _in(
    "fft",
    "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn "
    "hfft ihfft hfft2 ihfft2 hfftn ihfftn",
)
# Coordinates with the 11 bits of a half are a quarter of a pixel off at 1,024 pixels. F.interpolate
# calls the upsamplings; "nearest" only copies values and follows its input.
_SAMPLING = (
    "grid_sample grid_sampler grid_sampler_2d grid_sampler_3d affine_grid affine_grid_generator "
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa ops.aten._upsample_bilinear2d_aa "
    "quantile nanquantile"
)
# Cheap, and users look at the value.
_LOSS = (
    "l1_loss smooth_l1_loss huber_loss mse_loss cross_entropy nll_loss poisson_nll_loss "
    "gaussian_nll_loss kl_div binary_cross_entropy_with_logits hinge_embedding_loss "
    "cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss "
    "triplet_margin_with_distance_loss ctc_loss"
)
# Written in Python, of matrix products: half inside them would undo what FLOAT is for.
_DECOMPOSITION = "svd_lowrank pca_lowrank lobpcg"
# The kernels keep FP32 statistics by themselves, and bfloat16 has float32's range.
_NORM = "layer_norm group_norm rms_norm native_layer_norm native_group_norm"
_STATISTICS = (
    "batch_norm instance_norm native_batch_norm _native_batch_norm_legit "
    "ops.aten._batch_norm_with_update"
)

# -- promote: plain torch refuses mixed dtypes, or a mask value of -1e9 in float16 -----------------
_SCATTER = (
    "index_add index_copy index_put index_reduce scatter scatter_add scatter_reduce "
    "masked_scatter put _unsafe_masked_index_put_accumulate"
)
_FILL = "masked_fill index_fill where full_like Tensor.new_full pad constant_pad_nd"
_MIXED = (
    "cross lerp heaviside meshgrid cartesian_prod allclose isclose _chunk_cat "
    "sparse.mm sparse.addmm ops.aten._softmax_backward_data"
)
_SELF = "fill_ fill_diagonal_ Tensor.__setitem__ embedding_bag"
_FALLBACK = (
    "clamp clip clamp_min clamp_max threshold rrelu avg_pool3d adaptive_avg_pool3d "
    "_C._nn.fractional_max_pool2d _C._nn.fractional_max_pool3d "
    "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine"
)
BCE_HINT = (
    "the logarithms of a probability that was rounded to half precision are inaccurate; "
    "use binary_cross_entropy_with_logits (BCEWithLogitsLoss) and no sigmoid"
)
HINTS: Mapping[str, str] = MappingProxyType({"binary_cross_entropy": BCE_HINT})

SAFEGUARDS: Mapping[str, CastRule] = MappingProxyType(
    table(
        (CastRule.RNN_CHECK, "nn.RNNBase.check_input"),
        (CastRule.STATISTICS, _STATISTICS),
        (CastRule.PROMOTE, f"{_SCATTER} {_FILL} {_MIXED}"),
        (CastRule.MATCH_SELF, _SELF),
        (CastRule.FALLBACK, _FALLBACK),
    )
)
"""What lowers or raises no precision by choice, and only lets run what plain torch refuses."""

DEFAULT_OPERATIONS: Mapping[str, CastRule] = MappingProxyType(
    table(
        (CastRule.HALF, f"{_GEMM} {_CONVOLUTION} prelu"),
        (CastRule.HALF, f"{_RECURRENT} {_in('_VF', _RECURRENT)}"),
        (CastRule.FLOAT, f"{_STEEP} {_SPECIAL} {_REDUCTION} {_SOFTMAX} {_DISTANCE}"),
        (CastRule.FLOAT, f"{_LINALG} {_FOURIER} {_SAMPLING} {_LOSS} sparse.sampled_addmm"),
        (CastRule.FLOAT_THROUGHOUT, _DECOMPOSITION),
        (CastRule.NORM, _NORM),
        (CastRule.BANNED, "binary_cross_entropy"),
    )
    | dict(SAFEGUARDS)
)
"""The rule of each operation by its name: the preset "default"."""

OP_RULES: tuple[OpRule, ...] = expand(DEFAULT_OPERATIONS)
"""The rule of each spelling of each operation: the preset "default"."""
