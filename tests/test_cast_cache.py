"""The cast cache: one cast a weight, used only as long as it is true."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from amp_patch.casts.cache import CastCache

HALF = torch.float16


def make_weight() -> Parameter:
    return Parameter(torch.tensor([1.0, 2.0, 3.0]))


def test_cast_has_the_dtype_and_the_values() -> None:
    weight = make_weight()
    cast = CastCache().cast(weight, HALF)
    assert cast.dtype is HALF
    assert torch.equal(cast, weight.detach().half())


def test_weight_is_cast_once_however_often_it_is_used() -> None:
    cache, weight = CastCache(), make_weight()
    first = cache.cast(weight, HALF)
    assert cache.cast(weight, HALF) is first
    assert len(cache) == 1


def test_gradient_flows_through_a_cached_cast_into_the_weight() -> None:
    cache, weight = CastCache(), make_weight()
    total = cache.cast(weight, HALF).sum() + 2 * cache.cast(weight, HALF).sum()
    total.backward()
    assert torch.equal(weight.grad, torch.full((3,), 3.0))


def test_each_weight_has_a_cast_of_its_own() -> None:
    cache, one, other = CastCache(), make_weight(), make_weight()
    assert cache.cast(one, HALF) is not cache.cast(other, HALF)
    assert len(cache) == 2


def test_other_dtype_gets_a_fresh_cast() -> None:
    cache, weight = CastCache(), make_weight()
    cache.cast(weight, HALF)
    assert cache.cast(weight, torch.bfloat16).dtype is torch.bfloat16


def test_cast_to_its_own_dtype_is_the_weight_and_is_not_stored() -> None:
    cache, weight = CastCache(), make_weight()
    assert cache.cast(weight, torch.float32) is weight
    assert len(cache) == 0


@torch.no_grad()
def write_in_place(weight: Parameter) -> None:
    weight.fill_(7.0)


def write_by_an_optimizer(weight: Parameter) -> None:
    weight.grad = torch.ones(3)
    torch.optim.SGD([weight], lr=0.5).step()


def give_new_storage(weight: Parameter) -> None:
    weight.data = torch.full((3,), 7.0)


@torch.no_grad()
def write_through_a_view(weight: Parameter) -> None:
    weight[0] = 7.0


@torch.no_grad()
def write_through_detach(weight: Parameter) -> None:
    weight.detach().add_(1.0)


WRITES = [
    write_in_place,
    write_by_an_optimizer,
    give_new_storage,
    write_through_a_view,
    write_through_detach,
]


@pytest.mark.parametrize("write", WRITES)
def test_cast_is_fresh_after_a_write(write: Callable[[Parameter], None]) -> None:
    cache, weight = CastCache(), make_weight()
    old = cache.cast(weight, HALF)
    write(weight)
    new = cache.cast(weight, HALF)
    assert new is not old
    assert torch.equal(new, weight.detach().half())


def test_cast_made_without_gradients_never_serves_a_call_that_records_them() -> None:
    cache, weight = CastCache(), make_weight()
    with torch.no_grad():
        old = cache.cast(weight, HALF)
    new = cache.cast(weight, HALF)
    assert not old.requires_grad
    assert new.requires_grad
    new.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_cast_made_with_gradients_may_serve_a_call_that_records_none() -> None:
    cache, weight = CastCache(), make_weight()
    recorded = cache.cast(weight, HALF)
    with torch.no_grad():
        assert cache.cast(weight, HALF) is recorded


@torch.no_grad()
def test_cast_without_gradients_is_gone_after_its_use() -> None:
    cache, weight = CastCache(), make_weight()
    for _ in range(3):  # as many forwards
        gone = weakref.ref(cache.cast(weight, HALF))
        assert gone() is None
        assert len(cache) == 0
        cache.clear()


@torch.no_grad()
def test_weight_that_a_forward_uses_often_is_cast_twice_in_the_first_and_once_in_others() -> None:
    cache, weight = CastCache(), make_weight()
    for casts in (2, 1, 1):
        uses = [cache.cast(weight, HALF) for _ in range(10)]
        assert len(set(map(id, uses))) == casts
        cache.clear()


@torch.no_grad()
def test_cast_without_gradients_is_kept_where_the_user_asks_for_it() -> None:
    cache, weight = CastCache(), make_weight()
    cache.keeps_all = True
    assert cache.cast(weight, HALF) is cache.cast(weight, HALF)


def test_frozen_weight_is_cast_once_as_well() -> None:
    cache, weight = CastCache(), make_weight().requires_grad_(False)
    assert cache.cast(weight, HALF) is cache.cast(weight, HALF)


@pytest.mark.parametrize("first", [True, False], ids=["then-frozen", "then-trained"])
def test_cast_follows_whether_the_weight_is_trained(first: bool) -> None:
    cache, weight = CastCache(), make_weight().requires_grad_(first)
    cache.cast(weight, HALF)
    weight.requires_grad_(not first)
    assert cache.cast(weight, HALF).requires_grad is not first


def test_nothing_made_under_inference_mode_is_kept() -> None:
    cache, weight = CastCache(), make_weight()
    with torch.inference_mode():
        assert cache.cast(weight, HALF).is_inference()
    assert len(cache) == 0
    assert not cache.cast(weight, HALF).is_inference()


def test_weight_made_under_inference_mode_is_cast_and_not_kept() -> None:
    cache = CastCache()
    with torch.inference_mode():
        weight = Parameter(torch.ones(3), requires_grad=False)
    assert torch.equal(cache.cast(weight, HALF), torch.ones(3, dtype=HALF))
    assert len(cache) == 0


def test_discarded_weight_is_cast_afresh_and_others_are_not() -> None:
    cache, one, other = CastCache(), make_weight(), make_weight()
    old, kept = cache.cast(one, HALF), cache.cast(other, HALF)
    cache.discard(one)
    assert cache.cast(one, HALF) is not old
    assert cache.cast(other, HALF) is kept


def test_discarding_what_was_never_cast_does_nothing() -> None:
    CastCache().discard(torch.ones(1))


def test_clear_forgets_every_cast() -> None:
    cache, weight = CastCache(), make_weight()
    old = cache.cast(weight, HALF)
    cache.clear()
    assert len(cache) == 0
    assert cache.cast(weight, HALF) is not old


def test_cleared_cache_keeps_no_weight_alive() -> None:
    cache, weight = CastCache(), make_weight()
    gone = weakref.ref(weight)
    cache.cast(weight, HALF)
    cache.clear()
    del weight
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_cast_without_history_keeps_no_weight_alive() -> None:
    cache, weight = CastCache(), make_weight()
    gone = weakref.ref(weight)
    cache.cast(weight, HALF)
    del weight
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_weights_that_come_and_go_do_not_pile_up() -> None:
    cache = CastCache()
    for value in range(2000):
        weight = Parameter(torch.full((3,), float(value)))
        assert torch.equal(cache.cast(weight, HALF), weight.half())
    assert len(cache) < 600


def test_two_caches_know_nothing_of_each_other() -> None:
    one, other, weight = CastCache(), CastCache(), make_weight()
    one.cast(weight, HALF)
    assert len(other) == 0
