"""Where the runs of a comparison happen: in this process, or each variant in one of its own."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

from amp_patch.errors import AmpError

Result = TypeVar("Result")


class Place:
    """Where functions are called on behalf of a variant: in this process, unless a subclass."""

    def call(self, label: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function for the variant of this label, and wait for what it returns."""
        return function(*arguments)

    def close(self) -> None:
        """End what was begun for the calls."""


class OwnProcesses(Place):
    """One fresh process for each label, kept for later calls. One of them works at a time."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def call(self, label: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function in the process of this label. All goes there and back by pickle."""
        if label not in self._pools:
            pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            self._pools[label] = self._stack.enter_context(pool)
        try:
            # As bytes: torch would share the memory of tensors, which ends with the process.
            packed = pickle.dumps((function, arguments))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise AmpError(
                "isolate=True: expected build, batches and loss that another process can import "
                f"(functions at the top of a module, or lists), found one that it cannot: {error}"
            ) from None
        result: Result = pickle.loads(self._pools[label].submit(_call, packed).result())  # noqa: S301 (made here)
        return result

    def close(self) -> None:
        """End the processes."""
        self._stack.close()


def _call(packed: bytes) -> bytes:
    function, arguments = pickle.loads(packed)  # noqa: S301 (made by the parent process)
    return pickle.dumps(function(*arguments))
