"""Which operation runs in which precision. Data only: add an operation by adding its name.

The lists follow what NVIDIA's apex and torch.amp agree on; where they differ, the comment beside
the row says why it is as it is. An operation without a row follows its inputs, as plain torch does:
arithmetic, comparisons, activations and pooling promote by themselves and stay unpatched.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F


class CastRule(Enum):
    """What happens to the float16, bfloat16 and float32 tensors among an operation's arguments."""

    HALF = "cast to the half dtype"
    FLOAT = "cast to float32"
    NORM = "as FLOAT in float16; in bfloat16 the weights are cast to the input's dtype"
    PROMOTE = "cast to the widest dtype among them"
    MATCH_SELF = "cast to the dtype of the first, which the operation writes into"
    RNN_CHECK = "shown in the weights' dtype to a check that compares dtypes"
    BANNED = "as FLOAT, with a warning that says what is better"


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
_ATTRIBUTE_NAMESPACES = {id(torch._VF): "torch:_VF.", id(torch._C._nn): "torch:_C._nn."}


def _rows(owner: Any, rule: CastRule, names: str, hint: str = "") -> list[OpRule]:
    return [OpRule(owner, name, rule, hint) for name in names.split()]


# Tensor Cores and their kin work on these: nearly all of a network's arithmetic.
_GEMM = "matmul mm mv bmm addmm addmv addr addbmm baddbmm"
_CONVOLUTION = "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
_RECURRENT = "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"

# Steep functions: a small relative error, or a large argument, leaves float16's range.
_STEEP = (
    "acos acosh asin asinh atanh cosh sinh tan erfinv erfc exp exp2 expm1 log log10 log2 log1p "
    "reciprocal rsqrt pow lgamma digamma polygamma xlogy"
)
# Long sums: 65,505 ones are more than float16 holds, and 256 squared is as well.
_REDUCTION = (
    "sum nansum prod cumsum cumprod logcumsumexp logsumexp norm dist renorm std var trace "
    "softmax log_softmax"
)
# Long sums to one number. torch.amp is of two minds here; a sum over a vector belongs in FP32.
_INNER_PRODUCT = "dot vdot inner"

_LOSS = (
    "l1_loss smooth_l1_loss huber_loss mse_loss cross_entropy nll_loss poisson_nll_loss "
    "gaussian_nll_loss kl_div binary_cross_entropy_with_logits hinge_embedding_loss "
    "cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss "
    "triplet_margin_with_distance_loss ctc_loss"
)
_BANNED_HINT = (
    "the logarithms of a probability that was rounded to half precision are inaccurate; "
    "computed in FP32. use binary_cross_entropy_with_logits (BCEWithLogitsLoss) and no sigmoid"
)

OP_RULES: tuple[OpRule, ...] = (
    # -- half ------------------------------------------------------------------------------------
    *_rows(torch, CastRule.HALF, _GEMM),
    *_rows(torch.Tensor, CastRule.HALF, _GEMM),
    *_rows(torch.Tensor, CastRule.HALF, "__matmul__ __rmatmul__"),
    *_rows(torch.linalg, CastRule.HALF, "matmul multi_dot"),
    *_rows(torch, CastRule.HALF, "einsum tensordot chain_matmul"),
    *_rows(torch, CastRule.HALF, _CONVOLUTION),
    *_rows(F, CastRule.HALF, _CONVOLUTION),
    *_rows(F, CastRule.HALF, "linear bilinear scaled_dot_product_attention"),
    *_rows(torch, CastRule.HALF, "bilinear"),
    *_rows(torch, CastRule.HALF, "prelu"),
    *_rows(F, CastRule.HALF, "prelu"),
    *_rows(torch.Tensor, CastRule.HALF, "prelu"),
    *_rows(torch._VF, CastRule.HALF, _RECURRENT),
    *_rows(torch, CastRule.HALF, _RECURRENT),
    *_rows(torch.nn.RNNBase, CastRule.RNN_CHECK, "check_input"),
    # -- float32 ---------------------------------------------------------------------------------
    *_rows(torch, CastRule.FLOAT, _STEEP),
    *_rows(torch.Tensor, CastRule.FLOAT, _STEEP),
    *_rows(torch.Tensor, CastRule.FLOAT, "__pow__ __rpow__"),
    *_rows(torch, CastRule.FLOAT, _REDUCTION),
    *_rows(torch.Tensor, CastRule.FLOAT, _REDUCTION),
    *_rows(torch, CastRule.FLOAT, "std_mean var_mean cov corrcoef nuclear_norm frobenius_norm"),
    *_rows(torch.Tensor, CastRule.FLOAT, "cov corrcoef"),
    *_rows(torch, CastRule.FLOAT, _INNER_PRODUCT),
    *_rows(torch.Tensor, CastRule.FLOAT, _INNER_PRODUCT),
    *_rows(torch.linalg, CastRule.FLOAT, "vecdot norm vector_norm matrix_norm"),
    *_rows(torch, CastRule.FLOAT, "cdist pdist cosine_similarity pairwise_distance"),
    *_rows(F, CastRule.FLOAT, "pdist cosine_similarity pairwise_distance normalize"),
    *_rows(F, CastRule.FLOAT, "softmax log_softmax softmin gumbel_softmax softplus"),
    *_rows(F, CastRule.FLOAT, "local_response_norm"),
    *_rows(F, CastRule.FLOAT, _LOSS),
    *_rows(torch, CastRule.FLOAT, "ctc_loss"),
    # Coordinates with the 11 bits of a half are a quarter of a pixel off at 1,024 pixels.
    *_rows(F, CastRule.FLOAT, "grid_sample affine_grid"),
    # What F.interpolate calls. "nearest" only copies values and follows its input.
    *_rows(
        torch._C._nn,
        CastRule.FLOAT,
        "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    # The kernels keep FP32 statistics by themselves, and bfloat16 has float32's range.
    *_rows(F, CastRule.NORM, "layer_norm group_norm rms_norm"),
    *_rows(torch, CastRule.NORM, "layer_norm group_norm rms_norm"),
    *_rows(F, CastRule.BANNED, "binary_cross_entropy", _BANNED_HINT),
    # -- promote and match -----------------------------------------------------------------------
    *_rows(torch, CastRule.PROMOTE, "cross index_add index_copy index_put scatter scatter_add"),
    *_rows(torch.Tensor, CastRule.PROMOTE, "cross index_add index_copy index_put scatter"),
    *_rows(torch.Tensor, CastRule.PROMOTE, "scatter_add scatter_reduce masked_scatter"),
    *_rows(torch, CastRule.PROMOTE, "scatter_reduce masked_scatter"),
    *_rows(torch.linalg, CastRule.PROMOTE, "cross"),
    *_rows(torch.Tensor, CastRule.MATCH_SELF, "addmm_ addmv_ addr_ addbmm_ baddbmm_"),
    *_rows(torch.Tensor, CastRule.MATCH_SELF, "index_add_ index_copy_ index_put_ scatter_"),
    *_rows(torch.Tensor, CastRule.MATCH_SELF, "scatter_add_ scatter_reduce_ masked_scatter_"),
    *_rows(torch.Tensor, CastRule.MATCH_SELF, "__setitem__"),
)
