"""Check arguments that are meant for `initialize`, before anything is initialized with them."""

from __future__ import annotations

import inspect
from typing import Any

from amp_patch.arguments import checked_count, checked_names, checked_rules
from amp_patch.call_setup import Setup
from amp_patch.errors import AmpError
from amp_patch.parsing import parse_bool
from amp_patch.policy import resolve_policy
from amp_patch.weights.exclusions import check_selectors

_PROPERTIES = inspect.signature(resolve_policy).parameters.keys() - {"opt_level"}


def level_setup(
    caller: str,
    *,
    opt_level: Any = "O1",
    enabled: Any = True,
    keep_fp32: Any = (),
    keep_inputs: Any = (),
    cast_rules: Any = "default",
    num_losses: Any = 1,
    verbosity: Any = 0,
    **properties: Any,
) -> Setup:
    """What `initialize` would make of its arguments other than models and optimizers.

    Raises AmpError for those that it would refuse, and for those that it does not take.
    """
    unknown = sorted(properties.keys() - _PROPERTIES)
    if unknown:
        raise AmpError(f"{caller}: expected arguments that initialize takes, found {unknown[0]!r}")
    parse_bool("enabled", enabled)
    return Setup(
        resolve_policy(opt_level, **properties),
        checked_count("num_losses", num_losses, minimum=1),
        check_selectors("keep_fp32", keep_fp32),
        checked_names("keep_inputs", keep_inputs),
        checked_count("verbosity", verbosity, minimum=0) > 0,
        checked_rules(cast_rules),
    )
