"""The public functions: thin, and the one place where one object or a list of them may come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from amp_patch.errors import AmpError
from amp_patch.policy import parse_bool, resolve_policy
from amp_patch.scaling.scaled_loss import ScaledLoss
from amp_patch.session import slot


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
        loss_scale: "dynamic" or a number.
        cast_model_outputs: the dtype of what the forward of the models returns.
        num_losses: how many losses will have a `loss_id`, and a loss scale, of their own.
        verbosity: 0 logs nothing; 1 logs to `logging.getLogger("amp_patch")`.
        min_loss_scale: the floor of a dynamic scale; 1.0 unless given, may be below 1.
        max_loss_scale: its ceiling.
        half_dtype: `torch.float16` or `torch.bfloat16` in place of the level's own.

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
    model_list = _checked_models(models)
    optimizer_list = _checked_optimizers(optimizers)
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
    )
    _check_count("num_losses", num_losses, minimum=1)
    _check_count("verbosity", verbosity, minimum=0)
    is_first = slot.session is None
    try:
        slot.open().add(model_list, optimizer_list, policy, num_losses, verbosity)
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
    found = [session.binding_of(one, "scale_loss") for one in _as_list(optimizers)]
    bindings = [binding for binding in found if binding is not None]
    if not found and not session.is_idle:
        raise AmpError("scale_loss: expected at least one optimizer, found an empty list")
    if not bindings:
        return nullcontext(loss)
    _check_loss(loss)
    return ScaledLoss(
        loss,
        bindings,
        bindings[0].group.scaler(loss_id),
        session.context.cache,
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    )


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that `optimizer` updates: FP32 masters at O2 and O5, else the model's own.

    For clipping, between `scale_loss` and `step`:
    `torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)`.
    """
    slot.require("master_params").binding_of(optimizer, "master_params")
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict() -> dict[str, dict[str, float | int]]:
    """The loss scales, to save beside model and optimizer: plain numbers.

    `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`; the scalers of the newest
    `initialize` call come first. Empty with `enabled=False`.
    """
    return slot.require("state_dict").scalers.state_dict()


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Set the loss scales from what `state_dict` gave, matched by name, all or nothing.

    Names that exist on one side only are reported in an `AmpWarning`. Raises AmpError, and loads
    nothing, where an entry is malformed.
    """
    session = slot.require("load_state_dict")
    if not isinstance(state, Mapping):
        raise AmpError(f"load_state_dict: expected a dict, found {state!r}")
    if not session.is_idle:
        session.scalers.load_state_dict(state)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, torch functions run in the precision of their arguments, on this thread.

    Nests, works as a decorator, is undone by an exception too, and does nothing where no casts are
    active.
    """
    session = slot.session
    with nullcontext() if session is None else session.context.suspended():
        yield


def loss_scale(loss_id: int = 0) -> float:
    """The present loss scale of `loss_id`; 1.0 with `enabled=False`. Does not synchronise."""
    session = slot.require("loss_scale")
    return 1.0 if session.is_idle else session.scalers.scaler(loss_id).scale


def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last `step` of `optimizer` was skipped because of an overflow.

    Hold a per-step schedule with it: `if not amp.step_was_skipped(optimizer): scheduler.step()`.
    """
    binding = slot.require("step_was_skipped").binding_of(optimizer, "step_was_skipped")
    return binding is not None and binding.step_was_skipped


def clear_cache() -> None:
    """Forget all cached casts, after weights were written in a way that torch does not count.

    Only needed for writes through numpy, a flat buffer or a `.data` alias taken earlier.
    """
    if slot.session is not None:
        slot.session.context.cache.clear()


def _as_list(one_or_many: Any) -> list[Any]:
    return list(one_or_many) if isinstance(one_or_many, (list, tuple)) else [one_or_many]


def _checked_models(models: Any) -> list[nn.Module]:
    found = _as_list(models)
    for model in found:
        if not isinstance(model, nn.Module):
            raise AmpError(
                f"models: expected a torch.nn.Module or a list of them, found {_described(model)}"
            )
    _refuse_duplicates("models", found)
    return found


def _checked_optimizers(optimizers: Any) -> list[Any]:
    found = [] if optimizers is None else _as_list(optimizers)
    for optimizer in found:
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
            raise AmpError(
                "optimizers: expected an optimizer (with param_groups and step), a list of them or "
                f"None, found {_described(optimizer)}"
            )
    _refuse_duplicates("optimizers", found)
    return found


def _refuse_duplicates(name: str, objects: list[Any]) -> None:
    if len({id(one) for one in objects}) < len(objects):
        raise AmpError(f"{name}: expected different objects, found one of them twice")


def _check_count(name: str, value: Any, minimum: int) -> None:
    if not isinstance(value, int) or value < minimum:
        raise AmpError(f"{name}: expected an integer of at least {minimum}, found {value!r}")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        raise AmpError(f"loss: expected a floating-point tensor, found {_described(loss)}")
    if not loss.requires_grad:
        raise AmpError(
            "loss: expected a tensor that requires grad, found one without history; was it "
            "computed under no_grad, detached, or from frozen parameters only?"
        )


def _described(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"
