"""Replace attributes of foreign objects, and put every one of them back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

logger = logging.getLogger("amp_patch")

_INHERITED = object()  # the name was not in the owner's own __dict__


class Patcher:
    """Records each replacement as it is made; `restore` undoes them, the latest first.

    Owners (modules, classes, instances) are held weakly, so that a patch never keeps a user's
    object alive. A name that the owner merely inherited is deleted again rather than set. A name
    that somebody else has replaced in the meantime is left to them.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set `owner.name` to `new` until `restore`."""
        reference = weakref.ref(owner)
        previous = vars(owner).get(name, _INHERITED)
        setattr(owner, name, new)
        replacement = _Replacement(reference, name, new, previous)
        self._undo.callback(replacement.put_back)

    def on_restore(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when `restore` reaches this point."""
        self._undo.callback(callback)

    def restore(self) -> None:
        """Undo everything, also past an undo that fails. A second call does nothing."""
        self._undo.close()


class _Replacement(NamedTuple):
    owner: weakref.ref[Any]
    name: str
    new: Any
    previous: Any

    def put_back(self) -> None:
        owner, name = self.owner(), self.name
        if owner is None:
            return
        if vars(owner).get(name, _INHERITED) is not self.new:
            logger.debug("%r.%s has another owner by now; left alone", owner, name)
        elif self.previous is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, self.previous)
