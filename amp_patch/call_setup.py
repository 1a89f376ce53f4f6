"""What one `initialize` call asks for."""

from __future__ import annotations

from dataclasses import dataclass

from amp_patch.casts.rules import OP_RULES, OpRule
from amp_patch.policy import Policy
from amp_patch.weights.exclusions import Selector


@dataclass(frozen=True)
class Setup:
    """How one `initialize` call wants its models and optimizers.

    `keep_fp32` selects what of the models is not cast, `keep_inputs` names arguments of their
    forward that are not, `rules` says which operations are cast to what.
    """

    policy: Policy
    num_losses: int = 1
    keep_fp32: tuple[Selector, ...] = ()
    keep_inputs: frozenset[str] = frozenset()
    is_verbose: bool = True
    rules: tuple[OpRule, ...] = OP_RULES
