"""The public functions that change what training does: thin, over the session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from amp_patch.arguments import (
    as_list,
    check_count,
    check_loss,
    checked_models,
    checked_names,
    checked_optimizers,
)
from amp_patch.errors import AmpError, warn
from amp_patch.parsing import parse_bool
from amp_patch.policy import resolve_policy
from amp_patch.scaling.scaled_loss import ScaledLoss
from amp_patch.session import Setup
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
        sync_overflow: whether the ranks of `torch.distributed` agree on an overflow (the default).

    None leaves a property to the level. Properties may be strings from a command line ("True",
    "128.0", "dynamic"). A second call with other objects adds them; with the same objects and
    another level it first undoes the old one; with the same objects and level it changes nothing.

    Raises:
        AmpError: for arguments that are not understood or that contradict each other. Nothing is
            left half done.

    Does not synchronise with the device.

        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> model.weight.dtype, next(master_params(optimizer)).dtype
        (torch.float16, torch.float32)
        >>> uninitialize()
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
    check_count("num_losses", num_losses, minimum=1)
    check_count("verbosity", verbosity, minimum=0)
    setup = Setup(
        policy,
        num_losses,
        check_selectors("keep_fp32", keep_fp32),
        checked_names("keep_inputs", keep_inputs),
        verbosity > 0,
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
    """
    slot.close()


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Context manager around backward: gives the scaled loss, unscales the gradients at its end.

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    After the block the gradients of `optimizers` are unscaled, in FP32 on the master weights where
    there are any (see `master_params`), and added to what earlier blocks have left there. If one of
    them is inf or NaN, the next `step` of each of `optimizers` is skipped, and a dynamic loss scale
    halves. The cast cache is empty. If the body raises, gradients are as they were before it.
    With a loss scale that is always 1.0 the loss itself is given and nothing is checked.

    Args:
        loss: a tensor that requires grad, of any floating dtype and shape. Scaled in FP32, or in
            float64 if it is that. Not mutated.
        optimizers: the optimizer, or a list of those, whose parameters backward will reach.
        loss_id: which of the `num_losses` losses this is.
        model: accepted for scripts that pass it; not needed.
        delay_unscale: leave the gradients scaled, for a later block of the same window to unscale.
        delay_overflow_check: leave the check to a later block or to `step`.

    Raises AmpError if `loss` is no such tensor or an optimizer did not go through `initialize`.
    Synchronises with the device once, at the end of the block, if a check is made.
    """
    session = slot.require("scale_loss")
    found = [session.binding_of(one, "scale_loss") for one in as_list(optimizers)]
    bindings = [binding for binding in found if binding is not None]
    if not found and not session.is_idle:
        raise AmpError("scale_loss: expected at least one optimizer, found an empty list")
    if not bindings:
        return nullcontext(loss)
    check_loss(loss)
    scaler = bindings[0].group.scaler(loss_id)
    if len(bindings) < len(found) and not scaler.is_identity:
        raise AmpError(
            "scale_loss: expected optimizers that are all enabled or all disabled, found both; the "
            "gradients of the disabled ones would stay multiplied by the loss scale"
        )
    return ScaledLoss(
        loss,
        bindings,
        scaler,
        session.context.cache,
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    )


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that `optimizer` updates: FP32 masters at O2 and O5, else the model's own.

    For clipping, between `scale_loss` and `step`:
    `torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)`. Warns where gradients
    are still multiplied by the loss scale.
    """
    binding = slot.require("master_params").binding_of(optimizer, "master_params")
    if binding is not None and binding.window.is_scaled:
        warn(
            "master_params: the gradients are still multiplied by the loss scale; clip after the "
            "scale_loss block, the last one of a window with delay_unscale=True"
        )
    for group in optimizer.param_groups:
        yield from group["params"]


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    *,
    loss_id: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` with the loss scale inside: scaled on the way, unscaled in the result.

    For gradient penalties. The outputs are multiplied by the loss scale of `loss_id` in FP32, so
    that small gradients survive half precision, and the results are in FP32 (float64 stays) and
    divided by it. With `create_graph=True` the results can be differentiated again. A gradient that
    overflows comes back as inf or NaN, and so does the penalty: `scale_loss` then skips the step.
    Does not synchronise.
    """
    session = slot.require("grad")
    scale = 1.0
    if not session.is_idle:
        scaler = session.scalers.scaler(loss_id)
        scaler.is_in_loss, scale = True, scaler.scale
    scaled = [_widened(output) * scale for output in as_list(outputs)]
    found = torch.autograd.grad(
        scaled, inputs, grad_outputs, retain_graph, create_graph, allow_unused=allow_unused
    )
    return tuple(None if one is None else _widened(one) / scale for one in found)


@contextmanager
def full_precision(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, `model` holds its FP32 values and runs in FP32: to evaluate, export or average.

    At O2 and O5 the masters are put into the model's parameters, the same objects, and what is
    written into them meanwhile is kept; at the end the model is half again. At O1 and O4 casts are
    off inside. Do not train inside. Gradients of the model are dropped.
    """
    session = slot.require("full_precision")
    with nullcontext() if session.is_idle else session.full_precision(model, "full_precision"):
        yield model


@contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, torch functions run in the precision of their arguments, on this thread.

    Nests, works as a decorator, is undone by an exception too, and does nothing where no casts are
    active.
    """
    session = slot.session
    with nullcontext() if session is None else session.context.suspended():
        yield


def clear_cache() -> None:
    """Forget all cached casts, after weights were written in a way that torch does not count.

    Only needed for writes through numpy, a flat buffer or a `.data` alias taken earlier.
    """
    if slot.session is not None:
        slot.session.context.cache.clear()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()
