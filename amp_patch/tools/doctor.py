"""Look a model over before it is trained in mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from amp_patch.errors import AmpError
from amp_patch.policy import resolve_policy
from amp_patch.tools import doctor_checks, doctor_order
from amp_patch.tools.diagnosis import Diagnosis, Finding
from amp_patch.tools.patient import Patient

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
    **properties: Any,
) -> Diagnosis:
    """What stands against training `model` with `optimizer` at `opt_level`, each with its fix.

    To be called before `initialize`, with the same arguments. Looks for an eps that is 0 in half,
    mask constants beyond 65504, binary cross entropy after a sigmoid, sizes off 8, a dtype that is
    slow on the model's device (measured for 50 ms), functions of torch that modules hold,
    buffers that lose values by the cast, and optimizers or a `scheduler` built in
    the wrong order. Changes nothing.

    Raises AmpError for arguments that `initialize` would refuse.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12))
        >>> found = doctor(model, opt_level="O3")
        >>> [(one.where, one.text) for one in found.of_kind("eps")]
        [('1', 'eps=1e-12 is 0 in float16')]
    """
    if not isinstance(model, nn.Module):
        raise AmpError(f"doctor: expected a torch.nn.Module, found {type(model).__name__}")
    patient = Patient(model, optimizer, resolve_policy(opt_level, **properties), scheduler)
    return Diagnosis.of(opt_level, [finding for check in CHECKS for finding in check(patient)])
