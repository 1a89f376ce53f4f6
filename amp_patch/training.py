"""The public functions of the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from amp_patch.arguments import as_list, check_loss, refuse_duplicates
from amp_patch.errors import AmpError, warn
from amp_patch.scaling.scaled_loss import ScaledLoss
from amp_patch.slot import slot


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
    halves. The cast cache is empty at the start of the body and after the block. If the body
    raises, gradients are as they were before it.
    With a loss scale that is always 1.0 the loss itself is given and nothing is checked; without
    masters (O0, O3, O4) backward then adds to the gradients as in plain torch, also if it raises.

    Args:
        loss: a tensor that requires grad, of any floating dtype and shape. Scaled in FP32, or in
            float64 if it is that. Not mutated.
        optimizers: the optimizer, or a list of those, whose parameters backward will reach.
        loss_id: which of the `num_losses` losses this is.
        model: accepted for scripts that pass it; not needed.
        delay_unscale: leave the gradients scaled, for a later block of the same window to unscale.
        delay_overflow_check: leave the check to a later block or to `step`.

    Raises AmpError if `loss` is no such tensor or an optimizer did not go through `initialize`.
    Synchronises with the device once, at the end of the block, if a check is made; not at all where
    every optimizer is a fused one of torch, which skips by itself (after its first step).

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> loss = model(torch.ones(3, 4)).square().mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> (scaled_loss / loss).item(), model.weight.grad.dtype
        (65536.0, torch.float32)
        >>> amp.uninitialize()
    """
    session = slot.require("scale_loss")
    session.context.forget_interrupted()
    optimizers = as_list(optimizers)
    if len(optimizers) > 1:
        refuse_duplicates("scale_loss: optimizers", optimizers)
    found = [session.binding_of(one, "scale_loss") for one in optimizers]
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
        session.bindings_beside(bindings),
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    )


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that `optimizer` updates: FP32 masters at O2 and O5, else the model's own.

    For clipping, between `scale_loss` and `step`:
    `torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)`. Warns where gradients
    are still multiplied by the loss scale.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> [parameter.dtype for parameter in amp.master_params(optimizer)]
        [torch.float32, torch.float32]
        >>> amp.uninitialize()
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
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
    *,
    loss_id: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` with the loss scale inside: scaled on the way, unscaled in the result.

    Takes its arguments, in its order, and `loss_id`.

    For gradient penalties. The outputs are multiplied by the loss scale of `loss_id` in FP32, so
    that small gradients survive half precision, and the results are in FP32 (float64 stays) and
    divided by it. With `create_graph=True` the results can be differentiated again. A gradient that
    overflows comes back as inf or NaN, and so does the penalty: `scale_loss` then skips the step.
    Does not synchronise.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> x = torch.ones(1, 4, requires_grad=True)
        >>> (gradient,) = amp.grad(model(x).mean(), x, create_graph=True)
        >>> gradient.dtype, gradient.requires_grad
        (torch.float32, True)
        >>> amp.uninitialize()
    """
    session = slot.require("grad")
    scale = 1.0
    if not session.is_idle:
        scaler = session.scalers.scaler(loss_id)
        scaler.is_in_loss, scale = True, scaler.scale
    scaled = [_widened(output) * scale for output in as_list(outputs)]
    found = torch.autograd.grad(
        scaled,
        inputs,
        grad_outputs,
        retain_graph,
        create_graph,
        only_inputs,
        allow_unused,
        is_grads_batched,
        materialize_grads,
    )
    return tuple(None if one is None else _widened(one) / scale for one in found)


@contextmanager
def full_precision(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, `model` holds its FP32 values and runs in FP32: to evaluate, export or average.

    At O2 and O5 the masters are put into the model's parameters, the same objects, and what is
    written into them meanwhile is kept; at the end the model is half again. At O1 and O4 casts are
    off inside. Do not train inside. Gradients of the model are dropped.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> with amp.full_precision(model):
        ...     inside = model.weight.dtype
        >>> inside, model.weight.dtype
        (torch.float32, torch.float16)
        >>> amp.uninitialize()
    """
    session = slot.require("full_precision")
    with nullcontext() if session.is_idle else session.full_precision(model, "full_precision"):
        yield model


@contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, torch functions run in the precision of their arguments, on this thread.

    Nests, works as a decorator, is undone by an exception too, and does nothing where no casts are
    active.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> with amp.disable_casts():
        ...     output = model(torch.ones(1, 4))
        >>> output.dtype
        torch.float32
        >>> amp.uninitialize()
    """
    session = slot.session
    with nullcontext() if session is None else session.context.suspended():
        yield


def clear_cache() -> None:
    """Forget all cached casts, after weights were written in a way that torch does not count.

    Only needed for writes through numpy, a flat buffer or a `.data` alias taken earlier.

        >>> import amp_patch as amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> _ = model(torch.ones(1, 4))
        >>> _ = model.weight.detach().numpy().fill(0)
        >>> amp.clear_cache()
        >>> amp.uninitialize()
    """
    if slot.session is not None:
        slot.session.context.cache.clear()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()
