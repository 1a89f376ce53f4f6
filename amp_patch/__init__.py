"""Mixed precision training for PyTorch: one line and one block, opt levels O0 to O5."""

from typing import TYPE_CHECKING

from amp_patch.api import initialize, uninitialize
from amp_patch.casting import (
    float_function,
    half_function,
    keep_casts,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    stored_references,
    unregister_function,
    verify_casts,
)
from amp_patch.casts.presets import resolve_rules, rules_table
from amp_patch.compat.installer import install_as_apex
from amp_patch.errors import AmpError, AmpWarning
from amp_patch.on_demand import loaded_on_demand
from amp_patch.policy import OPT_LEVELS, Policy
from amp_patch.scaling.loss_scaler import DynamicLossScale
from amp_patch.state import (
    last_overflow,
    load_state_dict,
    loss_scale,
    model_state_dict,
    state_dict,
    step_was_skipped,
    step_will_be_skipped,
)
from amp_patch.training import (
    clear_cache,
    disable_casts,
    full_precision,
    grad,
    master_params,
    scale_loss,
)
from amp_patch.version import __version__

if TYPE_CHECKING:
    from amp_patch.tools.compare import compare
    from amp_patch.tools.doctor import doctor
    from amp_patch.tools.range_check import range_check
    from amp_patch.tools.record_casts import record_casts
    from amp_patch.tools.trace_nonfinite import NonFiniteError, trace_nonfinite
    from amp_patch.tools.tune import tune

__all__ = [
    "OPT_LEVELS",
    "AmpError",
    "AmpWarning",
    "DynamicLossScale",
    "NonFiniteError",
    "Policy",
    "__version__",
    "clear_cache",
    "compare",
    "disable_casts",
    "doctor",
    "float_function",
    "full_precision",
    "grad",
    "half_function",
    "initialize",
    "install_as_apex",
    "keep_casts",
    "last_overflow",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "model_state_dict",
    "promote_function",
    "range_check",
    "record_casts",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "resolve_rules",
    "rules_table",
    "scale_loss",
    "state_dict",
    "step_was_skipped",
    "step_will_be_skipped",
    "stored_references",
    "trace_nonfinite",
    "tune",
    "uninitialize",
    "unregister_function",
    "verify_casts",
]

# The tools are a third of the package, and training needs none of them.
__getattr__, __dir__ = loaded_on_demand(
    __name__,
    __all__,
    {
        "NonFiniteError": "tools.trace_nonfinite",
        "compare": "tools.compare",
        "doctor": "tools.doctor",
        "range_check": "tools.range_check",
        "record_casts": "tools.record_casts",
        "trace_nonfinite": "tools.trace_nonfinite",
        "tune": "tools.tune",
    },
)
