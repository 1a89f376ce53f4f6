"""Operations without a rule, and why plain torch's own behaviour is right for them.

A new torch adds operations: each goes into a list here or gets a rule in `casts.rules`. In-place
spellings (`add_`) go with the name without the underscore. Private names are torch's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _reasons(groups: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in groups.items() for name in names.split()}


FOLLOWS: Mapping[str, str] = MappingProxyType(
    _reasons(
        {
            "promotes by itself": (
                "abs absolute add addcdiv addcmul arctan2 atan2 copysign deg2rad diff div divide "
                "floor_divide float_power fmod frac gradient hypot kron ger outer logaddexp "
                "logaddexp2 mul multiply neg negative nextafter positive rad2deg remainder rsub "
                "sgn sign sqrt square sub subtract true_divide arctan atan cos sin sinc "
                "block_diag cat column_stack concat concatenate dstack hstack row_stack stack "
                "vstack broadcast_tensors __add__ __div__ __floordiv__ __mod__ __mul__ __radd__ "
                "__rfloordiv__ __rmod__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__ "
                "__iadd__ __ifloordiv__ __imod__ __imul__ __isub__ __itruediv__"
            ),
            "compares or orders, which needs no more bits than it is given": (
                "amax amin aminmax argmax argmin argsort bucketize ceil cummax cummin eq equal "
                "fix floor fmax fmin ge greater greater_equal gt isin kthvalue le less less_equal "
                "lt max maximum median min minimum mode msort nanmedian ne not_equal round "
                "searchsorted sort topk trunc unique unique_consecutive __eq__ __ge__ __gt__ "
                "__le__ __lt__ __ne__ __contains__"
            ),
            "its half kernel computes in float32 inside, and the result is in range": (
                "celu elu erf gelu glu hardshrink hardtanh i0 i0e leaky_relu logit mean "
                "mish nanmean ndtr expit relu relu6 selu sigmoid silu softshrink softsign tanh "
                "tanhshrink logsigmoid "
                "adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d"
            ),
            "selects values": (
                "adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d "
                "adaptive_max_pool2d_with_indices adaptive_max_pool3d "
                "adaptive_max_pool3d_with_indices max_pool1d max_pool1d_with_indices max_pool2d "
                "max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d "
                "max_unpool2d max_unpool3d argwhere gather index index_select masked_select "
                "nonzero nonzero_static select select_scatter take take_along_dim __getitem__"
            ),
            "follows its table; a cast of the table would cost more than the call": "embedding",
            "calls only functions that have a rule or follow their inputs": (
                "__rmatmul__ batch_norm embedding_bag fractional_max_pool2d "
                "fractional_max_pool2d_with_indices fractional_max_pool3d "
                "fractional_max_pool3d_with_indices group_norm instance_norm interpolate "
                "layer_norm linear_cross_entropy log_softmax lp_pool1d lp_pool2d lp_pool3d "
                "multi_head_attention_forward rms_norm softmax apply_ map_ map2_"
            ),
            "rearranges, views or copies": (
                "adjoint alias_copy as_strided as_strided_copy as_strided_scatter atleast_1d "
                "atleast_2d atleast_3d broadcast_to channel_shuffle chunk clone combinations conj "
                "conj_physical contiguous copy_ detach detach_copy diag diag_embed diagflat "
                "diagonal diagonal_copy diagonal_scatter dsplit expand expand_as expand_copy "
                "fftshift flatten flip fliplr flipud fold hsplit ifftshift lu_unpack moveaxis "
                "movedim narrow narrow_copy native_channel_shuffle nan_to_num permute "
                "permute_copy pixel_shuffle pixel_unshuffle ravel real imag repeat "
                "repeat_interleave reshape reshape_as resize resize_as resolve_conj resolve_neg "
                "roll rot90 select_copy slice_copy slice_inverse slice_scatter split split_copy "
                "split_with_sizes split_with_sizes_copy squeeze squeeze_copy sum_to_size swapaxes "
                "swapdims t t_copy tensor_split tile transpose transpose_copy tril triu unbind "
                "unbind_copy unflatten unfold unfold_copy unsafe_chunk unsafe_split "
                "unsafe_split_with_sizes unsqueeze unsqueeze_copy view view_as view_copy "
                "view_as_complex_copy view_as_real view_as_real_copy vsplit set_ module_load "
                "__deepcopy__ __reversed__"
            ),
            "makes new values, or draws them at random": (
                "alpha_dropout bernoulli binomial cauchy_ dropout dropout1d dropout2d dropout3d "
                "empty_like exponential_ feature_alpha_dropout feature_dropout geometric_ "
                "log_normal_ multinomial native_dropout normal_ one_hot ones_like poisson random_ "
                "uniform_ zero_ zeros_like"
            ),
            "converts to a dtype, a device or a layout that the user names": (
                "bfloat16 bool byte cdouble cfloat chalf char cpu cuda double float half int ipu "
                "long mtia numpy pin_memory share_memory_ short to to_dense to_mkldnn to_sparse "
                "tolist type type_as xpu item __array__ __array_wrap__ __bool__ __complex__ "
                "__dlpack__ __dlpack_device__ __float__ __index__ __int__ __long__ __nonzero__"
            ),
            "is about integers, booleans or complex numbers": (
                "all angle any bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or "
                "bitwise_right_shift bitwise_xor count_nonzero frexp gcd hash_tensor isfinite "
                "isinf isnan isneginf isposinf isreal lcm logical_and logical_not logical_or "
                "logical_xor signbit unravel_index __and__ __iand__ __ilshift__ __invert__ "
                "__ior__ __irshift__ __ixor__ __lshift__ __or__ __rand__ __rlshift__ __ror__ "
                "__rrshift__ __rshift__ __rxor__ __xor__"
            ),
            "tells of a tensor": (
                "const_data_ptr data_ptr dense_dim dim dim_order element_size get_device "
                "is_coalesced is_complex is_conj is_contiguous is_distributed is_floating_point "
                "is_inference is_neg is_nonzero is_pinned is_same_size is_set_to is_shared "
                "is_signed ndimension nelement numel size sparse_dim storage storage_offset "
                "storage_type untyped_storage sym_float sym_ite sym_max sym_min sym_not sym_sqrt "
                "sym_sum __format__ __len__ __reduce_ex__ __repr__ __setstate__"
            ),
            "is about gradients, streams or contexts": (
                "autocast backward record_stream register_hook register_post_accumulate_grad_hook "
                "requires_grad_ retain_grad"
            ),
            "works on quantized tensors": (
                "choose_qparams_optimized dequantize fbgemm_linear_fp16_weight "
                "fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight "
                "fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight "
                "fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix "
                "fused_moving_avg_obs_fake_quant int_repr q_per_channel_axis q_per_channel_scales "
                "q_per_channel_zero_points q_scale q_zero_point qscheme quantize_per_channel "
                "quantize_per_tensor quantize_per_tensor_dynamic quantized_batch_norm "
                "quantized_gru_cell quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d "
                "quantized_max_pool3d quantized_rnn_relu_cell quantized_rnn_tanh_cell"
            ),
            "works on sparse tensors, for which there are few half kernels": (
                "ccol_indices ccol_indices_copy coalesce col_indices col_indices_copy crow_indices "
                "crow_indices_copy hspmm indices indices_copy resize_as_sparse_ row_indices "
                "row_indices_copy smm sparse_mask sparse_resize_ sparse_resize_and_clear_ spmm "
                "sspaddmm values values_copy"
            ),
            "is what a kernel of one vendor is made of": (
                "batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt "
                "batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats "
                "batch_norm_update_stats miopen_batch_norm miopen_convolution "
                "miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose "
                "miopen_depthwise_convolution miopen_rnn"
            ),
        }
    )
)
"""Why an operation has no rule, by its name."""


def reason_to_follow(name: str) -> str | None:
    """Why the operation of this name, in place or not, follows its inputs; None if it does not."""
    if name in FOLLOWS:
        return FOLLOWS[name]
    return FOLLOWS.get(name[:-1]) if name.endswith("_") and not name.endswith("__") else None
