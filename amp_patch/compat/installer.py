"""Put the names of apex into this process, and take them out again."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from amp_patch.casts.patcher import Patcher
from amp_patch.compat.names import NAMES
from amp_patch.compat.replacements import REPLACEMENTS, missing_name
from amp_patch.compat.version import DISTRIBUTION_VERSION
from amp_patch.errors import AmpError

_ROOT = "apex"
_IMPORT_SYSTEM = (__name__, "importlib._bootstrap")
_EXTENSIONS = tuple(name for name in REPLACEMENTS if "." not in name)


class _Loader:
    """The modules are complete when they are registered: there is nothing to run."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` tells of apex."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {_ROOT}\nVersion: {DISTRIBUTION_VERSION}\n"

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class _Hints:
    """Comes last, and says of the extensions of apex that are not there what to use instead."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname in _EXTENSIONS and not _is_probe():
            raise ModuleNotFoundError(missing_name(fullname))


class _Finder(importlib.metadata.DistributionFinder):
    """Answers for what is not in `sys.modules`: the distribution, and names that do not exist."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname.startswith(f"{_ROOT}.") and not _is_probe():
            # Without `name=`: `from package import name` swallows an error that has it.
            raise ModuleNotFoundError(missing_name(fullname))

    def find_distributions(self, context: Any = None) -> Iterable[_Distribution]:
        name = None if context is None else context.name
        return [_Distribution()] if name is None or name.lower() == _ROOT else []


class _Names:
    """The names of apex in this process: there or not."""

    def __init__(self) -> None:
        self._patcher = Patcher()
        self.are_there = False

    def put_in(self) -> None:
        self.are_there = True
        modules = _make_modules()
        taken = {
            name: module
            for name, module in list(sys.modules.items())
            if name == _ROOT or name.startswith(f"{_ROOT}.")
        }
        self._patcher.on_restore(lambda: sys.modules.update(taken))
        for name in taken:
            del sys.modules[name]
        self._patcher.on_restore(lambda: _forget(modules))
        sys.modules.update(modules)
        finder, hints = _Finder(), _Hints()
        self._patcher.on_restore(lambda: sys.meta_path.remove(finder))
        sys.meta_path.insert(0, finder)
        self._patcher.on_restore(lambda: sys.meta_path.remove(hints))
        sys.meta_path.append(hints)
        pkgutil.resolve_name("amp_patch.compat.safe_globals:allow")()
        for path in _RESETS:
            self._patcher.on_restore(pkgutil.resolve_name(path))

    def take_out(self) -> None:
        """A second call does nothing."""
        self.are_there = False
        self._patcher.restore()


_RESETS = (
    "amp_patch.compat.amp_state:amp_state.reset",
    "amp_patch.compat.stash:stashes.take_off",
    "amp_patch.compat.registrations:take_back",
    "amp_patch.compat.lists:reset",
    "amp_patch.compat.safe_globals:forbid",
)
_names = _Names()


def install_as_apex(replace: bool = False) -> Callable[[], None]:
    """Let `from apex import amp`, and the rest of apex, find amp_patch. Returns the undo.

    For scripts that were written for NVIDIA's apex: call it before their imports. Nothing is
    written to disk. A second call changes nothing; the undo may be called twice.

    Args:
        replace: take the place of a real apex that is imported already. Modules that hold its
            functions go on to use them.

    Raises AmpError if the real apex is imported, unless `replace`.

        >>> import amp_patch
        >>> undo = amp_patch.install_as_apex()
        >>> from apex import amp
        >>> from apex.optimizers import FusedAdam
        >>> undo()
    """
    if _names.are_there:
        return _names.take_out
    real = sys.modules.get(_ROOT)
    if real is not None and not replace:
        raise AmpError(
            f"install_as_apex: expected that no apex is imported, found {real!r}; call it before "
            "the first import of apex, or pass replace=True"
        )
    _names.put_in()
    return _names.take_out


def _is_probe() -> bool:
    """Whether `importlib.util.find_spec` asks: to a question, the answer is no, and no error."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in _IMPORT_SYSTEM:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


def _make_modules() -> dict[str, ModuleType]:
    modules = {name: _make_module(name) for name in NAMES}
    for name, module in modules.items():
        for attribute, path in NAMES[name].items():
            setattr(module, attribute, pkgutil.resolve_name(path))
        parent, _, own = name.rpartition(".")
        if parent and own not in NAMES[parent]:
            setattr(modules[parent], own, module)
    return modules


def _make_module(name: str) -> ModuleType:
    module = ModuleType(name, "Names of apex for old scripts, by amp_patch.")
    spec = importlib.machinery.ModuleSpec(name, _Loader(), origin="amp_patch", is_package=True)  # type: ignore[arg-type]
    module.__spec__, module.__loader__ = spec, spec.loader
    module.__path__ = []  # every name that is missing is asked of the finder, which knows why
    module.__package__ = name
    return module


def _forget(modules: dict[str, ModuleType]) -> None:
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
