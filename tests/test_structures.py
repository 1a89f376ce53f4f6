"""Mapping over the tensors of any structure: nothing is mutated, types stay, identity is free."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn.utils.rnn import pack_sequence

from amp_patch.structures import map_tensors


class Point(NamedTuple):
    x: Any
    y: Any


Untyped = namedtuple("Untyped", "x y")  # noqa: PYI024 (the older kind, on purpose)


class TaggedTuple(tuple):
    """A tuple that can have attributes."""


class TaggedList(list):  # type: ignore[type-arg]
    """A list that can have attributes."""


@dataclasses.dataclass
class Batch:
    image: Any
    label: Any = 3
    note: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    image: Any
    label: Any = 3


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedBatch:
    image: Any
    label: Any = 3


@dataclasses.dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A mapping that is a dataclass as well, as libraries of language models return it."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Stored(MutableMapping):  # type: ignore[type-arg]
    """A mapping of a user's own, around a dict."""

    def __init__(self, **items: Any) -> None:
        self.items_by_name = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_by_name[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_by_name[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_by_name[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """An oracle of its own: every leaf by its path, containers by their type."""
    if isinstance(value, Mapping):
        children = {str(key): item for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        children = {str(i): item for i, item in enumerate(value)}
    elif dataclasses.is_dataclass(value):
        children = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        return {path: value}
    found: dict[str, Any] = {path: type(value)}
    for name, item in children.items():
        found |= leaves(item, f"{path}/{name}")
    return found


ATOMS = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.builds(torch.ones, st.integers(0, 3)),
    st.builds(lambda n: torch.zeros(n, dtype=torch.int64), st.integers(0, 2)),
    st.builds(lambda: torch.ones(2, dtype=torch.float64)),
)


def containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(st.text("abc", max_size=2), items, max_size=3)
    return st.one_of(
        st.lists(items, max_size=3),
        st.lists(items, max_size=3).map(tuple),
        st.lists(items, max_size=3).map(TaggedList),
        st.lists(items, max_size=3).map(TaggedTuple),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(UserDict),
        dicts.map(lambda given: defaultdict(list, given)),
        st.builds(Point, items, items),
        st.builds(Untyped, items, items),
        st.builds(Batch, items, items),
        st.builds(FrozenBatch, items, items),
        st.builds(SlottedBatch, items, items),
    )


STRUCTURES = st.recursive(ATOMS, containers, max_leaves=12)


@given(STRUCTURES)
def test_map_with_identity_returns_the_very_object(value: Any) -> None:
    assert map_tensors(same, value) is value


@given(STRUCTURES)
def test_each_tensor_is_mapped_and_all_else_is_what_it_was(value: Any) -> None:
    before, after = leaves(value), leaves(map_tensors(halved, value))
    assert list(after) == list(before)
    for path, leaf in before.items():
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            assert after[path].dtype is torch.float16
            assert after[path].shape == leaf.shape
        else:
            assert after[path] is leaf


@given(STRUCTURES)
def test_nothing_that_was_passed_in_is_mutated(value: Any) -> None:
    before = leaves(value)
    map_tensors(halved, value)
    after = leaves(value)
    assert list(after) == list(before)
    assert all(after[path] is leaf for path, leaf in before.items())


@given(STRUCTURES)
def test_part_without_a_change_is_shared_with_the_original(value: Any) -> None:
    untouched = {"numbers": [1, 2, torch.zeros(1, dtype=torch.int64)], "value": value}
    mapped = map_tensors(halved, {"float": torch.ones(1), "rest": untouched["numbers"]})
    assert mapped["rest"] is untouched["numbers"]


@pytest.mark.parametrize(
    "value",
    [None, 3, 2.5, "text", b"bytes", {1, 2}, range(3), torch.float16, torch.nn.Linear(1, 1), Batch],
    ids=["none", "int", "float", "str", "bytes", "set", "range", "dtype", "module", "class"],
)
def test_value_that_holds_no_tensor_comes_back_untouched(value: object) -> None:
    assert map_tensors(halved, value) is value


def test_single_tensor_is_mapped() -> None:
    assert map_tensors(halved, torch.ones(2)).dtype is torch.float16


def test_tensor_subclass_is_given_to_the_function() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    seen = []
    map_tensors(lambda tensor: seen.append(tensor) or tensor, [parameter])
    assert seen[0] is parameter


def test_packed_sequence_stays_one_with_its_batch_sizes() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    mapped = map_tensors(halved, packed)
    assert type(mapped) is type(packed)
    assert mapped.data.dtype is torch.float16
    assert mapped.batch_sizes is packed.batch_sizes


def test_named_result_of_torch_keeps_its_type() -> None:
    result = torch.ones(2, 3).max(dim=1)
    mapped = map_tensors(halved, result)
    assert type(mapped) is type(result)
    assert mapped.values.dtype is torch.float16
    assert mapped.indices is result.indices


def test_default_factory_survives() -> None:
    mapped = map_tensors(halved, defaultdict(list, a=torch.ones(1)))
    assert mapped["never seen"] == []


def test_order_of_keys_survives() -> None:
    value = OrderedDict(b=torch.ones(1), a=1, c=torch.ones(1))
    assert list(map_tensors(halved, value)) == ["b", "a", "c"]


@pytest.mark.parametrize("kind", [TaggedList, TaggedTuple], ids=["list", "tuple"])
def test_extra_attributes_of_a_container_survive(kind: type) -> None:
    value = kind([torch.ones(1)])
    value.tag = "keep me"
    mapped = map_tensors(halved, value)
    assert type(mapped) is kind
    assert mapped.tag == "keep me"
    assert mapped[0].dtype is torch.float16


def test_attribute_of_a_mapping_survives() -> None:
    value = Stored(a=torch.ones(1))
    value.tag = "keep me"  # type: ignore[attr-defined]
    assert map_tensors(halved, value).tag == "keep me"


def test_mapping_of_a_users_own_is_not_mutated() -> None:
    tensor = torch.ones(1)
    value = Stored(a=tensor)
    mapped = map_tensors(halved, value)
    assert mapped["a"].dtype is torch.float16
    assert value["a"] is tensor


def test_read_only_mapping_is_mapped() -> None:
    mapped = map_tensors(halved, types.MappingProxyType({"a": torch.ones(1), "b": 2}))
    assert mapped["a"].dtype is torch.float16
    assert mapped["b"] == 2


def test_mapping_that_is_a_dataclass_keeps_items_and_attributes_in_step() -> None:
    value = ModelOutput(logits=torch.ones(2))
    mapped = map_tensors(halved, value)
    assert type(mapped) is ModelOutput
    assert mapped["logits"].dtype is mapped.logits.dtype is torch.float16
    assert value.logits.dtype is torch.float32


@pytest.mark.parametrize("kind", [Batch, FrozenBatch, SlottedBatch])
def test_dataclass_comes_back_as_a_new_one(kind: Any) -> None:
    value = kind(torch.ones(2))
    mapped = map_tensors(halved, value)
    assert type(mapped) is kind
    assert mapped is not value
    assert mapped.image.dtype is torch.float16
    assert mapped.label == 3
    assert value.image.dtype is torch.float32


def test_field_of_a_dataclass_that_was_never_set_is_left_unset() -> None:
    @dataclasses.dataclass
    class Lazy:
        image: Any
        features: Any = dataclasses.field(init=False)

    mapped = map_tensors(halved, Lazy(torch.ones(1)))
    assert mapped.image.dtype is torch.float16
    assert not hasattr(mapped, "features")


def test_attribute_of_a_dataclass_that_is_no_field_survives() -> None:
    value = Batch(torch.ones(1))
    value.extra = "keep me"  # type: ignore[attr-defined]
    assert map_tensors(halved, value).extra == "keep me"


def test_tensor_that_occurs_twice_is_mapped_at_both_places() -> None:
    tensor = torch.ones(1)
    mapped = map_tensors(halved, [tensor, {"again": tensor}])
    assert mapped[0].dtype is mapped[1]["again"].dtype is torch.float16


def test_error_of_the_function_passes_through_and_leaves_the_value_alone() -> None:
    value = {"a": [torch.ones(1)]}
    before = copy.copy(leaves(value))

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        map_tensors(fail, value)
    assert all(leaves(value)[path] is leaf for path, leaf in before.items())
