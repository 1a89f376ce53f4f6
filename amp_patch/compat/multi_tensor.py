"""The caller of multi-tensor kernels that scripts ask for, on a build without such kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amp_patch.errors import AmpError


class MultiTensorApply:
    """Calls `op` on lists of tensors. `available` is False: there are no kernels of its own.

    A function of the user's own that takes the arguments of such kernels is called all the same.
    """

    available = False
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.import_err = ImportError("no module named amp_C: amp_patch has no kernels of its own")

    def check_avail(self) -> None:
        """Raise AmpError."""
        raise AmpError(
            "multi_tensor_applier: expected kernels that were compiled, found none; use "
            "torch._foreach_* functions, as the optimizers of torch do with foreach=True"
        )

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Sequence[Any], *args: Any
    ) -> Any:
        if not callable(op):
            self.check_avail()
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
