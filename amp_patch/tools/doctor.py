"""Look a model over before it is trained in mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from amp_patch.arguments import checked_optimizers
from amp_patch.errors import AmpError
from amp_patch.parsing import parse_bool
from amp_patch.tools import doctor_checks, doctor_order
from amp_patch.tools.diagnosis import Diagnosis, Finding
from amp_patch.tools.level_arguments import level_setup
from amp_patch.tools.patient import Patient
from amp_patch.weights.exclusions import find_exclusions
from amp_patch.weights.model_checks import check_input_names

CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    doctor_checks.check_eps,
    doctor_checks.check_constants,
    doctor_checks.check_probability_losses,
    doctor_checks.check_sizes,
    doctor_checks.check_speed,
    doctor_checks.check_buffers,
    doctor_order.check_stored_functions,
    doctor_order.check_order,
)


def doctor(
    model: nn.Module,
    optimizer: Any = None,
    opt_level: str = "O1",
    *,
    scheduler: Any = None,
    enabled: Any = True,
    keep_fp32: Any = (),
    keep_inputs: Any = (),
    cast_rules: Any = "default",
    num_losses: int = 1,
    verbosity: int = 1,
    **properties: Any,
) -> Diagnosis:
    """What stands against training `model` with `optimizer` at `opt_level`, each with its fix.

    To be called before `initialize`, with the same arguments, for one model and one optimizer.
    Looks for an eps that is 0 in half, mask constants beyond 65504, binary cross entropy after a
    sigmoid, sizes off 8, a dtype that is slow on the model's device (measured for 50 ms), functions
    of torch that modules hold where `initialize` does not reach them, buffers that lose values by
    the cast, and optimizers or a `scheduler` built in the wrong order. What `keep_fp32` holds in
    FP32 loses nothing; with `enabled=False` there is nothing to find. Changes nothing.

    Raises AmpError for arguments that `initialize` would refuse.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12))
        >>> found = doctor(model, opt_level="O3")
        >>> [(one.where, one.text) for one in found.of_kind("eps")]
        [('1', 'eps=1e-12 is 0 in float16')]
    """
    if not isinstance(model, nn.Module):
        raise AmpError(f"doctor: expected a torch.nn.Module, found {type(model).__name__}")
    setup = level_setup(
        "doctor",
        opt_level=opt_level,
        enabled=enabled,
        keep_fp32=keep_fp32,
        keep_inputs=keep_inputs,
        cast_rules=cast_rules,
        num_losses=num_losses,
        verbosity=verbosity,
        **properties,
    )
    optimizers = checked_optimizers(optimizer)
    if len(optimizers) > 1:
        raise AmpError(f"doctor: expected one optimizer, found {len(optimizers)}; call it for each")
    check_input_names([model], setup.keep_inputs)
    patient = Patient(
        model,
        next(iter(optimizers), None),
        setup.policy,
        scheduler,
        find_exclusions("keep_fp32", [model], setup.keep_fp32)[0],
        setup.rules,
    )
    checks = () if parse_bool("enabled", enabled) is False else CHECKS
    return Diagnosis.of(opt_level, [finding for check in checks for finding in check(patient)])
