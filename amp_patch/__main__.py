"""The command line: `demo`, `compare`, `doctor`, `run` and `migrate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from amp_patch.compat import migrate_command, run_command
from amp_patch.policy import OPT_LEVELS
from amp_patch.tools import compare_command, doctor_command
from amp_patch.tools.command_arguments import USAGE_ERROR, opt_levels, positive_count, writable_file
from amp_patch.version import __version__

DEMO_MODULES = ("numpy", "rich", "sklearn")
DEFAULT_EPOCHS = 20
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, *, until_exit: bool = False) -> int:
    """Run the command line and return its exit code. A wrong argument raises SystemExit(2).

    `until_exit` says that the process ends with it: what `run` puts in place then stays.
    """
    given = sys.argv[1:] if arguments is None else arguments
    options = make_parser().parse_args(run_command.with_module_apart(given))
    if options.command == "run":  # of the script, an interrupt is a traceback like any other
        return run_command.run(options, until_exit=until_exit)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_patch", description="Mixed precision training in PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"amp_patch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_demo(commands)
    compare_command.add_command(commands)
    doctor_command.add_command(commands)
    run_command.add_command(commands)
    migrate_command.add_command(commands)
    return parser


def add_demo(commands: Any) -> None:
    """Add the command `demo` to the parsers of the command line."""
    demo = commands.add_parser(
        "demo",
        help="train a small network on handwritten digits at each opt level and compare",
        description="Train a small convolutional network on the handwritten digits of "
        "scikit-learn, from the same weights and in the same order at each opt level, and print "
        "one table. Needs the extra: pip install 'amp_patch[demo]'.",
    )
    demo.add_argument(
        "--levels",
        type=opt_levels,
        default=tuple(OPT_LEVELS),
        metavar="O0,O1,...",
        help="opt levels to train at, in this order (default: all six)",
    )
    demo.add_argument(
        "--seeds",
        type=positive_count,
        default=1,
        metavar="N",
        help="train each level from N seeds and average (default: %(default)s)",
    )
    demo.add_argument(
        "--epochs",
        type=positive_count,
        default=DEFAULT_EPOCHS,
        metavar="N",
        help="times that each training goes through the scans (default: %(default)s)",
    )
    demo.add_argument(
        "--json", type=writable_file, metavar="FILE", help="write the same figures to FILE"
    )
    demo.add_argument(
        "--device",
        type=usable_device,
        default="cpu",
        metavar="NAME",
        help="where to train, in torch's words (default: %(default)s)",
    )
    demo.set_defaults(run=run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo; without its libraries say in one line how to get them."""
    try:
        # Here, because the rest of the command line works without these libraries.
        from rich.console import Console  # noqa: PLC0415

        from amp_patch.tools import demo  # noqa: PLC0415
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in DEMO_MODULES:
            raise
        print(
            f"the demo needs scikit-learn and rich, but there is no module {missing!r}; "
            'pip install "amp_patch[demo]"',
            file=sys.stderr,
        )
        return USAGE_ERROR
    demo.run_demo(
        demo.DemoOptions(options.levels, options.seeds, options.epochs, options.device),
        options.json,
        output=Console(),
        news=Console(stderr=True),
    )
    return 0


def usable_device(text: str) -> torch.device:
    """Parse the name of a device that this torch can put a tensor on."""
    try:
        probe = torch.ones(1, device=text)
        probe.item()  # the meta device makes tensors, but has no values to train on
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch built without it
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(
            f"expected a device that torch can use here, found {text!r} ({reason})"
        ) from None
    return probe.device


if __name__ == "__main__":
    raise SystemExit(main(until_exit=True))
