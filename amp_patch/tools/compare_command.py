"""The command `python -m amp_patch compare`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amp_patch.errors import AmpError
from amp_patch.tools.command_arguments import (
    USAGE_ERROR,
    importable,
    opt_levels,
    picture_file,
    positive_count,
    writable_file,
)
from amp_patch.tools.compare import Progress, compare
from amp_patch.tools.extras import find_extra, load_extra


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser = commands.add_parser(
        "compare",
        help="train a model of yours at several opt levels and compare",
        description="Train the same model from the same weights at several opt levels; print a "
        "table and a verdict, and write a picture, a page or JSON. Time, memory, losses, "
        "gradients beside those of O0, and what of them float16 could not hold.",
    )
    _add_what_to_train(parser)
    _add_how_much(parser)
    for name, kind, text in (
        ("html", writable_file, "a page"),
        ("plot", picture_file, "a picture (PNG, SVG or PDF)"),
        ("json", writable_file, "the figures"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="FILE", help=f"write {text} to FILE")
    parser.set_defaults(run=run)


def _add_what_to_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "build",
        nargs="?",
        type=importable,
        metavar="PACKAGE.MODULE:BUILD",
        help="a function that returns (model, optimizer) or (model, optimizer, scheduler)",
    )
    parser.add_argument(
        "--batches",
        type=importable,
        metavar="PACKAGE.MODULE:BATCHES",
        help="an iterable of batches, or a function that returns one",
    )
    parser.add_argument(
        "--loss",
        type=importable,
        metavar="PACKAGE.MODULE:LOSS",
        help="a function loss(model, batch); by default what the model returns, or cross entropy "
        "or the mean squared error against the targets of (inputs, targets)",
    )
    parser.add_argument("--demo", action="store_true", help="compare on scikit-learn's digits")


def _add_how_much(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--levels",
        type=opt_levels,
        default=("O0", "O1", "O2", "O3"),
        metavar="O0,O1,...",
        help="opt levels (default: O0,O1,O2,O3)",
    )
    for name, default, text in (
        ("steps", 100, "steps of each training"),
        ("seeds", 1, "trainings of each level"),
        ("turns", 5, "turns in which the levels are timed"),
    ):
        parser.add_argument(
            f"--{name}",
            type=positive_count,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--isolate", action="store_true", help="run each level in a process of its own"
    )


def run(options: argparse.Namespace) -> int:
    """Compare, print, write the files. Returns the exit code."""
    try:
        build, batches = _what_to_train(options)
        if options.html or options.plot:
            load_extra("matplotlib.figure", "plots")  # before the work, not after
        with _progress_bar() as progress:
            found = compare(
                build,
                batches,
                options.levels,
                options.steps,
                options.seeds,
                options.loss,
                isolate=options.isolate,
                turns=options.turns,
                progress=progress,
            )
    except AmpError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    print(found)
    if options.json:  # first, since it needs no more than the figures
        found.to_json(options.json)
    if options.html:
        found.to_html(options.html)
    if options.plot:
        found.plot(options.plot)
    return 0


def _what_to_train(options: argparse.Namespace) -> tuple[Any, Any]:
    if options.demo:
        load_extra("sklearn", "demo")
        # Not at the top: it needs scikit-learn, which the rest of this command does not.
        demo = importlib.import_module("amp_patch.tools.compare_demo")
        return demo.build, demo.batches
    if options.build is None or options.batches is None:
        raise AmpError(
            "compare: expected PACKAGE.MODULE:BUILD and --batches PACKAGE.MODULE:BATCHES, or --demo"
        )
    return options.build, options.batches


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """On the error stream: a bar where rich is installed, else a line for each piece of work."""
    progress, console = find_extra("rich.progress"), find_extra("rich.console")
    if progress is None or console is None:
        yield _print_line
        return
    with progress.Progress(console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def _print_line(done: int, total: int, what: str) -> None:
    print(f"[{done + 1}/{total}] {what}", file=sys.stderr)
