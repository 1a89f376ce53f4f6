"""Count the bytes of live tensors, where no allocator of a device does it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own gap
    """Inside, follows the storages of all tensors that operations return, forward and backward.

    `peak` is the most bytes that lived at once. Tensors made before count from their first use on;
    what an operation allocates and frees inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own gap
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and take note of what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((args, result)):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._note(value.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # noqa: SLF001 (no public name for the identity of a storage)
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key).atexit = False
        self._sizes[key] = size
        self.now += size - (known or 0)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
