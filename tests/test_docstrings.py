"""The examples in the docstrings run, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

import amp_patch as amp

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _examples() -> Iterator[doctest.DocTest]:
    for found in pkgutil.walk_packages(amp.__path__, f"{amp.__name__}."):
        module = importlib.import_module(found.name)
        yield from (test for test in doctest.DocTestFinder().find(module) if test.examples)


EXAMPLES = {test.name: test for test in _examples()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    report: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(EXAMPLES[name], out=report.append)
    if report:
        pytest.fail("".join(report), pytrace=False)


@pytest.mark.parametrize(
    "name", [name for name in amp.__all__ if inspect.isfunction(getattr(amp, name))]
)
def test_public_function_has_an_example(name: str) -> None:
    assert f"{getattr(amp, name).__module__}.{name}" in EXAMPLES
