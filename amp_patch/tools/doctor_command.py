"""The command `python -m amp_patch doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from torch import nn

from amp_patch.errors import AmpError
from amp_patch.policy import OPT_LEVELS
from amp_patch.tools.command_arguments import USAGE_ERROR, importable, writable_file
from amp_patch.tools.doctor import doctor

NOT_HEALTHY = 1


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser = commands.add_parser(
        "doctor",
        help="look a model of yours over before it is trained in mixed precision",
        description="Print what stands against training at a level, each finding with its fix. The "
        "exit code is 1 if something is wrong, 0 if there are only risks and lost time.",
    )
    parser.add_argument(
        "build",
        type=importable,
        metavar="PACKAGE.MODULE:BUILD",
        help="a function that returns a model or (model, optimizer, ...), or a model",
    )
    parser.add_argument("--level", choices=OPT_LEVELS, default="O1", help="default: %(default)s")
    parser.add_argument(
        "--json", type=writable_file, metavar="FILE", help="write the findings to FILE"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine, print, write the file. Returns the exit code."""
    try:
        model, optimizer, scheduler = _built(options.build)
        found = doctor(model, optimizer, options.level, scheduler=scheduler)
    except AmpError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    print(found)
    if options.json:
        options.json.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
    return 0 if found.is_healthy else NOT_HEALTHY


def _built(build: Any) -> tuple[Any, Any, Any]:
    """The model, and the optimizer and scheduler where there are some."""
    if not isinstance(build, nn.Module) and not callable(build):
        raise AmpError(f"build: expected a function or a torch.nn.Module, found {build!r}")
    made = build if isinstance(build, nn.Module) else build()
    parts = [*made] if isinstance(made, (tuple, list)) else [made]
    model, optimizer, scheduler = [*parts, None, None, None][:3]
    return model, optimizer, scheduler
