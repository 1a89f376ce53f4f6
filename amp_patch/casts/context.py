"""What all cast wrappers share: the half dtype that is active here and now, and the cast cache."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from amp_patch.casts.cache import CastCache
from amp_patch.errors import warn


class _Scope(NamedTuple):
    half_dtype: torch.dtype | None  # None: casts are suspended
    is_final: bool  # inner scopes of models cannot switch the casts on again
    owner: object
    outer: _Scope | None
    autocast: tuple[str, ...] = ()  # device types on which `torch.autocast` is off meanwhile
    frame: FrameType | None = None  # of the forward; a scope whose frame is gone was interrupted

    def detached(self) -> _Scope:
        """The same scope, wherever it is entered again."""
        outer = None if self.outer is None else self.outer.detached()
        return self._replace(frame=None, outer=outer)


class CastContext:
    """Tells a wrapper what to cast to, and casts.

    `half_dtype` holds where nothing else is said; None means that there are no casts. Scopes
    (`suspended`, the forward of a model) override it for one thread, or one asyncio task, only.
    """

    def __init__(self) -> None:
        self.half_dtype: torch.dtype | None = None
        self.cache = CastCache()
        self._keeping = 0
        self._has_warned_of_autocast = False
        self._watched: dict[int, weakref.ref[object]] = {}
        self._scope: ContextVar[_Scope | None] = ContextVar("amp_patch_scope", default=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> CastContext:
        return self  # hooks of a copied model go on to share it

    def active_dtype(self) -> torch.dtype | None:
        """The half dtype to cast to on this thread; None where operations run untouched."""
        scope = self._scope.get()
        return self.half_dtype if scope is None else scope.half_dtype

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`tensor` in `dtype`; a weight goes through the cache."""
        if type(tensor) is Parameter:
            return self.cache.cast(tensor, dtype)
        return tensor.to(dtype)

    def suspend(self) -> object:
        """Switch casts off on this thread. Returns what `restore` takes to put it back."""
        before = self._scope.get()
        self._scope.set(_Scope(None, True, None, before))
        return before

    def restore(self, before: Any) -> None:
        """End a suspension."""
        self._scope.set(before)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """No casts inside, on this thread. Nests; left as it was found, also by an exception."""
        before = self.suspend()
        # torch.compile knows nothing of casts, but guards on this flag, which matters to
        # torch.autocast alone: code compiled with casts is so not taken for code without.
        autocast_caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(autocast_caches)
            self.restore(before)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Inside a suspension: as it was before that (for a closure within a step)."""
        inside = self._scope.get()
        with self._within(None if inside is None else inside.outer):
            yield

    def enter(
        self,
        owner: object,
        half_dtype: torch.dtype | None,
        *,
        is_cast: bool = True,
        frame: FrameType | None = None,
    ) -> None:
        """Begin the scope of `owner`, a model in forward. A user's suspension stays in force.

        A model that amp casts does so alone: where it meets `torch.autocast`, that is off inside.
        `frame` is one that runs as long as the forward; by it an interrupted forward is known.
        """
        outer = _without_interrupted(self._scope.get())
        if outer is not None and outer.is_final:
            self._scope.set(_Scope(None, True, owner, outer, (), frame))
            return
        autocast = self._switch_autocast_off(outer) if is_cast and outer is not None else ()
        self._scope.set(_Scope(half_dtype, False, owner, outer, autocast, frame))

    def leave(self, owner: object) -> None:
        """End the scope of `owner`, with any inside it that an exception left open.

        When the outermost one ends while gradients are off, the iteration is over for the cache.
        """
        scope = self._scope.get()
        ended = []
        while scope is not None:
            ended.append(scope)
            if scope.owner is owner:
                break
            scope = scope.outer
        else:
            return
        for device in {device for one in ended for device in one.autocast}:
            torch.set_autocast_enabled(device, True)
        self._scope.set(scope.outer)
        is_over = not torch.is_grad_enabled() and not self._keeping
        if is_over and _model_around(scope.outer) is None:
            self.cache.clear()

    def enter_autocast(self, region: torch.autocast) -> None:
        """Begin a region of `torch.autocast`: what is cast there is cast by torch alone."""
        scope = self._scope.get()
        if scope is not None and scope.is_final:
            return
        if scope is not None and scope.half_dtype is not None:
            self._warn_of_autocast()
        self._scope.set(_Scope(None, False, region, scope))

    def clear_cache_after(self, model: object) -> None:
        """Clear the cache when `model` is gone, whose weights its casts would keep alive.

        Replicas share the hooks by which they are met: they come here in turns, again and again.
        """
        known = self._watched.get(id(model))
        if known is None or known() is not model:
            forget = functools.partial(self._forget, id(model))
            self._watched[id(model)] = weakref.ref(model, forget)

    def is_inside_another(self, owner: object) -> bool:
        """Whether the forward of `owner` runs inside the forward of another model."""
        if torch.compiler.is_compiling():  # which enters no scopes, and cannot read one
            return False
        scope = self._scope.get()
        if scope is not None and scope.owner is owner:
            scope = scope.outer
        return _model_around(scope) is not None

    def captured(self) -> Callable[[], AbstractContextManager[None]]:
        """The present scope, to be entered again later, by whoever runs code of now once more."""
        scope = self._scope.get()
        return functools.partial(self._within, None if scope is None else scope.detached())

    def forget_interrupted(self) -> None:
        """Drop scopes of forwards that an interrupt ended, for which torch calls no hooks."""
        scope = self._scope.get()
        if scope is not None:
            self._scope.set(_without_interrupted(scope))

    def _forget(self, key: int, reference: weakref.ref[object]) -> None:
        if self._watched.get(key) is reference:
            del self._watched[key]
        self.cache.clear()

    @contextmanager
    def _within(self, scope: _Scope | None) -> Iterator[None]:
        before = self._scope.get()
        self._scope.set(scope)
        try:
            yield
        finally:
            self._scope.set(before)

    def _switch_autocast_off(self, scope: _Scope) -> tuple[str, ...]:
        """Returns the device types on which `torch.autocast` was on."""
        regions = set()
        outer: _Scope | None = scope
        while outer is not None:
            if isinstance(outer.owner, torch.autocast):
                regions.add(outer.owner.device)
            outer = outer.outer
        devices = tuple(device for device in regions if torch.is_autocast_enabled(device))
        for device in devices:
            torch.set_autocast_enabled(device, False)
        if devices:
            self._warn_of_autocast()
        return devices

    def _warn_of_autocast(self) -> None:
        if not self._has_warned_of_autocast:
            self._has_warned_of_autocast = True
            warn(
                "a model that amp casts meets torch.autocast: in the forward of the model autocast "
                "is off, and in an autocast region outside it amp casts nothing. Use one of the two"
            )

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """The end of a forward without gradients does not empty the cache; the end of this does."""
        self._keeping += 1
        self.cache.keeps_all = True
        try:
            yield
        finally:
            self._keeping -= 1
            if not self._keeping:
                self.cache.keeps_all = False
                self.cache.clear()


def _without_interrupted(scope: _Scope | None) -> _Scope | None:
    """`scope`, or the innermost around it whose forward is still running."""
    if scope is None:
        return None
    running = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.append(frame)
        frame = frame.f_back
    while scope is not None and scope.frame is not None and scope.frame not in running:
        scope = scope.outer
    return scope


def _model_around(scope: _Scope | None) -> _Scope | None:
    """The innermost scope of a model; others are suspensions and regions of `torch.autocast`."""
    while scope is not None and (scope.owner is None or isinstance(scope.owner, torch.autocast)):
        scope = scope.outer
    return scope
