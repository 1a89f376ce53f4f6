"""`initialize` and its companions with the signatures of apex."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from amp_patch import api, state, training
from amp_patch.arguments import as_list
from amp_patch.compat.amp_state import amp_state
from amp_patch.compat.cast_rules import rules_of_2019, rules_of_today
from amp_patch.compat.handle import AmpHandle, NoOpHandle
from amp_patch.compat.larc import LARC
from amp_patch.compat.stash import stashes
from amp_patch.errors import AmpError
from amp_patch.parsing import parse_bool
from amp_patch.policy import resolve_policy
from amp_patch.slot import slot

_OF_THE_LEVEL = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
)


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: Any = True,
    opt_level: Any = "O1",
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
) -> Any:
    """As `amp_patch.initialize`, which it calls; what scripts look for is put on the optimizers.

    Where `amp_state.opt_level` is set and another level is asked for, that level is taken, and what
    the script says of the level's properties is left out.
    """
    properties = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
        "min_loss_scale": min_loss_scale,
        "max_loss_scale": max_loss_scale,
    }
    if amp_state.opt_level is not None and amp_state.opt_level != opt_level:
        opt_level = amp_state.opt_level
        properties.update(dict.fromkeys(_OF_THE_LEVEL))
    amp_state.verbosity = verbosity
    amp_state.min_loss_scale, amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    if parse_bool("enabled", enabled) is False:
        result = api.initialize(models, optimizers, enabled=False)
        amp_state.note(None, num_losses)
        amp_state.handle = NoOpHandle()
        return result
    policy = resolve_policy(opt_level, **properties)
    rules = rules_of_today()
    result = api.initialize(
        models,
        optimizers,
        opt_level=opt_level,
        num_losses=num_losses,
        verbosity=verbosity,
        cast_rules=rules,
        **properties,
    )
    amp_state.note(policy, num_losses)
    amp_state.handle = AmpHandle(policy, rules, verbose=verbosity > 0)
    for optimizer in [] if optimizers is None else as_list(optimizers):
        stashes.put_on(optimizer)
    return result


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """As `amp_patch.scale_loss`. A `LARC` around an initialized optimizer stands for that."""
    if amp_state.is_switched_off:
        return nullcontext(loss)
    known = [_initialized(one) for one in as_list(optimizers)]
    return training.scale_loss(loss, known, loss_id, model, delay_unscale, delay_overflow_check)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """As `amp_patch.state_dict`, into `destination` if one is given."""
    found = OrderedDict() if destination is None else destination
    found.update(state.state_dict())
    return found


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """As `amp_patch.load_state_dict`."""
    state.load_state_dict(state_dict)


def init(
    enabled: bool = True,
    loss_scale: Any = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Switch the casts on as scripts of 2018 do, by the lists of their time. Returns the handle.

    `allow_banned` lets binary_cross_entropy run on half tensors, in FP32. Without `enable_caching`
    a weight is cast at each of its uses, not once an iteration.
    """
    if not enabled:
        nothing = amp_state.handle = NoOpHandle()
        return nothing
    policy = resolve_policy(amp_state.opt_level or "O1", loss_scale=loss_scale)
    if policy.casts_model:
        raise AmpError(
            f"init: expected a level that casts no model, which init does not know of: 'O0', 'O1' "
            f"or 'O4', found {policy.opt_level!r}"
        )
    rules = rules_of_2019(allow_banned=allow_banned)
    handle = AmpHandle(policy, rules, verbose, enable_caching)
    handle.switch_on()
    amp_state.note(policy, 1)
    amp_state.handle = handle
    return handle


def _initialized(optimizer: Any) -> Any:
    if not isinstance(optimizer, LARC) or slot.session is None:
        return optimizer
    try:
        slot.session.binding_of(optimizer, "scale_loss")
    except AmpError:
        return optimizer.optim
    return optimizer
