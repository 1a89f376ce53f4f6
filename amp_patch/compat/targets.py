"""Where a name of apex stands in a migrated script. Knows no source code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import amp_patch
from amp_patch.compat.names import NAMES
from amp_patch.compat.replacements import missing_name

AMP = "apex.amp"
_FACE = "amp_patch.compat.apex_amp"
_OBJECTS = {
    f"{AMP}._amp_state": "amp_patch.compat.amp_state:amp_state",
    f"{AMP}.lists": "amp_patch.compat:lists",
    **{
        f"{AMP}.lists.{name}": f"amp_patch.compat.lists:{name}"
        for name in ("functional_overrides", "tensor_overrides", "torch_overrides")
    },
}
_BETTER = {"clip_grad_norm": "torch.nn.utils:clip_grad_norm_"}


@dataclass(frozen=True)
class Target:
    """`name` of `module`; of the module itself where there is no name."""

    module: str
    name: str = ""

    @property
    def dotted(self) -> str:
        """As an expression, once `module` is imported."""
        return f"{self.module}.{self.name}" if self.name else self.module


def find_target(path: str, *, is_plain: bool) -> Target | None:
    """What `path`, as "apex.parallel.LARC", is in a migrated script; None if nothing is.

    `is_plain` says that the script needs no more of `apex.amp` than the public names of amp_patch.
    """
    if path == AMP:
        return Target("amp_patch") if is_plain else Target("amp_patch.compat", "apex_amp")
    if path in _OBJECTS:
        module, _, name = _OBJECTS[path].partition(":")
        return Target(module, name)
    owner, _, name = path.rpartition(".")
    if name not in NAMES.get(owner, ()):
        return None
    if owner.startswith(AMP) and is_plain and name in amp_patch.__all__:
        return Target("amp_patch", name)
    if owner == AMP:
        return Target(_FACE, name)
    module, _, attribute = _BETTER.get(name, NAMES[owner][name]).partition(":")
    return Target(module, attribute)


def is_module(path: str) -> bool:
    """Whether `path` is a module of apex and not a thing in one."""
    owner, _, name = path.rpartition(".")
    return path in NAMES and name not in NAMES.get(owner, ())


def longest_known(path: str, *, is_plain: bool) -> tuple[Target, str] | None:
    """The target of the longest beginning of the dotted `path` that has one, and what is left."""
    parts = path.split(".")
    for length in range(len(parts), 1, -1):
        found = find_target(".".join(parts[:length]), is_plain=is_plain)
        if found is not None:
            return found, ".".join(parts[length:])
    return None


def star_names(module: str, used: Iterable[str]) -> list[str]:
    """What `from module import *` brings in of what is used."""
    return sorted(set(NAMES.get(module, ())) & set(used))


def needs_the_face(uses: Iterable[str]) -> list[str]:
    """Which of the dotted paths that a script uses keep it from being plain."""
    found = set()
    for path in uses:
        parts = path.split(".")
        if path.startswith(f"{AMP}.") and parts[2] not in (*amp_patch.__all__, "__dict__"):
            found.add(parts[2])
        if path.startswith("apex.parallel") and "LARC" in parts:
            found.add("LARC")
    return sorted(found)


def missing_in_the_face(uses: Iterable[str]) -> list[str]:
    """The sentences for names of `apex.amp` that a migrated script does not find in its `amp`."""
    names = {path.split(".")[2] for path in uses if path.startswith(f"{AMP}.")}
    known = {"lists", "__dict__", *amp_patch.__all__, *NAMES[AMP]}
    return [missing_name(f"{AMP}.{name}") for name in sorted(names - known)]
