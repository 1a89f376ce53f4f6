"""What the source of a model's modules tells a doctor: mask constants, losses of probabilities."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

LeaveOut = Callable[[str], bool]  # of the path of a module

_LARGEST = torch.finfo(torch.float16).max
_SENSITIVE = ("masked_fill", "masked_fill_", "where", "full", "full_like", "fill_", "new_full")


@dataclass(frozen=True)
class SourceNote:
    """Something at a line of a module's class."""

    module: str
    place: str
    text: str


def large_constants(model: nn.Module, leave_out: LeaveOut) -> Iterator[SourceNote]:
    """Numbers beyond float16's range where values of a tensor are set, or added to one."""
    for path, place, tree in _trees(model, leave_out):
        for node in ast.walk(tree):
            for number in _numbers_set_by(node):
                if _LARGEST < abs(number) < float("inf"):
                    line = getattr(node, "lineno", 1)
                    yield SourceNote(path, place(line), f"the constant {number:g}")


def probability_losses(model: nn.Module, leave_out: LeaveOut) -> Iterator[SourceNote]:
    """Calls of `binary_cross_entropy`, which wants probabilities and not logits."""
    for path, place, tree in _trees(model, leave_out):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) == "binary_cross_entropy":
                yield SourceNote(path, place(node.lineno), "binary_cross_entropy")


def _trees(
    model: nn.Module, leave_out: LeaveOut
) -> Iterator[tuple[str, Callable[[int], str], ast.AST]]:
    """The source of every class of the user's own among the modules that are not left out."""
    seen: set[type] = set()
    for path, module in model.named_modules():
        kind = type(module)
        if leave_out(path) or kind in seen or kind.__module__.startswith("torch."):
            continue
        seen.add(kind)
        try:
            lines, first = inspect.getsourcelines(kind)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):  # typed into a shell, or made by code
            continue
        yield path or kind.__name__, _Placer(kind, first), tree


class _Placer:
    def __init__(self, kind: type, first: int) -> None:
        self._kind = kind
        self._first = first

    def __call__(self, line: int) -> str:
        return f"{self._kind.__name__}, line {self._first + line - 1}"


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _numbers_set_by(node: ast.AST) -> Iterator[float]:
    if isinstance(node, ast.Call) and _called(node) in _SENSITIVE:
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from _number(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
        yield from _number(node.left)  # (1 - mask) * -1e9
        yield from _number(node.right)


def _number(node: ast.AST) -> Iterator[float]:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return
    if isinstance(value, (int, float)):
        yield float(value)
