"""What apex had and is not here, with what does the work today. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"

REPLACEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "amp_C": "the torch._foreach_* functions",
        "apex_C": "torch._utils._flatten_dense_tensors and _unflatten_dense_tensors",
        "distributed_adam_cuda": "torch.distributed.optim.ZeroRedundancyOptimizer",
        "distributed_lamb_cuda": "torch.distributed.fsdp.fully_shard",
        "fused_adam_cuda": "apex.optimizers.FusedAdam",
        "fused_layer_norm_cuda": "torch.nn.functional.layer_norm",
        "fused_weight_gradient_mlp_cuda": "torch.nn.Linear",
        "mlp_cuda": "torch.nn.Sequential of torch.nn.Linear, under torch.compile",
        "scaled_masked_softmax_cuda": "torch.nn.functional.softmax",
        "scaled_upper_triang_masked_softmax_cuda": _ATTENTION,
        "xentropy_cuda": "torch.nn.functional.cross_entropy",
        "apex.RNN": "torch.nn.LSTM, GRU and RNN",
        "apex.amp.compat": "torch itself",
        "apex.amp.opt_level": "opt_level=... of initialize",
        "apex.amp.rnn_compat": "torch.nn.LSTM, GRU and RNN, which O1 casts",
        "apex.amp.utils": "amp_patch.half_function and float_function",
        "apex.amp.wrap": "amp_patch.half_function and float_function",
        "apex.contrib.bottleneck": "a model of torch.nn.Conv2d under torch.compile",
        "apex.contrib.conv_bias_relu": "torch.nn.Conv2d and ReLU under torch.compile",
        "apex.contrib.cudnn_gbn": "torch.nn.SyncBatchNorm",
        "apex.contrib.fmha": _ATTENTION,
        "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
        "apex.contrib.group_norm": "torch.nn.GroupNorm",
        "apex.contrib.groupbn": "torch.nn.BatchNorm2d with memory_format=torch.channels_last",
        "apex.contrib.index_mul_2d": "a[index] * b",
        "apex.contrib.layer_norm": "torch.nn.LayerNorm",
        "apex.contrib.multihead_attn": f"torch.nn.MultiheadAttention or {_ATTENTION}",
        "apex.contrib.optimizers.DistributedFusedAdam": "torch.distributed.optim."
        "ZeroRedundancyOptimizer, or torch.distributed.fsdp.fully_shard",
        "apex.contrib.optimizers.DistributedFusedLAMB": "apex.optimizers.FusedLAMB with "
        "torch.distributed.fsdp.fully_shard",
        "apex.contrib.optimizers.FusedAdam": "apex.optimizers.FusedAdam",
        "apex.contrib.optimizers.FusedLAMB": "apex.optimizers.FusedLAMB",
        "apex.contrib.optimizers.FusedSGD": "apex.optimizers.FusedSGD",
        "apex.contrib.peer_memory": "torch.distributed._symmetric_memory",
        "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
        "apex.contrib.transducer": "torchaudio.transforms.RNNTLoss",
        "apex.fused_dense": "torch.nn.Linear, under torch.compile",
        "apex.mlp": "torch.nn.Sequential of torch.nn.Linear, under torch.compile",
        "apex.optimizers.FP16_Optimizer": "apex.contrib.optimizers.FP16_Optimizer",
        "apex.optimizers.FusedMixedPrecisionLamb": "apex.optimizers.FusedLAMB at opt_level='O2'",
        "apex.parallel.multiproc": "torchrun --nproc-per-node=N -m amp_patch run train.py",
        "apex.pyprof": "torch.profiler",
        "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
        "apex.transformer": "megatron.core, or torch.distributed.tensor.parallel",
    }
)
"""By full name. A name that is not here is looked for by the names that it is in."""


def missing_name(name: str) -> str:
    """The sentence for a name of apex that does not exist here."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        found = REPLACEMENTS.get(".".join(parts[:length]))
        if found is not None:
            return f"{name} is not among the names that amp_patch gives to old scripts; use {found}"
    return (
        f"{name} is not among the names that amp_patch gives to old scripts; the modules are in "
        "amp_patch.compat.names"
    )
