"""The checks of a doctor that are about what was built and stored when: order, and references."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn.parameter import is_lazy

from amp_patch.casts.rules import OP_RULES
from amp_patch.casts.wrappers import CastWrapper
from amp_patch.policy import HALF_DTYPES
from amp_patch.tools.diagnosis import Finding, Severity
from amp_patch.tools.patient import Patient


def check_stored_functions(patient: Patient) -> Iterator[Finding]:
    """Functions that a module holds as objects are not reached by the casts of O1 and O4."""
    if not patient.policy.patch_torch_functions:
        return
    plain = {}
    for row in OP_RULES:
        function = getattr(row.owner, row.name, None)
        plain[id(getattr(function, "__wrapped__", function))] = row.name
    for path, module in patient.model.named_modules():
        for name, value in vars(module).items():
            if id(value) in plain and not isinstance(value, CastWrapper):
                yield Finding(
                    "stored function",
                    Severity.RISK,
                    f"{path or type(module).__name__}.{name}",
                    f"holds {plain[id(value)]}, taken before amp.initialize: it will not be cast",
                    "call it by its name in forward, or store it after initialize",
                )


def check_order(patient: Patient) -> Iterator[Finding]:
    """Model, optimizer and scheduler belong together, and are built in that order in FP32."""
    half = [path for path, p in patient.model.named_parameters() if p.dtype in HALF_DTYPES]
    if half:
        yield Finding(
            "order",
            Severity.WRONG,
            half[0],
            "is in half already, so that FP32 values are lost",
            "leave out .half(): initialize casts",
        )
    if any(is_lazy(p) for p in patient.model.parameters()):
        yield Finding(
            "order",
            Severity.WRONG,
            type(patient.model).__name__,
            "has lazy parameters",
            "run one forward pass before the optimizer is built",
        )
    if patient.optimizer is not None:
        yield from _optimizer_findings(patient)
        yield from _scheduler_findings(patient)


def _optimizer_findings(patient: Patient) -> Iterator[Finding]:
    parameters = {id(p) for p in patient.model.parameters()}
    name = type(patient.optimizer).__name__
    held = [p for group in patient.optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in parameters for p in held)
    if strangers:
        yield Finding(
            "order",
            Severity.WRONG,
            name,
            f"holds {strangers} of {len(held)} tensors that the model does not have: it was built "
            "before the model was moved, cast or copied, or for another one",
            "build the optimizer from model.parameters() after the model is final",
        )
    left = sum(p.requires_grad for p in patient.model.parameters()) - (len(held) - strangers)
    if left > 0 and not strangers:
        yield Finding(
            "order",
            Severity.RISK,
            name,
            f"does not hold {left} weights that require gradients",
            "add them, or freeze them by requires_grad_(False)",
        )


def _scheduler_findings(patient: Patient) -> Iterator[Finding]:
    driven = getattr(patient.scheduler, "optimizer", patient.optimizer)
    if driven is not patient.optimizer:
        yield Finding(
            "order",
            Severity.WRONG,
            type(patient.scheduler).__name__,
            f"drives another {type(driven).__name__} than the one given: it was built before the "
            "optimizer was built anew",
            "build the scheduler after the optimizer that is trained with",
        )
