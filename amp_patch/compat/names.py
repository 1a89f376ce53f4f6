"""Which names the modules of apex have here. Data only: add a name by adding a row.

Each row is where the name stands, as `pkgutil.resolve_name` takes it; None is the module itself of
that name, a row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Rows = Mapping[str, str]


def _of(module: str, names: str) -> dict[str, str]:
    """Names that are the same in a module of this package, "old=new" where they are not."""
    pairs = (name.partition("=") for name in names.split())
    return {old: f"amp_patch.{module}:{new or old}" for old, _, new in pairs}


_FRONTEND = _of("compat.frontend", "initialize state_dict load_state_dict")
_HANDLE = {
    **_of("compat.frontend", "scale_loss"),
    **_of("compat.handle", "AmpHandle NoOpHandle"),
    **_of("training", "disable_casts"),
}
_AMP = {
    **_of("compat.registrations", "half_function float_function promote_function"),
    **_of("compat.registrations", "register_half_function register_float_function"),
    **_of("compat.registrations", "register_promote_function"),
    **_of("compat.frontend", "init"),
}
_STATE = {
    **_of("compat.amp_state", "_amp_state=amp_state AmpState maybe_print warn_or_err"),
    **_of("training", "master_params"),
}
_OVERRIDES = "MODULE FP16_FUNCS FP32_FUNCS"
_CASTS = "CASTS SEQUENCE_CASTS"


def _lists(which: str, names: str) -> dict[str, str]:
    return {name: f"amp_patch.compat.lists:{which}.{name}" for name in names.split()}


_BATCHNORM = _of(
    "compat.sync_batchnorm", "SyncBatchNorm convert_syncbn_model create_syncbn_process_group"
)
_PARALLEL = _of("compat.parallel", "DistributedDataParallel Reducer")
_LAYER_NORM = _of(
    "compat.normalization",
    "FusedLayerNorm MixedFusedLayerNorm FusedRMSNorm MixedFusedRMSNorm manual_rms_norm "
    "fused_layer_norm_affine mixed_dtype_fused_layer_norm_affine "
    "fused_rms_norm fused_rms_norm_affine mixed_dtype_fused_rms_norm_affine",
)
_OPTIMIZERS = {
    "FusedAdam": "fused_adam",
    "FusedLAMB": "fused_lamb",
    "FusedSGD": "fused_sgd",
    "FusedNovoGrad": "fused_novograd",
    "FusedAdagrad": "fused_adagrad",
}
_HALF_MODELS = {
    **_of(
        "compat.half_models",
        "network_to_half BN_convert_float convert_module convert_network tofp16 FP16Model",
    ),
    **_of(
        "compat.param_lists",
        "prep_param_lists model_grads_to_master_grads master_params_to_model_params clip_grad_norm",
    ),
    **_of("compat.loss_scalers", "to_python_float"),
}
_SCALERS = _of("compat.loss_scalers", "LossScaler DynamicLossScaler")
_MULTI_TENSOR = _of("compat.multi_tensor", "MultiTensorApply multi_tensor_applier")

NAMES: Mapping[str, Rows] = MappingProxyType(
    {
        "apex": {},
        "apex.amp": {**_AMP, **_FRONTEND, **_HANDLE, **_STATE},
        "apex.amp.__version__": _of("compat.version", "VERSION __version__"),
        "apex.amp._amp_state": _STATE,
        "apex.amp._initialize": {},
        "apex.amp.amp": _AMP,
        "apex.amp.frontend": {**_FRONTEND, **_of("compat.amp_state", "Properties")},
        "apex.amp.handle": _HANDLE,
        "apex.amp.opt": _of("compat.handle", "OptimWrapper"),
        "apex.amp.scaler": _of("compat.scalers", "LossScaler"),
        "apex.amp.lists": {},
        "apex.amp.lists.functional_overrides": _lists(
            "functional_overrides", f"{_OVERRIDES} BANNED_FUNCS"
        ),
        "apex.amp.lists.torch_overrides": _lists("torch_overrides", f"{_OVERRIDES} {_CASTS}"),
        "apex.amp.lists.tensor_overrides": _lists("tensor_overrides", f"{_OVERRIDES} {_CASTS}"),
        "apex.parallel": {**_PARALLEL, **_BATCHNORM, **_of("compat.larc", "LARC")},
        "apex.parallel.distributed": {**_PARALLEL, **_of("compat.parallel", "flat_dist_call")},
        "apex.parallel.optimized_sync_batchnorm": _of("compat.sync_batchnorm", "SyncBatchNorm"),
        "apex.parallel.sync_batchnorm": _of("compat.sync_batchnorm", "SyncBatchNorm"),
        "apex.parallel.LARC": _of("compat.larc", "LARC"),
        "apex.optimizers": {
            name: f"amp_patch.compat.{module}:{name}" for name, module in _OPTIMIZERS.items()
        },
        **{
            f"apex.optimizers.{module}": {name: f"amp_patch.compat.{module}:{name}"}
            for name, module in _OPTIMIZERS.items()
        },
        "apex.multi_tensor_apply": _MULTI_TENSOR,
        "apex.multi_tensor_apply.multi_tensor_apply": _of(
            "compat.multi_tensor", "MultiTensorApply"
        ),
        "apex.fp16_utils": {
            **_HALF_MODELS,
            **_SCALERS,
            **_of("compat.fp16_optimizer", "FP16_Optimizer"),
        },
        "apex.fp16_utils.fp16util": _HALF_MODELS,
        "apex.fp16_utils.fp16_optimizer": _of("compat.fp16_optimizer", "FP16_Optimizer"),
        "apex.fp16_utils.loss_scaler": {
            **_SCALERS,
            **_of("compat.loss_scalers", "to_python_float"),
        },
        "apex.normalization": _LAYER_NORM,
        "apex.normalization.fused_layer_norm": {
            **_LAYER_NORM,
            **_of("compat.normalization", "fused_layer_norm"),  # in the package, the module
        },
        "apex.contrib": {},
        "apex.contrib.clip_grad": {"clip_grad_norm_": "torch.nn.utils:clip_grad_norm_"},
        "apex.contrib.clip_grad.clip_grad": {"clip_grad_norm_": "torch.nn.utils:clip_grad_norm_"},
        "apex.contrib.xentropy": _of("compat.cross_entropy", "SoftmaxCrossEntropyLoss"),
        "apex.contrib.xentropy.softmax_xentropy": _of(
            "compat.cross_entropy", "SoftmaxCrossEntropyLoss"
        ),
        "apex.contrib.layer_norm": {},
        "apex.contrib.optimizers": _of("compat.flat_fp16_optimizer", "FP16_Optimizer"),
        "apex.contrib.optimizers.fp16_optimizer": _of(
            "compat.flat_fp16_optimizer", "FP16_Optimizer"
        ),
        "apex.pyprof": {},
        "apex.pyprof.nvtx": _of("compat.profiling", "init"),
    }
)
"""The modules, and what each of them has. A module is an attribute of the one that it is in, unless
that has the name in a row of its own: `apex.amp._amp_state` is the object and not the module."""
