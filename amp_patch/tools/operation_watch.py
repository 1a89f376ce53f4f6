"""Look at every operation of a model, forward and backward, with the module it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from amp_patch.tools.module_paths import ModuleStack

_KEY = "amp_patch module"
# They return memory that nobody has written to yet.
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")


@dataclass(frozen=True)
class Operation:
    """One operation that ran: its name in torch's dispatcher, where, and what went in and out.

    `node` is the step of autograd that called it, "" in the forward pass.
    """

    name: str
    module: str
    node: str
    args: Any
    result: Any

    @property
    def inputs(self) -> list[Tensor]:
        """The floating tensors that went in."""
        return floating_tensors(self.args)

    @property
    def outputs(self) -> list[Tensor]:
        """The floating tensors that came out."""
        return floating_tensors(self.result)

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to the backward pass."""
        return bool(self.node)


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own gap
    """Calls `before` and `after` around each operation that runs inside `watching`.

    What subclasses compute there is not watched itself. An operation in the backward pass belongs
    to the module whose forward made the step of autograd that calls it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own gap
        self._modules = _LabellingStack(model)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside."""
        with self._modules.following(), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation between the two looks at it. Modes do not see what runs in here."""
        kwargs = kwargs or {}
        seen = self.before(func, (args, kwargs))
        result = func(*args, **kwargs)
        name = str(func.overloadpacket).rpartition(".")[2]
        if name not in _UNWRITTEN:
            given_back = _written(func, args) if result is None else result
            self.after(self._operation(name, (args, kwargs), given_back), seen)
        return result

    def _operation(self, name: str, args: Any, result: Any) -> Operation:
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001 (no public name)
        if node is None:
            return Operation(name, self._modules.path, "", args, result)
        path = node.metadata.get(_KEY, "")
        return Operation(name, str(path), str(node.name()), args, result)

    def before(self, func: Any, args: Any) -> Any:
        """For subclasses: what `after` needs to know of the time before."""

    def after(self, operation: Operation, seen: Any) -> None:
        """For subclasses: an operation has run."""


def _written(func: Any, args: Any) -> list[Any]:
    """What an operation that returns nothing, as grouped ones in place do, has written into."""
    pairs = zip(func._schema.arguments, args, strict=False)  # noqa: SLF001 (no public name)
    return [value for one, value in pairs if one.alias_info is not None and one.alias_info.is_write]


class _LabellingStack(ModuleStack):
    """Writes the path of a module on the steps of autograd that its forward has made."""

    def left(self, module: nn.Module, result: Any) -> None:
        path = self.path_of(module)
        ahead: list[Any] = [
            tensor.grad_fn for tensor in tree_iter(result) if isinstance(tensor, Tensor)
        ]
        while ahead:
            node = ahead.pop()
            if node is None or _KEY in node.metadata or not self._is_of(module, node):
                continue
            node.metadata[_KEY] = path
            ahead += [following for following, _ in node.next_functions]

    def _is_of(self, module: nn.Module, node: Any) -> bool:
        """Not made before the forward of `module` began: autograd numbers its steps."""
        return bool(node._sequence_nr() >= self._begun[id(module)]) and node.name() != _LEAF  # noqa: SLF001

    def entered(self, module: nn.Module) -> None:
        self._begun[id(module)] = torch._C._autograd._get_sequence_nr()  # noqa: SLF001 (no public name)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._begun: dict[int, int] = {}


_LEAF = "torch::autograd::AccumulateGrad"


def floating_tensors(values: Any) -> list[Tensor]:
    """The floating tensors in any nesting of lists, tuples and dicts."""
    return [
        value
        for value in tree_iter(values)
        if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided
    ]
