"""How amp_patch speaks up: the kinds of error and warning, and whose line a warning points at."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_patch as amp
from amp_patch.errors import AmpError, AmpWarning, warn

PACKAGE = Path(amp.__file__).parent


def as_if_in(filename: str, source: str, name: str) -> Callable[..., Any]:
    """The function `name` of `source`, compiled as if it stood in `filename`."""
    namespace: dict[str, Any] = {"warn": warn, "contextmanager": contextlib.contextmanager}
    exec(compile(source, filename, "exec"), namespace)  # noqa: S102 (the only way to pick the file)
    return namespace[name]


def the_warning(function: Callable[[], object]) -> warnings.WarningMessage:
    """The one warning that `function` issues."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    (only,) = caught
    return only


def test_error_is_a_runtime_error_so_that_old_handlers_catch_it() -> None:
    assert issubclass(AmpError, RuntimeError)


def test_warning_is_a_user_warning() -> None:
    assert issubclass(AmpWarning, UserWarning)


def test_warning_has_its_category_and_message() -> None:
    found = the_warning(lambda: warn("the scale is odd"))
    assert found.category is AmpWarning
    assert str(found.message) == "the scale is odd"


def test_warning_from_the_package_points_at_the_line_that_called_it() -> None:
    inside = as_if_in(str(PACKAGE / "casts" / "inside.py"), "def f(): warn('w')", "f")

    def train() -> None:
        inside()

    found = the_warning(train)
    assert found.filename == __file__
    assert found.lineno == train.__code__.co_firstlineno + 1


def test_warning_from_a_context_manager_points_at_the_with_statement() -> None:
    source = "@contextmanager\ndef f():\n    yield\n    warn('w')"
    inside = as_if_in(str(PACKAGE / "inside.py"), source, "f")

    def use() -> None:
        with inside():
            pass

    assert the_warning(use).filename == __file__


def test_warning_from_a_hook_points_at_the_call_of_the_model() -> None:
    inside = as_if_in(str(PACKAGE / "inside.py"), "def f(*_): warn('w')", "f")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].register_forward_hook(inside)
    assert the_warning(lambda: model(torch.zeros(1, 1))).filename == __file__


@pytest.mark.parametrize("filename", ["_experiments/train.py", "_train.py"])
def test_file_whose_name_only_begins_like_the_package_is_the_users(filename: str) -> None:
    users_file = str(PACKAGE) + filename
    train = as_if_in(users_file, "def f(): warn('w')", "f")
    assert the_warning(train).filename == users_file


def test_warning_without_any_user_line_is_still_issued() -> None:
    inside = as_if_in(str(PACKAGE / "inside.py"), "def f(): warn('w')", "f")
    with pytest.warns(AmpWarning, match="^w$"):
        inside()
