"""Replacing attributes of foreign objects, and putting every one of them back."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from amp_patch.casts.patcher import Patcher

NAMES = ("own", "inherited", "absent")


class Base:
    inherited = "of the base"


def make_owner(kind: str) -> Any:
    """A module, a class or an instance with one attribute of its own, one inherited, one absent."""
    if kind == "module":
        module = types.ModuleType("sample")
        module.own = "own"  # type: ignore[attr-defined]
        return module
    derived = type("Derived", (Base,), {"own": "own"})
    if kind == "class":
        return derived
    instance = derived()
    instance.own = "own of the instance"
    return instance


KINDS = ("module", "class", "instance")


def snapshot(owner: Any) -> dict[str, Any]:
    return dict(vars(owner))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_replacement_is_seen_until_restore(kind: str, name: str) -> None:
    owner, patcher = make_owner(kind), Patcher()
    before = snapshot(owner)
    patcher.replace(owner, name, "new")
    assert getattr(owner, name) == "new"
    patcher.restore()
    assert snapshot(owner) == before


def test_inherited_name_comes_back_by_deletion() -> None:
    owner, patcher = make_owner("class"), Patcher()
    patcher.replace(owner, "inherited", "new")
    patcher.restore()
    assert "inherited" not in vars(owner)
    assert owner.inherited is Base.inherited


def test_descriptor_of_a_class_comes_back_as_the_object_it_was() -> None:
    class Owner:
        @staticmethod
        def static() -> None:
            """A static method."""

        @property
        def computed(self) -> int:
            return 1

    before = {name: vars(Owner)[name] for name in ("static", "computed")}
    patcher = Patcher()
    for name in before:
        patcher.replace(Owner, name, None)
    patcher.restore()
    for name, descriptor in before.items():
        assert vars(Owner)[name] is descriptor


def test_name_replaced_twice_goes_back_to_the_first() -> None:
    owner, patcher = make_owner("instance"), Patcher()
    before = snapshot(owner)
    patcher.replace(owner, "own", "first")
    patcher.replace(owner, "own", "second")
    patcher.restore()
    assert snapshot(owner) == before


def test_second_restore_does_nothing() -> None:
    owner, patcher, calls = make_owner("instance"), Patcher(), []
    patcher.replace(owner, "own", "new")
    patcher.on_restore(lambda: calls.append(1))
    patcher.restore()
    owner.own = "set by the user since"
    patcher.restore()
    assert owner.own == "set by the user since"
    assert calls == [1]


def test_patcher_can_be_used_again_after_restore() -> None:
    owner, patcher = make_owner("instance"), Patcher()
    before = snapshot(owner)
    for new in ("first", "second"):
        patcher.replace(owner, "own", new)
        assert owner.own == new
        patcher.restore()
        assert snapshot(owner) == before


def test_undo_runs_latest_first() -> None:
    patcher, order = Patcher(), []
    for i in range(3):
        patcher.on_restore(lambda i=i: order.append(i))
    patcher.restore()
    assert order == [2, 1, 0]


def test_callback_runs_between_the_replacements_around_it() -> None:
    owner, patcher, seen = make_owner("instance"), Patcher(), []
    patcher.replace(owner, "own", "first")
    patcher.on_restore(lambda: seen.append(owner.own))
    patcher.replace(owner, "own", "second")
    patcher.restore()
    assert seen == ["first"]


def test_failing_callback_stops_no_other_undo() -> None:
    owner, patcher = make_owner("instance"), Patcher()
    before = snapshot(owner)

    def fail() -> None:
        raise ValueError("cannot")

    patcher.replace(owner, "own", "new")
    patcher.on_restore(fail)
    patcher.replace(owner, "absent", "new")
    with pytest.raises(ValueError, match="cannot"):
        patcher.restore()
    assert snapshot(owner) == before
    patcher.restore()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_name_that_somebody_else_replaced_since_is_left_to_them(kind: str, name: str) -> None:
    owner, patcher = make_owner(kind), Patcher()
    patcher.replace(owner, name, "ours")
    setattr(owner, name, "theirs")
    patcher.restore()
    assert getattr(owner, name) == "theirs"


def test_name_that_somebody_else_deleted_since_stays_deleted() -> None:
    owner, patcher = make_owner("instance"), Patcher()
    patcher.replace(owner, "absent", "ours")
    del owner.absent
    patcher.restore()
    assert not hasattr(owner, "absent")


def test_replacement_that_fails_leaves_nothing_to_undo() -> None:
    class Guarded:
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError("read only")

    owner, patcher = Guarded(), Patcher()
    with pytest.raises(TypeError, match="read only"):
        patcher.replace(owner, "own", "new")
    patcher.restore()
    assert snapshot(owner) == {}


def test_replacement_that_cannot_be_undone_is_not_made() -> None:
    class NoWeakReference:
        __slots__ = ("__dict__",)

    owner, patcher = NoWeakReference(), Patcher()
    owner.own = "own"
    with pytest.raises(TypeError):
        patcher.replace(owner, "own", "new")
    patcher.restore()
    assert owner.own == "own"


@pytest.mark.parametrize("kind", KINDS)
def test_patch_keeps_no_owner_alive(kind: str) -> None:
    owner, patcher = make_owner(kind), Patcher()
    gone = weakref.ref(owner)
    patcher.replace(owner, "own", "new")
    del owner
    gc.collect()
    assert gone() is None
    patcher.restore()


def test_owner_that_died_stops_no_other_undo() -> None:
    survivor, owner, patcher = make_owner("instance"), make_owner("instance"), Patcher()
    before = snapshot(survivor)
    patcher.replace(survivor, "own", "new")
    patcher.replace(owner, "own", "new")
    del owner
    gc.collect()
    patcher.restore()
    assert snapshot(survivor) == before


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.booleans()), max_size=12
)


@given(OPERATIONS)
def test_restore_after_any_replacements_of_ours_gives_the_state_before(operations: Any) -> None:
    owners = {kind: make_owner(kind) for kind in KINDS}
    before = {kind: snapshot(owner) for kind, owner in owners.items()}
    patcher = Patcher()
    for kind, name, restores in operations:
        patcher.replace(owners[kind], name, object())
        if restores:
            patcher.restore()
    patcher.restore()
    assert {kind: snapshot(owner) for kind, owner in owners.items()} == before


@given(OPERATIONS)
def test_monkey_patch_nested_inside_ours_and_undone_leaves_no_trace(operations: Any) -> None:
    owners = {kind: make_owner(kind) for kind in KINDS}
    before = {kind: snapshot(owner) for kind, owner in owners.items()}
    ours, theirs = Patcher(), pytest.MonkeyPatch()
    for kind, name, is_ours in operations:
        if is_ours:
            theirs.undo()
            ours.replace(owners[kind], name, object())
        else:
            theirs.setattr(owners[kind], name, object(), raising=False)
    theirs.undo()
    ours.restore()
    assert {kind: snapshot(owner) for kind, owner in owners.items()} == before


@given(OPERATIONS)
def test_value_of_somebody_else_on_top_is_never_overwritten(operations: Any) -> None:
    owners = {kind: make_owner(kind) for kind in KINDS}
    patcher, on_top = Patcher(), {}
    for kind, name, is_ours in operations:
        new = object()
        if is_ours:
            patcher.replace(owners[kind], name, new)
            on_top.pop((kind, name), None)
        else:
            setattr(owners[kind], name, new)
            on_top[kind, name] = new
    patcher.restore()
    for (kind, name), theirs in on_top.items():
        assert getattr(owners[kind], name) is theirs
