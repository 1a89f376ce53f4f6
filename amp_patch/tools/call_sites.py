"""Find the line of the user's code that is running."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch
import wrapt

_OWN = str(Path(__file__).parent.parent) + os.sep
_NOT_THE_USER = (
    _OWN,
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(wrapt.__file__).parent}{os.sep}",
    str(contextlib.__file__),
    str(functools.__file__),
    "<frozen",
)


def call_site() -> str:
    """ "file:line" of the innermost frame that is neither torch's nor amp_patch's."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith(_NOT_THE_USER):
            return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
    return "?"


def user_frames(count: int) -> tuple[str, ...]:
    """ "file:line in function" of the innermost frames of the user's code, the innermost last."""
    found = [
        f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        for frame in _frames()
        if not frame.f_code.co_filename.startswith(_NOT_THE_USER)
    ]
    return tuple(reversed(found[:count]))


def is_called_by_amp(depth: int) -> bool:
    """Whether the frame `depth` above the caller is one of amp_patch's."""
    return sys._getframe(depth + 1).f_code.co_filename.startswith(_OWN)


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _shown(file: str) -> str:
    """Relative to the working folder where it is inside, for shorter lines."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name if path.suffix else file
