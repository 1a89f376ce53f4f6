"""Libraries that only some commands need, brought in when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from amp_patch.errors import AmpError


def load_extra(module: str, extra: str) -> Any:
    """The module of a library that comes with an extra; AmpError that names it if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        wanted = module.partition(".")[0]
        if str(error.name).partition(".")[0] != wanted:
            raise
        raise AmpError(
            f"expected the library {wanted}, found that it is not installed; "
            f'pip install "amp_patch[{extra}]"'
        ) from None


def find_extra(module: str) -> Any | None:
    """The module of an extra library, or None where there is none and plain text will do."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None
