"""The checks of a doctor that are about what was built and stored when: order, and references."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from amp_patch.policy import HALF_DTYPES
from amp_patch.tools.diagnosis import Finding, Severity
from amp_patch.tools.patient import Patient


def check_stored_functions(patient: Patient) -> Iterator[Finding]:
    """Functions that a module holds in containers, or its class, escape the casts of O1 and O4.

    `initialize` reaches those that are an attribute of a module of the model.
    """
    if not patient.policy.patch_torch_functions:
        return
    plain = {}
    for row in patient.rules:
        function = getattr(row.owner, row.name, None)
        plain[id(getattr(function, "__wrapped__", function))] = row.name
    reached = {id(module) for module in patient.model.modules()}
    for path, module in patient.model.named_modules():
        for name, values in _holders(module):
            for held in _ids_in(values, reached):
                if held in plain:
                    yield Finding(
                        "stored function",
                        Severity.RISK,
                        f"{path or type(module).__name__}.{name}",
                        f"holds {plain[held]}, taken before amp.initialize: it will not be cast",
                        "call it by its name in forward, make it an attribute of the module, or "
                        "store it after initialize",
                    )


def _holders(module: nn.Module) -> Iterator[tuple[str, Iterable[Any]]]:
    """What the attributes of a module hold, and the attributes of its class."""
    for name, value in vars(module).items():
        yield name, _parts(value)
    for owner in type(module).__mro__:
        if not _is_of_torch(owner):
            yield from ((name, [value]) for name, value in vars(owner).items())


def _ids_in(values: Iterable[Any], reached: set[int]) -> list[int]:
    """Those of all that is in the values, however nested; `reached` and what is below is not."""
    seen: dict[int, Any] = {}
    ahead = list(values)
    while ahead:
        value = ahead.pop()
        if id(value) not in seen and id(value) not in reached:
            seen[id(value)] = value
            ahead += _parts(value)
    return list(seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, types.FunctionType):
        return _captured(value)
    has_attributes = not isinstance(value, type) and not _is_of_torch(type(value))
    return getattr(value, "__dict__", {}).values() if has_attributes else ()


def _is_of_torch(owner: Any) -> bool:
    return str(owner.__module__).partition(".")[0] in {"torch", "builtins"}


def _captured(function: types.FunctionType) -> Iterator[Any]:
    """The defaults and the closure of a function of the user's own."""
    if _is_of_torch(function):
        return
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable without a value yet
            yield cell.cell_contents


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
