"""The command `python -m amp_patch run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amp_patch.compat.run_settings import RunSettings
from amp_patch.compat.script import NoScriptError, run_as_main
from amp_patch.policy import OPT_LEVELS
from amp_patch.tools.command_arguments import USAGE_ERROR, writable_file


def add_command(subparsers: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a script that was written for apex",
        usage="python -m amp_patch run [-h] [--opt-level LEVEL] [--report FILE] "
        "(SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Run an unmodified script as __main__, with amp_patch under the names of apex, "
        "here and in its workers of multiprocessing; a Python that it starts by a command of its "
        "own needs `-m amp_patch run` in that command. Under torchrun: torchrun "
        "--nproc-per-node=2 -m amp_patch run train.py.",
    )
    parser.add_argument(
        "--opt-level",
        choices=tuple(OPT_LEVELS),
        metavar="LEVEL",
        help="the level in place of the script's own; what the script says of the properties of "
        "its level is left out",
    )
    parser.add_argument(
        "--report",
        type=writable_file,
        metavar="FILE",
        help="write level, steps, skips, scales and time in casts as JSON",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module, not a file; the rest are its arguments",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of the script"
    )
    parser.set_defaults(run=run)


def with_module_apart(arguments: Sequence[str]) -> list[str]:
    """The arguments of the command line with `-m MODULE` for `-mMODULE`, which Python takes too.

    >>> with_module_apart(["run", "--opt-level", "O1", "-mpackage.train", "-mine"])
    ['run', '--opt-level', 'O1', '-m', 'package.train', '-mine']
    """
    found = list(arguments)
    position = 1
    while found[:1] == ["run"] and position < len(found):
        one = found[position]
        if one.startswith("-m"):
            found[position : position + 1] = ["-m", one[2:]] if one != "-m" else ["-m"]
            break
        if not one.startswith("-"):
            break
        position += 2 if one.startswith("--") and "=" not in one else 1  # these take a value
    return found


def run(options: argparse.Namespace, *, until_exit: bool = False) -> int:
    """Run the script. Its SystemExit, and what it raises, pass through. For `until_exit` see
    `run_as_main`.
    """
    if not options.arguments:
        print("run: expected a script, or -m and a module", file=sys.stderr)
        return USAGE_ERROR
    report = options.report
    if report is not None:
        report = report.resolve()
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first and report.is_file():  # for others, it is of another process of now
            report.unlink(missing_ok=True)
    target = options.arguments[0]
    if not options.is_module:
        target = str(Path.cwd() / target)  # links and ".." stay, as in the __file__ of Python
    settings = RunSettings(target, options.is_module, options.opt_level, report and str(report))
    settings.publish()
    try:
        run_as_main(settings, options.arguments, until_exit=until_exit)
    except NoScriptError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    return 0
