"""Where the runs of a comparison happen: in this process, or each variant in one of its own."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar

from amp_patch.errors import AmpError

Result = TypeVar("Result")


class Place(Protocol):
    """Where functions are called on behalf of a variant."""

    def call(self, label: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call the function for the variant of this label, and wait for what it returns."""

    def __enter__(self) -> Place: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class ThisProcess:
    """Calls in this process."""

    def call(self, label: str, function: Callable[..., Result], *arguments: Any) -> Result:  # noqa: ARG002
        """Call the function."""
        return function(*arguments)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


class OwnProcesses:
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

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()


def _call(packed: bytes) -> bytes:
    function, arguments = pickle.loads(packed)  # noqa: S301 (made by the parent process)
    return pickle.dumps(function(*arguments))
