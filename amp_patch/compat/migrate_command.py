"""The command `python -m amp_patch migrate`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amp_patch.errors import AmpError
from amp_patch.tools.command_arguments import USAGE_ERROR
from amp_patch.tools.extras import load_extra

_FAILED = 1
_NOTEBOOK = ".ipynb"
_LEFT = (
    "notebooks are not migrated; put `import amp_patch; amp_patch.install_as_apex()` into the "
    "first cell, or migrate what `jupyter nbconvert --to script` makes of it"
)
_NO_END = "\n\\ No newline at end of file\n"


def add_command(subparsers: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser = subparsers.add_parser(
        "migrate",
        help="rewrite scripts that import apex",
        description="Rewrite the imports of apex in a file, or in all Python files of a folder, to "
        "amp_patch and torch, and print the difference. What is not known stays, below a comment "
        "that says why; notebooks stay, and are named. Needs the extra: pip install "
        "'amp_patch[migrate]'.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a file or a folder")
    parser.add_argument("--write", action="store_true", help="change the files")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the differences; write the files if asked to. 1 if a file could not be migrated."""
    try:
        libcst = load_extra("libcst", "migrate")
    except AmpError as error:
        print(f"migrate: {error}", file=sys.stderr)
        return USAGE_ERROR
    if not options.path.exists():
        print(f"migrate: expected a file or a folder, found {options.path}", file=sys.stderr)
        return USAGE_ERROR
    codemod = importlib.import_module("amp_patch.compat.codemod")
    changed = remarks = failed = 0
    for path in _sources(options.path):
        before = path.read_bytes()
        if b"apex" not in before:
            continue
        if path.suffix == _NOTEBOOK:
            print(f"migrate: {path}: {_LEFT}", file=sys.stderr)
            failed += 1
            continue
        try:
            migrated = codemod.migrate_source(before)
        except (libcst.ParserSyntaxError, UnicodeDecodeError) as error:
            print(f"migrate: {path}: {str(error).splitlines()[0]}", file=sys.stderr)
            failed += 1
            continue
        after = migrated.source.encode(migrated.encoding)
        remarks += len(migrated.remarks)
        if after == before:
            continue
        changed += 1
        sys.stdout.writelines(_difference(path, before.decode(migrated.encoding), migrated.source))
        if options.write:
            path.write_bytes(after)
    did = "changed" if options.write else "would change (--write changes them)"
    left = f", {failed} file(s) not migrated" if failed else ""
    print(f"migrate: {changed} file(s) {did}, {remarks} comment(s) left{left}", file=sys.stderr)
    return _FAILED if failed else 0


def _sources(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        found = (one for one in path.rglob("*") if one.suffix in (".py", _NOTEBOOK))
        yield from sorted(one for one in found if one.is_file())


def _difference(path: Path, before: str, after: str) -> Iterator[str]:
    """A unified diff, as `patch` takes it: lines end with a line feed, and nowhere else."""
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (before, after))
    for line in difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"):
        yield line if line.endswith("\n") else line + _NO_END
