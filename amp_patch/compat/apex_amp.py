"""The names of `apex.amp`, for migrated scripts that need more than the public ones."""

from __future__ import annotations

from amp_patch.compat import lists
from amp_patch.compat.amp_state import AmpState, maybe_print, warn_or_err
from amp_patch.compat.amp_state import amp_state as _amp_state
from amp_patch.compat.frontend import init, initialize, load_state_dict, scale_loss, state_dict
from amp_patch.compat.handle import AmpHandle, NoOpHandle
from amp_patch.compat.registrations import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_patch.training import disable_casts, master_params

__all__ = [
    "AmpHandle",
    "AmpState",
    "NoOpHandle",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "maybe_print",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
    "warn_or_err",
]
