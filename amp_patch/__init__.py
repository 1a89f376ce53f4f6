"""Mixed precision training for PyTorch: one line and one block, opt levels O0 to O5."""

from amp_patch.api import (
    clear_cache,
    disable_casts,
    initialize,
    load_state_dict,
    loss_scale,
    master_params,
    scale_loss,
    state_dict,
    step_was_skipped,
    uninitialize,
)
from amp_patch.errors import AmpError, AmpWarning
from amp_patch.policy import OPT_LEVELS, Policy
from amp_patch.version import __version__

__all__ = [
    "OPT_LEVELS",
    "AmpError",
    "AmpWarning",
    "Policy",
    "__version__",
    "clear_cache",
    "disable_casts",
    "initialize",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "scale_loss",
    "state_dict",
    "step_was_skipped",
    "uninitialize",
]
