"""What every hook that amp_patch puts on a model has in common."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any


class ModelHook:
    """A hook that deep-copies with its model and pickles as one that does nothing.

    A saved model must load where amp_patch is not installed, so a pickled hook becomes the exit of
    a null context, which takes any arguments and returns None, as a hook that does nothing would.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (nullcontext(), "__exit__"))

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin
