"""Count how often Python waits for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def counted_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every read of a tensor's value from Python, which a device has to be waited for."""
    waits: list[str] = []
    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
            plain = getattr(torch.Tensor, name)

            def counting(tensor: Any, *args: Any, plain: Any = plain, name: str = name) -> Any:
                waits.append(name)
                return plain(tensor, *args)

            patched.setattr(torch.Tensor, name, counting)
        yield waits
