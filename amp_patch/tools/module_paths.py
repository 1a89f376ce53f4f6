"""Know which module of which model is running its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class ModuleStack:
    """The modules whose forward is running, the innermost last, with their paths.

    A path counts from the outermost module that is running, or from `root` where one is given.
    """

    def __init__(self, root: nn.Module | None = None) -> None:
        self._root = root
        self._paths: dict[int, str] = {} if root is None else _paths(root)
        self._running: list[nn.Module] = []

    @property
    def path(self) -> str:
        """The path of the innermost module; the outermost one is called by its type."""
        return self.path_of(self._running[-1]) if self._running else ""

    def path_of(self, module: nn.Module) -> str:
        """The path of a module that is running."""
        return self._paths.get(id(module)) or type(module).__name__

    @contextmanager
    def following(self) -> Iterator[ModuleStack]:
        """Follow every forward of this process inside."""
        enter = register_module_forward_pre_hook(self._enter)
        leave = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield self
        finally:
            enter.remove()
            leave.remove()
            self._running.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._running and self._root is None:
            self._paths = _paths(module)
        self._running.append(module)
        self.entered(module)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        while self._running and self._running[-1] is not module:
            self._running.pop()  # its forward raised where no hook was called
        if self._running:
            self.left(module, result)
            self._running.pop()

    def entered(self, module: nn.Module) -> None:
        """For subclasses: the forward of `module` begins."""

    def left(self, module: nn.Module, result: Any) -> None:
        """For subclasses: the forward of `module` has given `result`."""


def _paths(root: nn.Module) -> dict[int, str]:
    return {id(module): path for path, module in root.named_modules()}
