"""Arguments that several commands take, parsed: a wrong one ends as argparse ends them."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

from amp_patch.errors import AmpError
from amp_patch.policy import parse_opt_level
from amp_patch.tools.ink import check_picture_name

USAGE_ERROR = 2  # the exit code with which argparse ends, too


def importable(text: str) -> Any:
    """Import "package.module:name", also from the folder that the command is run in."""
    if ":" not in text:
        raise argparse.ArgumentTypeError(f"expected package.module:name, found {text!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return pkgutil.resolve_name(text)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the module raises what it likes)
        what = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise argparse.ArgumentTypeError(f"cannot import {text!r}: {what}{error}") from None


def opt_levels(text: str) -> tuple[str, ...]:
    """Parse "O0,O1" to the names of known levels."""
    try:
        levels = tuple(parse_opt_level(name.strip()) for name in text.split(","))
    except AmpError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if len(set(levels)) < len(levels):
        raise argparse.ArgumentTypeError(f"expected each level once, found {text!r}")
    return levels


def positive_count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def writable_file(text: str) -> Path:
    """Parse the path of a file; one that cannot be written shows before the work, not after."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing folder, found {text!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, found {text!r}")
    return path


def picture_file(text: str) -> Path:
    """The same for a picture, whose kind the name tells."""
    try:
        check_picture_name(text)
    except AmpError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return writable_file(text)
