"""How amp_patch speaks up: an error for misuse, a warning for what looks wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path

_TORCH = importlib.util.find_spec("torch")
_NOT_THE_USER = (
    f"{Path(__file__).parent}{os.sep}",
    str(contextlib.__file__),
    *(f"{path}{os.sep}" for path in (_TORCH.submodule_search_locations or () if _TORCH else ())),
)


class AmpError(RuntimeError):
    """Raised on misuse. The message says what was expected, what was found and what to do."""


class AmpWarning(UserWarning):
    """Issued where something is allowed but is probably not what was meant."""


def warn(message: str) -> None:
    """Issue an `AmpWarning` that points at the line of the user's code that led here."""
    depth = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame = frame.f_back
        depth += 1
    warnings.warn(message, AmpWarning, stacklevel=depth)
