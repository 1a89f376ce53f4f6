"""Where torch keeps an operation: `exp` is `torch.exp` and `Tensor.exp`, `pow` is also `**`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

# Where an operation may have a spelling.
_NAMESPACES = (
    torch,
    torch.Tensor,
    F,
    torch.functional,
    torch.linalg,
    torch.special,
    torch.fft,
)
# Operators of Python that are attributes of their own: `x ** 2` does not look up `x.pow`.
_OPERATORS: Mapping[str, str] = MappingProxyType(
    {
        "matmul": "__matmul__",  # `__rmatmul__` calls `torch.matmul`
        "pow": "__pow__ __rpow__",
        "pow_": "__ipow__",
        "add": "__add__ __radd__",
        "add_": "__iadd__",
        "sub": "__sub__",
        "rsub": "__rsub__",
        "sub_": "__isub__",
        "mul": "__mul__ __rmul__",
        "mul_": "__imul__",
        "div": "__div__ __truediv__ __rdiv__ __rtruediv__",
        "div_": "__idiv__ __itruediv__",
        "floor_divide": "__floordiv__ __rfloordiv__",
        "floor_divide_": "__ifloordiv__",
        "remainder": "__mod__ __rmod__",
        "remainder_": "__imod__",
        "eq": "__eq__",
        "ne": "__ne__",
        "lt": "__lt__",
        "le": "__le__",
        "gt": "__gt__",
        "ge": "__ge__",
        "abs": "__abs__",
        "neg": "__neg__",
    }
)
# Functions of torch.nn.functional that only call the function or the method of the same name.
DELEGATING = frozenset(
    {
        "batch_norm",
        "embedding_bag",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "log_softmax",
        "rms_norm",
        "softmax",
    }
)


def spellings(operation: str) -> Iterator[tuple[Any, str]]:
    """Owner and attribute of every spelling of `operation` in this torch; not those in place."""
    if "." in operation:
        path, _, name = operation.rpartition(".")
        owner: Any = torch
        for part in path.split("."):
            owner = getattr(owner, part, None)
        if hasattr(owner, name):
            yield owner, name
        return
    is_found = False
    for owner in _NAMESPACES:
        is_delegate = owner is F and operation in DELEGATING
        if callable(getattr(owner, operation, None)) and not is_delegate:
            is_found = True
            yield owner, operation
    if not is_found and hasattr(torch._C._nn, operation):
        yield torch._C._nn, operation
    for name in _OPERATORS.get(operation, "").split():
        if hasattr(torch.Tensor, name):
            yield torch.Tensor, name


def is_in_place(name: str) -> bool:
    """Whether `name` is that of a function that writes into its first argument."""
    return name.endswith("_") and not name.endswith("__")


def operation_name(operation: str | Callable[..., Any], dotted: Container[str]) -> str | None:
    """What `spellings` takes for `operation`, a path or a function of torch; None if it is none.

    `dotted` holds the names that are kept apart from others of the same last part.
    """
    found = _find(operation) if isinstance(operation, str) else _search(operation)
    if found is None:
        return None
    path, name = found
    for whole, operators in _OPERATORS.items():
        if name in operators.split():
            name = whole
    if is_in_place(name) and any(True for _ in spellings(name[:-1])):
        name = name[:-1]
    full = ".".join([*path, name])
    return full if full in dotted or not any(True for _ in spellings(name)) else name


def _find(text: str) -> tuple[list[str], str] | None:
    *path, name = text.removeprefix("torch.").split(".")
    owner: Any = torch
    for part in path:
        owner = getattr(owner, part, None)
    if callable(getattr(owner, name, None)) and not isinstance(getattr(owner, name), type):
        return path, name
    is_bare = not path and not text.startswith("torch.") and any(True for _ in spellings(name))
    return (path, name) if is_bare else None


def _search(function: Callable[..., Any]) -> tuple[list[str], str] | None:
    """Where `function` is kept. Compared by `==`, so that a wrapped one is found as well."""
    for owner in (*_NAMESPACES, torch._C._nn, torch._VF):
        path = [] if owner is torch else owner.__name__.removeprefix("torch.").split(".")
        for name in dir(owner):
            if getattr(owner, name, None) == function:
                return path, name
    return None
