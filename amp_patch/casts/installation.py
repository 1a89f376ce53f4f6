"""All casts of this process at once, and what of torch must know of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.references import pickle_by_name, rebind_in_model, rebind_references
from amp_patch.casts.rules import IN_PLACE, OP_RULES, OpRule
from amp_patch.casts.scripting import cast_scripted
from amp_patch.casts.spellings import is_in_place
from amp_patch.casts.surroundings import adjust_surroundings
from amp_patch.casts.user_functions import is_of_torch, nested_call, user_rules
from amp_patch.casts.wrappers import CastWrapper, install_casts, wrap_operation

_NO_WRAPPERS: Mapping[int, CastWrapper] = MappingProxyType({})


class UserCastWrapper(CastWrapper):
    """A function of the user, registered by name, whose arguments are cast however nested."""

    def __init__(self, original: Any, row: OpRule, context: CastContext) -> None:
        super().__init__(original, row, nested_call(row.rule, lambda: context))


class Installation:
    """Installs the casts into torch and the user's modules, and takes them out again."""

    def __init__(self, context: CastContext) -> None:
        self.wrappers = _NO_WRAPPERS  # of each function, by the function's id
        self.all_wrappers: tuple[CastWrapper, ...] = ()  # a function with two names has two
        self._context = context
        self._patcher = Patcher()

    @property
    def is_there(self) -> bool:
        """Whether the casts are installed."""
        return bool(self.wrappers)

    def install(self, rules: Iterable[OpRule] = OP_RULES) -> None:
        """Put them in place. A registration of the user goes before the row in `rules`."""
        registered = user_rules.rows()
        taken = {(id(row.owner), row.name) for row in registered}
        rows = [row for row in rules if (id(row.owner), row.name) not in taken]
        install_casts(self._patcher, self._context, rows)
        for row in registered:
            self._install_registered(row)
        self.all_wrappers = tuple(_installed([*rows, *registered]))
        self.wrappers = {id(wrapper.__wrapped__): wrapper for wrapper in self.all_wrappers}
        rebind_references(self._patcher, self.wrappers)
        pickle_by_name(self._patcher, self.wrappers)
        cast_scripted(self._patcher, self._context, self.wrappers)
        adjust_surroundings(self._patcher, self._context)

    def reach_into(self, model: nn.Module) -> None:
        """Cast the functions of torch that the modules in `model` took before, as attributes."""
        rebind_in_model(self._patcher, self.wrappers, model)

    def remove(self) -> None:
        """Take them out. A second call does nothing."""
        self._patcher.restore()
        self.wrappers, self.all_wrappers = _NO_WRAPPERS, ()
        self._context.half_dtype = None
        self._context.cache.clear()

    def _install_registered(self, row: OpRule) -> None:
        original = vars(row.owner).get(row.name, getattr(row.owner, row.name))
        if is_of_torch(original):
            rule = IN_PLACE.get(row.rule, row.rule) if is_in_place(row.name) else row.rule
            new_row = OpRule(row.owner, row.name, rule)
            wrapper: CastWrapper = wrap_operation(original, new_row, self._context)
        else:
            wrapper = UserCastWrapper(original, row, self._context)
        self._patcher.replace(row.owner, row.name, wrapper)


def _installed(rows: Iterable[OpRule]) -> Iterator[CastWrapper]:
    """The wrappers in the order of `rows`."""
    for row in rows:
        wrapper = vars(row.owner).get(row.name)
        if isinstance(wrapper, CastWrapper):
            yield wrapper
