"""What stays in FP32 when a model is cast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from amp_patch.errors import AmpError

Selector = nn.Module | type[nn.Module] | str


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Paths of the modules and tensors of one model that are not cast.

    `modules` are the outermost ones: all below them is excluded too. Their inputs are cast to FP32
    and their outputs back.
    """

    modules: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()

    def excludes(self, path: str) -> bool:
        """Whether the parameter or buffer at `path` stays as it is."""
        return path in self.tensors or any(
            not module or path == module or path.startswith(f"{module}.") for module in self.modules
        )


def check_selectors(name: str, selectors: Any) -> tuple[Selector, ...]:
    """The selectors as a tuple. AmpError for anything that is not a module, a type or a pattern."""
    if selectors is None:
        return ()
    if isinstance(selectors, (str, type, nn.Module)) or not isinstance(selectors, Iterable):
        selectors = (selectors,)
    found = tuple(selectors)
    for one in found:
        is_type = isinstance(one, type) and issubclass(one, nn.Module)
        if not (is_type or isinstance(one, (nn.Module, str))):
            raise AmpError(
                f"{name}: expected modules, types of modules or patterns of their paths (as "
                f"'decoder.*'), found {one!r}"
            )
    return found


def find_exclusions(
    name: str, models: Sequence[nn.Module], selectors: Sequence[Selector]
) -> list[Exclusions]:
    """What `selectors` exclude in each of `models`. AmpError if one of them selects nothing."""
    used: set[int] = set()
    found = [_find(model, selectors, used) for model in models]
    unused = [one for i, one in enumerate(selectors) if i not in used]
    if unused and models:
        raise AmpError(
            f"{name}: {unused[0]!r} selects nothing in the models; look at named_modules()"
        )
    return found


def _find(model: nn.Module, selectors: Sequence[Selector], used: set[int]) -> Exclusions:
    modules: list[str] = []
    for path, module in model.named_modules():
        hits = [i for i, one in enumerate(selectors) if _selects(one, path, module)]
        used.update(hits)
        if hits and not any(not outer or path.startswith(f"{outer}.") for outer in modules):
            modules.append(path)
    tensors = set()
    for path in [path for path, _ in (*model.named_parameters(), *model.named_buffers())]:
        hits = [
            i for i, one in enumerate(selectors) if isinstance(one, str) and fnmatchcase(path, one)
        ]
        used.update(hits)
        if hits:
            tensors.add(path)
    return Exclusions(frozenset(modules), frozenset(tensors))


def _selects(selector: Selector, path: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return fnmatchcase(path, selector)
    if isinstance(selector, type):
        return isinstance(module, selector)
    return module is selector
