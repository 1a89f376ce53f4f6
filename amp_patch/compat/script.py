"""Run a script as `__main__` with the names of apex in place, here and in the workers it starts."""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from amp_patch.compat.amp_state import amp_state
from amp_patch.compat.installer import install_as_apex
from amp_patch.compat.run_report import start_report
from amp_patch.compat.run_settings import RunSettings
from amp_patch.errors import AmpError

_MAIN = ("__main__", "__mp_main__")  # the second is the first one's name in spawned processes
_WORKER = "amp_patch.compat.spawned"


class NoScriptError(AmpError):
    """There is nothing to run."""


class _ScriptSpec(ModuleSpec):
    """Names the module from which a spawned process, or a relaunch, finds the script again."""

    def __init__(self, package: str) -> None:
        super().__init__(_WORKER, None)
        self._package = package

    @property
    def parent(self) -> str:
        """The package of the script, for its relative imports."""
        return self._package


class _Source(NamedTuple):
    code: CodeType
    path: str
    package: str


def run_as_main(settings: RunSettings, argv: Sequence[str], *, until_exit: bool = False) -> None:
    """Run the script of `settings` with `argv`. What it raises passes through.

    The names of apex, `sys.argv`, `sys.path` and `__main__` are put back at the end, and the report
    is written. `until_exit` says that the process ends with the script: what it leaves to threads
    and exit handlers still finds all of this, and the report comes after them.
    """
    with ExitStack() as stack:
        stack.callback(install_as_apex())
        modules = {name: sys.modules.get(name) for name in _MAIN}
        stack.callback(_put_back, sys.argv, sys.path[:], modules)
        amp_state.opt_level = settings.opt_level
        own = Path.cwd() if settings.is_module else Path(settings.target).resolve().parent
        sys.path.insert(0, str(own))
        source = find_source(settings)
        sys.argv = [source.path, *argv[1:]] if settings.is_module else list(argv)
        finish = start_report(settings.report, is_main=True)
        if until_exit:
            stack.pop_all()
            atexit.register(finish)  # exit handlers run in reverse: this one after the script's
        else:
            stack.callback(finish)
        execute(source, _MAIN)


def run_in_worker(settings: RunSettings) -> dict[str, Any]:
    """Run the script of `settings` as a spawned process does, which makes its functions known.

    Returns its globals. All stays in place, and the report is written, when the process ends.
    """
    install_as_apex()
    amp_state.opt_level = settings.opt_level
    atexit.register(start_report(settings.report, is_main=False))
    return execute(find_source(settings), _MAIN[1:])


def find_source(settings: RunSettings) -> _Source:
    """The code that is to run. NoScriptError if there is none."""
    if not settings.is_module:
        try:
            with io.open_code(settings.target) as file:
                text = file.read()
        except OSError as error:
            raise NoScriptError(f"run: expected a Python script, found {error}") from None
        plain = compile(text, settings.target, "exec", dont_inherit=True)  # not our __future__
        return _Source(plain, settings.target, "")
    name = settings.target
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(spec.name) if spec and get_code else None
    if spec is None or code is None:
        raise NoScriptError(f"run: expected a module that can be run, found {name!r}")
    return _Source(code, str(spec.origin), spec.name.rpartition(".")[0])


def _put_back(
    argv: list[str], search_path: list[str], modules: dict[str, ModuleType | None]
) -> None:
    sys.argv, sys.path[:] = argv, search_path
    for name, module in modules.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


def execute(source: _Source, names: Sequence[str]) -> dict[str, Any]:
    """Run the code as the module of these names, and return its globals."""
    module = ModuleType(names[0])
    vars(module).update(
        __annotations__={},
        __builtins__=builtins,
        __cached__=None,
        __file__=source.path,
        __package__=source.package,
        __spec__=_ScriptSpec(source.package),
    )
    for name in names:
        sys.modules[name] = module
    exec(source.code, vars(module))  # noqa: S102 (to run the user's script is the job)
    return vars(module)
