"""The arithmetic on gradients, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from amp_patch.scaling import gradients

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCALES = (1.0, 128.0, 2.0**16, 2.0**24, 2.0**-8, 1000.0, 3.7)
FUSED = "_amp_foreach_non_finite_check_and_unscale_"


@contextmanager
def kernel(is_fused: bool) -> Iterator[None]:
    """With torch's fused kernel, or as on a torch that has none."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_fused:
            patch.delattr(torch, FUSED)
        yield


def dense(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def sparse(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Rows of a table of eight; some occur twice, as in the gradient of an embedding."""
    rows = torch.tensor([[i * 3 % 8 // 2 for i in range(len(values))]], dtype=torch.int64)
    table = dense(values, dtype)[:, None]
    return torch.sparse_coo_tensor(rows, table, (8, 1), check_invariants=True)


def float64(tensor: torch.Tensor) -> Any:
    return tensor.detach().to_dense().double().numpy()


VALUES = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, -65504.0, 3e38, 2.0**-20])),
    max_size=6,
)
GRADIENTS = st.lists(
    st.builds(
        lambda values, dtype, make: make(values, dtype),
        VALUES,
        st.sampled_from(DTYPES),
        st.sampled_from([dense, sparse]),
    ),
    max_size=5,
)
FINITE = st.floats(-1000, 1000, width=16)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "fallback"])
@given(GRADIENTS, st.sampled_from(SCALES))
def test_unscale_divides_and_finds_what_numpy_finds(
    is_fused: bool, given_: list[torch.Tensor], scale: float
) -> None:
    elements = [g.clone()._values() if g.is_sparse else g.clone() for g in given_]
    is_overflow = any(not np.isfinite(float64(one)).all() for one in elements)
    with kernel(is_fused):
        found = gradients.unscale_(given_, scale)
    assert gradients.any_found(found) is is_overflow
    for before, gradient in zip(elements, given_, strict=True):
        after = gradient._values() if gradient.is_sparse else gradient
        info = torch.finfo(after.dtype)
        with np.errstate(over="ignore"):
            wanted = float64(before) / scale
        is_inside = np.isfinite(wanted) & (np.abs(wanted) < info.max)
        # The product with a rounded reciprocal: one unit in the last place, of float32 at least.
        rtol = max(info.eps, 2.0**-23)
        np.testing.assert_allclose(
            float64(after)[is_inside], wanted[is_inside], rtol=rtol, atol=info.smallest_normal
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [dense, sparse])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan], ids=repr)
def test_one_bad_element_anywhere_is_an_overflow(make: Any, dtype: torch.dtype, bad: float) -> None:
    clean = [dense([1.0, 2.0], torch.float16), sparse([1.0], torch.float32)]
    assert not gradients.any_found(gradients.unscale_(clean, 2.0))
    assert gradients.any_found(gradients.unscale_([*clean, make([0.0, 1.0, bad], dtype)], 2.0))


@pytest.mark.parametrize("make", [dense, sparse])
def test_large_gradients_whose_sum_is_infinite_are_no_overflow(make: Any) -> None:
    gradient = make([3e38] * 6, torch.float32)
    assert not gradients.any_found(gradients.unscale_([gradient], 1.0))


def test_unscale_works_in_place() -> None:
    gradient = torch.full((2,), 4.0)
    address = gradient.data_ptr()
    gradients.unscale_([gradient], 4.0)
    assert gradient.data_ptr() == address
    assert torch.equal(gradient, torch.ones(2))


def test_verdict_is_one_float_a_device_left_on_it() -> None:
    mixed = [dense([1.0], dtype) for dtype in DTYPES]
    (verdict,) = gradients.unscale_(mixed, 2.0)
    assert verdict.dtype is torch.float32
    assert verdict.shape == ()


def test_no_gradients_give_no_verdict() -> None:
    assert gradients.unscale_([], 2.0) == []
    assert gradients.any_found([]) is False


def test_empty_and_scalar_gradients_are_unscaled() -> None:
    scalar = torch.tensor(8.0)
    found = gradients.unscale_([torch.empty(0), scalar, torch.empty(0, 3).half()], 4.0)
    assert not gradients.any_found(found)
    assert scalar.item() == 2.0


def test_gradient_with_gaps_in_memory_is_unscaled_alone() -> None:
    whole = torch.full((4, 4), 4.0)
    gradients.unscale_([whole[:, ::2].t()], 4.0)
    assert torch.equal(whole, torch.tensor([[1.0, 4.0, 1.0, 4.0]]).expand(4, 4))


@pytest.mark.parametrize("bad", [complex(np.inf, 0), complex(0, np.nan)], ids=repr)
def test_complex_gradients_are_unscaled_and_checked(bad: complex) -> None:
    gradient = torch.tensor([4 + 8j, 0])
    assert not gradients.any_found(gradients.unscale_([gradient], 4.0))
    assert torch.equal(gradient, torch.tensor([1 + 2j, 0]))
    assert gradients.any_found(gradients.unscale_([torch.tensor([1, bad])], 4.0))


def test_verdict_is_kept_over_groups_of_dtypes() -> None:
    bad = dense([np.inf], torch.float16)
    clean = [dense([1.0], dtype) for dtype in DTYPES]
    assert gradients.any_found(gradients.unscale_([bad, *clean], 2.0))


def test_any_found_reads_several_verdicts() -> None:
    clean, bad = torch.tensor(0.0), torch.tensor(1.0)
    assert gradients.any_found(iter([clean, clean, bad])) is True
    assert gradients.any_found([clean, clean]) is False
    assert gradients.any_found([bad]) is True


PAIRS = st.lists(
    st.tuples(
        st.lists(FINITE, min_size=6, max_size=6),
        st.lists(FINITE, min_size=6, max_size=6),
        st.sampled_from(DTYPES),
        st.sampled_from(DTYPES),
        st.booleans(),
        st.booleans(),
    ),
    max_size=5,
)


@given(PAIRS)
def test_sums_are_those_of_numpy_for_any_mix_of_dtypes_and_layouts(pairs: Any) -> None:
    totals, fresh = [], []
    for first, second, first_dtype, second_dtype, is_first_sparse, is_second_sparse in pairs:
        totals.append(spread(first, first_dtype, is_first_sparse))
        fresh.append(spread(second, second_dtype, is_second_sparse))
    wanted = [float64(a) + float64(b) for a, b in zip(totals, fresh, strict=True)]
    sums = gradients.accumulate_(totals, fresh)
    for total, want, one, other in zip(sums, wanted, totals, fresh, strict=True):
        # Rounded once into the dtype that holds the sum, and once more where an addend is narrower.
        eps = max(torch.finfo(tensor.dtype).eps for tensor in (total, one, other))
        np.testing.assert_allclose(float64(total), want, rtol=eps, atol=eps * 2000)


def spread(values: Sequence[float], dtype: torch.dtype, is_sparse: bool) -> torch.Tensor:
    tensor = dense(values, dtype)
    return tensor.to_sparse() if is_sparse else tensor


def test_dense_sum_is_made_in_place_and_leaves_the_addend_alone() -> None:
    total, fresh = torch.ones(2), torch.ones(2)
    (found,) = gradients.accumulate_([total], [fresh])
    assert found is total
    assert torch.equal(total, torch.full((2,), 2.0))
    assert torch.equal(fresh, torch.ones(2))


def test_two_sparse_gradients_stay_sparse() -> None:
    (found,) = gradients.accumulate_(
        [sparse([1.0, 2.0], torch.float32)], [sparse([3.0], torch.float32)]
    )
    assert found.is_sparse


def test_small_addend_is_not_lost_in_a_wide_total() -> None:
    total = torch.ones(1)
    gradients.accumulate_([total], [torch.full((1,), 2.0**-20, dtype=torch.float16)])
    assert total.item() == 1.0 + 2.0**-20


def test_nothing_is_added_to_nothing() -> None:
    assert gradients.accumulate_([], []) == []


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        gradients.accumulate_([torch.ones(1)], [])


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_copy_converts_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    values = dense([1 / 3, 1e-6, 70000.0, -2.5], source)
    targets = [torch.zeros(4, dtype=target), torch.zeros(4, dtype=torch.float32)]
    gradients.copy_(targets, [values, values])
    assert torch.equal(targets[0], values.to(target))
    assert torch.equal(targets[1], values.float())


def test_copy_of_nothing_does_nothing() -> None:
    gradients.copy_([], [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sparse_gradients_are_added_in_every_dtype(dtype: torch.dtype) -> None:
    rows, values = torch.tensor([[0, 2, 2]]), torch.tensor([1.0, 2.0, 4.0], dtype=dtype)
    one = torch.sparse_coo_tensor(rows, values, (4,), check_invariants=True)
    other = torch.sparse_coo_tensor(rows[:, 1:], values[1:] * 4, (4,), check_invariants=True)
    (total,) = gradients.accumulate_([one], [other])
    assert total.layout is torch.sparse_coo
    assert total.dtype is dtype
    assert total.to_dense().tolist() == [1.0, 0.0, 30.0, 0.0]  # 2 + 4 + 8 + 16
