"""Which half dtype is active here and now: scopes, suspension, threads, and the cast itself."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import Parameter

from amp_patch.casts.context import CastContext

FP16, BF16 = torch.float16, torch.bfloat16


def make_context() -> CastContext:
    context = CastContext()
    context.half_dtype = FP16
    return context


@contextmanager
def scope(context: CastContext, dtype: torch.dtype | None) -> Iterator[object]:
    owner = object()
    context.enter(owner, dtype)
    try:
        yield owner
    finally:
        context.leave(owner)


def test_new_context_casts_nothing() -> None:
    assert CastContext().active_dtype() is None


def test_half_dtype_holds_where_nothing_else_is_said() -> None:
    assert make_context().active_dtype() is FP16


def test_suspension_nests_and_ends_with_the_outermost() -> None:
    context = make_context()
    with context.suspended():
        with context.suspended():
            assert context.active_dtype() is None
        assert context.active_dtype() is None
    assert context.active_dtype() is FP16


def test_suspension_ends_with_an_exception() -> None:
    context = make_context()
    with pytest.raises(ValueError, match="inside"), context.suspended():
        raise ValueError("inside")
    assert context.active_dtype() is FP16


def test_suspension_works_as_a_decorator() -> None:
    context = make_context()

    @context.suspended()
    def inside() -> torch.dtype | None:
        return context.active_dtype()

    assert inside() is None
    assert inside() is None
    assert context.active_dtype() is FP16


def test_resumed_is_as_it_was_before_the_suspension() -> None:
    context = make_context()
    with context.suspended():
        with context.resumed():
            assert context.active_dtype() is FP16
        assert context.active_dtype() is None


def test_resumed_inside_two_suspensions_takes_off_one() -> None:
    context = make_context()
    with context.suspended(), context.suspended(), context.resumed():
        assert context.active_dtype() is None


def test_resumed_without_a_suspension_changes_nothing() -> None:
    context = make_context()
    with context.resumed():
        assert context.active_dtype() is FP16


def test_resumed_ends_with_an_exception() -> None:
    context = make_context()
    with context.suspended():
        with pytest.raises(ValueError, match="inside"), context.resumed():
            raise ValueError("inside")
        assert context.active_dtype() is None


@pytest.mark.parametrize("dtype", [BF16, None], ids=["bfloat16", "off"])
def test_scope_of_a_model_overrides_and_ends(dtype: torch.dtype | None) -> None:
    context = make_context()
    with scope(context, dtype):
        assert context.active_dtype() is dtype
    assert context.active_dtype() is FP16


def test_scope_of_an_inner_model_overrides_that_of_the_outer() -> None:
    context = make_context()
    with scope(context, None), scope(context, BF16):
        assert context.active_dtype() is BF16


def test_model_cannot_switch_on_what_the_user_suspended() -> None:
    context = make_context()
    with context.suspended(), scope(context, BF16):
        assert context.active_dtype() is None
        with scope(context, FP16):
            assert context.active_dtype() is None


def test_leaving_a_model_ends_scopes_inside_it_that_an_exception_left_open() -> None:
    context, outer = make_context(), object()
    context.enter(outer, BF16)
    context.enter(object(), None)
    context.leave(outer)
    assert context.active_dtype() is FP16


def test_leaving_a_model_that_was_never_entered_changes_nothing() -> None:
    context = make_context()
    with scope(context, BF16):
        context.leave(object())
        assert context.active_dtype() is BF16


def test_model_that_calls_itself_is_left_one_level_at_a_time() -> None:
    context, model = make_context(), object()
    context.enter(model, BF16)
    context.enter(model, BF16)
    context.leave(model)
    assert context.active_dtype() is BF16
    context.leave(model)
    assert context.active_dtype() is FP16


def test_suspension_is_of_one_thread() -> None:
    context, seen = make_context(), []
    with context.suspended():
        thread = threading.Thread(target=lambda: seen.append(context.active_dtype()))
        thread.start()
        thread.join()
    assert seen == [FP16]


def test_suspension_is_of_one_asyncio_task() -> None:
    context, seen = make_context(), []

    async def suspending(is_inside: asyncio.Event, is_done: asyncio.Event) -> None:
        with context.suspended():
            is_inside.set()
            await is_done.wait()

    async def looking(is_inside: asyncio.Event, is_done: asyncio.Event) -> None:
        await is_inside.wait()
        seen.append(context.active_dtype())
        is_done.set()

    async def both() -> None:
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(suspending(*events), looking(*events))

    asyncio.run(both())
    assert seen == [FP16]


def test_contexts_are_independent() -> None:
    one, other = make_context(), make_context()
    with one.suspended():
        assert other.active_dtype() is FP16


def test_weight_goes_through_the_cache() -> None:
    context, weight = make_context(), Parameter(torch.ones(2))
    assert context.cast(weight, FP16) is context.cast(weight, FP16)
    assert len(context.cache) == 1


def test_activation_is_cast_and_not_cached() -> None:
    context, activation = make_context(), torch.ones(2)
    assert context.cast(activation, FP16) is not context.cast(activation, FP16)
    assert len(context.cache) == 0


def test_weight_is_not_cached_while_it_is_traced() -> None:
    context, weight = make_context(), Parameter(torch.ones(2), requires_grad=False)
    torch.func.vmap(lambda x: x + context.cast(weight, FP16))(torch.ones(3, 2))
    torch.jit.trace(lambda x: x + context.cast(weight, FP16), torch.ones(2), check_trace=False)
    assert len(context.cache) == 0


def test_outermost_forward_without_gradients_empties_the_cache() -> None:
    context, weight = make_context(), Parameter(torch.ones(2))
    with torch.no_grad(), scope(context, FP16):
        with scope(context, FP16):
            for _ in range(2):  # only what is used again is kept without gradients
                context.cast(weight, FP16)
        assert len(context.cache) == 1
    assert len(context.cache) == 0


def test_forward_with_gradients_keeps_the_cache() -> None:
    context, weight = make_context(), Parameter(torch.ones(2))
    with scope(context, FP16):
        context.cast(weight, FP16)
    assert len(context.cache) == 1


def test_deep_copy_is_the_context_itself() -> None:
    context = make_context()
    assert copy.deepcopy(context) is context
