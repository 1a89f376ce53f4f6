"""The public functions that change what training does: thin, over the session."""

from __future__ import annotations

from typing import Any

from amp_patch.arguments import (
    checked_count,
    checked_models,
    checked_names,
    checked_optimizers,
    checked_rules,
)
from amp_patch.call_setup import Setup
from amp_patch.parsing import parse_bool
from amp_patch.policy import resolve_policy
from amp_patch.slot import slot
from amp_patch.weights.exclusions import check_selectors


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: Any = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: Any = None,
    max_loss_scale: Any = 2.0**24,
    *,
    half_dtype: Any = None,
    keep_fp32: Any = (),
    keep_inputs: Any = (),
    overflow_drops: Any = None,
    skip_together: Any = None,
    sync_overflow: Any = None,
    cast_rules: Any = "default",
) -> Any:
    """Make a training script mixed precision. Call it once, after building model and optimizer.

    The objects are changed in place and returned: one comes back as one, a list as a list, and
    without `optimizers` (None) only the models come back. Everything is undone by `uninitialize`.

    Args:
        models: a `torch.nn.Module` or a list of them, in FP32.
        optimizers: an optimizer, a list of them, or None for inference.
        enabled: False makes this and every other function a no-op.
        opt_level: "O0" FP32; "O1" casts around operations; "O2" half weights with FP32 BatchNorm
            and FP32 master weights; "O3" all half; "O4" and "O5" are O1 and O2 in bfloat16.
        cast_model_type: the dtype of the weights, False for no cast of the model.
        patch_torch_functions: casts around operations, as O1 has them.
        keep_batchnorm_fp32: whether BatchNorm keeps FP32 weights and statistics.
        master_weights: whether the optimizer updates FP32 copies of half weights.
        loss_scale: "dynamic", a number, a `DynamicLossScale`, or a list of these, one a loss.
        cast_model_outputs: the dtype of what the forward of the models returns.
        num_losses: how many losses will have a `loss_id`, and a loss scale, of their own.
        verbosity: 0 logs nothing; 1 logs to `logging.getLogger("amp_patch")`.
        min_loss_scale: the floor of a dynamic scale; 1.0 unless given, may be below 1.
        max_loss_scale: its ceiling.
        half_dtype: `torch.float16` or `torch.bfloat16` in place of the level's own.
        keep_fp32: what of a cast model stays in FP32: modules, types of modules, or patterns of
            paths ("head", "decoder.*", "*.position_table"), one or a list.
        keep_inputs: names of arguments of the models' forward that are not cast.
        overflow_drops: what an overflow in one of several blocks before a step drops: the whole
            "window", or only its own "micro_batch", for which the others then stand.
        skip_together: whether all optimizers given to one `scale_loss` skip together (the default),
            or each by its own gradients.
        cast_rules: which operations are cast: the name of a preset ("default", "apex-2019",
            "torch-cuda", "torch-cpu"), or what `resolve_rules` gave for your own additions.
        sync_overflow: whether the ranks of `torch.distributed` agree on an overflow (the default).

    None leaves a property to the level. Properties may be strings from a command line ("True",
    "128.0", "dynamic"). A second call with other objects adds them; with the same objects and
    another level it first undoes the old one; with the same objects and level it changes nothing.
    A new optimizer for parameters that an earlier one holds takes its place.

    Raises:
        AmpError: for arguments that are not understood or that contradict each other. Nothing is
            left half done.

    Does not synchronise with the device.

        >>> import torch
        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> model.weight.dtype, next(amp.master_params(optimizer)).dtype
        (torch.float16, torch.float32)
        >>> amp.uninitialize()
    """
    model_list = checked_models(models)
    optimizer_list = checked_optimizers(optimizers)
    if parse_bool("enabled", enabled) is False:
        slot.open().leave_alone(optimizer_list)
        return models if optimizers is None else (models, optimizers)
    policy = resolve_policy(
        opt_level,
        half_dtype=half_dtype,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
        overflow_drops=overflow_drops,
        skip_together=skip_together,
        sync_overflow=sync_overflow,
    )
    num_losses = checked_count("num_losses", num_losses, minimum=1)
    verbosity = checked_count("verbosity", verbosity, minimum=0)
    setup = Setup(
        policy,
        num_losses,
        check_selectors("keep_fp32", keep_fp32),
        checked_names("keep_inputs", keep_inputs),
        verbosity > 0,
        checked_rules(cast_rules),
    )
    is_first = slot.session is None
    try:
        slot.open().add(model_list, optimizer_list, setup)
    except BaseException:
        if is_first:
            slot.close()
        raise
    return models if optimizers is None else (models, optimizers)


def uninitialize() -> None:
    """Put everything back as it was before the first `initialize`. A second call does nothing.

    Patched torch functions are the objects they were, hooks are gone, parameters and buffers have
    their dtype again and the exact value of their master, and the optimizers hold the parameters
    of the model, with their state. Trained weights stay trained. Does not synchronise.

        >>> import torch
        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> model.weight.dtype
        torch.float16
        >>> amp.uninitialize()
        >>> model.weight.dtype
        torch.float32
    """
    slot.close()
