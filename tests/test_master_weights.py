"""FP32 masters: made before rounding, kept true both ways, given back exactly."""

from __future__ import annotations

import copy
import gc
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import Parameter

from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.param_pairs import ParamPair, ParamPairs

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
FP16, FP32 = torch.float16, torch.float32

THIRD = 1 / 3  # rounds in every half dtype


def cast_parameter(
    value: float = THIRD, half: torch.dtype = FP16, *, keep_master: bool = True
) -> tuple[MasterWeights, Parameter]:
    masters, parameter = MasterWeights(), Parameter(torch.full((4,), value))
    masters.cast_(parameter, half, keep_master)
    return masters, parameter


@HALVES
def test_cast_is_in_place_and_the_master_is_what_was_before_rounding(half: torch.dtype) -> None:
    masters, parameter = cast_parameter(half=half)
    pair = masters.pair(parameter)
    assert pair.model is parameter
    assert parameter.dtype is half
    assert pair.has_master
    assert isinstance(pair.master, Parameter)
    assert torch.equal(pair.master, torch.full((4,), THIRD))
    assert torch.equal(parameter, torch.full((4,), THIRD, dtype=half))


def test_master_needs_a_gradient_if_the_parameter_did() -> None:
    for needs in (True, False):
        masters, parameter = MasterWeights(), Parameter(torch.ones(2), requires_grad=needs)
        masters.cast_(parameter, FP16, keep_master=True)
        assert masters.pair(parameter).master.requires_grad is needs
        assert parameter.requires_grad is needs


def test_master_of_a_buffer_is_no_parameter() -> None:
    masters, buffer = MasterWeights(), torch.full((2,), THIRD)
    masters.cast_(buffer, FP16, keep_master=True)
    master = masters.pair(buffer).master
    assert type(master) is torch.Tensor
    assert torch.equal(master, torch.full((2,), THIRD))


def test_cast_without_a_master_pairs_the_parameter_with_itself() -> None:
    masters, parameter = cast_parameter(keep_master=False)
    pair = masters.pair(parameter)
    assert not pair.has_master
    assert pair.model is pair.master is parameter
    assert masters.has_cast(parameter)


def test_tensor_that_was_not_cast_is_known_as_such() -> None:
    masters, parameter = MasterWeights(), Parameter(torch.ones(2).double())
    assert masters.pair(parameter) == ParamPair(parameter, parameter)
    assert not masters.has_cast(parameter)
    assert masters.original_dtype(parameter) is torch.float64
    assert masters.full_value(parameter) is None
    masters.restore_(parameter)
    masters.set_master_(parameter, torch.zeros(2))
    assert parameter.tolist() == [1.0, 1.0]


def test_original_dtype_is_remembered() -> None:
    masters, parameter = cast_parameter()
    assert masters.original_dtype(parameter) is FP32


def test_gradient_that_exists_goes_with_the_weight() -> None:
    for keep_master in (True, False):
        masters, parameter = MasterWeights(), Parameter(torch.ones(2))
        parameter.grad = torch.full((2,), 2.0)
        masters.cast_(parameter, FP16, keep_master)
        pair = masters.pair(parameter)
        assert pair.master.grad.tolist() == [2.0, 2.0]
        assert pair.master.grad.dtype is pair.master.dtype
        assert not (pair.has_master and pair.model.grad is not None)


@HALVES
def test_restore_gives_back_every_bit(half: torch.dtype) -> None:
    values = torch.randn(100) * 1e3
    parameter = Parameter(values.clone())
    masters = MasterWeights()
    masters.cast_(parameter, half, keep_master=True)
    masters.restore_(parameter)
    assert parameter.dtype is FP32
    assert torch.equal(parameter, values)
    assert not masters.has_cast(parameter)


def test_restore_without_a_master_gives_back_the_dtype_and_rounded_values() -> None:
    masters, parameter = cast_parameter(keep_master=False)
    masters.restore_(parameter)
    assert torch.equal(parameter, torch.full((4,), THIRD).half().float())


def test_second_restore_does_nothing() -> None:
    masters, parameter = cast_parameter()
    masters.restore_(parameter)
    with torch.no_grad():
        parameter.fill_(2.0)
    masters.restore_(parameter)
    assert parameter.tolist() == [2.0] * 4


def test_restore_takes_the_gradient_of_the_master_along() -> None:
    masters, parameter = cast_parameter()
    masters.pair(parameter).master.grad = torch.full((4,), 5.0)
    masters.restore_(parameter)
    assert parameter.grad.tolist() == [5.0] * 4
    assert parameter.grad.dtype is FP32


def test_restore_keeps_what_the_user_wrote_into_the_model() -> None:
    masters, parameter = cast_parameter()
    with torch.no_grad():
        parameter[1] = 7.0
    masters.restore_(parameter)
    assert parameter.tolist() == torch.tensor([THIRD, 7.0, THIRD, THIRD]).tolist()


def test_trained_master_is_what_restore_gives_back() -> None:
    masters, parameter = cast_parameter()
    with torch.no_grad():
        masters.pair(parameter).master.add_(2.0**-20)
    ParamPairs([masters.pair(parameter)]).copy_to_model()
    masters.restore_(parameter)
    assert torch.equal(parameter, torch.full((4,), THIRD) + 2.0**-20)


def test_float64_weight_cast_by_nobody_is_not_given_a_master() -> None:
    masters, parameter = MasterWeights(), Parameter(torch.ones(2).double())
    masters.ensure_master(parameter)
    assert not masters.pair(parameter).has_master


@HALVES
def test_half_weight_gets_a_master_of_its_present_value(half: torch.dtype) -> None:
    masters, parameter = MasterWeights(), Parameter(torch.full((2,), THIRD, dtype=half))
    masters.ensure_master(parameter)
    master = masters.pair(parameter).master
    assert torch.equal(master, parameter.float())
    assert masters.original_dtype(parameter) is half
    masters.ensure_master(parameter)
    assert masters.pair(parameter).master is master


def test_master_that_exists_is_not_made_again() -> None:
    masters, parameter = cast_parameter()
    master = masters.pair(parameter).master
    masters.ensure_master(parameter)
    assert masters.pair(parameter).master is master
    assert torch.equal(master, torch.full((4,), THIRD))


def test_full_value_is_the_master_or_a_copy_in_the_original_dtype() -> None:
    masters, parameter = cast_parameter()
    assert masters.full_value(parameter) is masters.pair(parameter).master
    masters, parameter = cast_parameter(keep_master=False)
    full = masters.full_value(parameter)
    assert full is not None
    assert full.dtype is FP32
    assert torch.equal(full, parameter.detach().float())


def test_value_of_another_shape_is_not_written_into_the_master() -> None:
    masters, parameter = cast_parameter()
    masters.set_master_(parameter, torch.zeros(5))
    assert torch.equal(masters.pair(parameter).master, torch.full((4,), THIRD))


def test_value_is_written_into_the_master_exactly() -> None:
    masters, parameter = cast_parameter()
    masters.set_master_(parameter, torch.full((4,), 0.1))
    assert torch.equal(masters.pair(parameter).master, torch.full((4,), 0.1))


def test_copy_to_model_rounds_each_master_and_leaves_the_others_alone() -> None:
    masters, parameter = cast_parameter()
    plain = Parameter(torch.ones(2))
    pairs = [masters.pair(parameter), masters.pair(plain)]
    with torch.no_grad():
        pairs[0].master.fill_(0.1)
    ParamPairs(pairs).copy_to_model()
    assert torch.equal(parameter, torch.full((4,), 0.1).half())
    assert torch.equal(plain, torch.ones(2))


def test_copy_to_model_counts_as_no_write_of_the_user() -> None:
    masters, parameter = cast_parameter()
    pair = masters.pair(parameter)
    with torch.no_grad():
        pair.master.fill_(0.1)
    ParamPairs([pair]).copy_to_model()
    ParamPairs([pair]).refresh()
    assert torch.equal(pair.master, torch.full((4,), 0.1))


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
ROWS = st.lists(st.tuples(FLOATS, st.booleans(), FLOATS), min_size=1, max_size=12)


@given(ROWS, st.sampled_from([FP16, torch.bfloat16]))
def test_refresh_takes_over_the_elements_that_were_written_and_no_others(
    rows: list[tuple[float, bool, float]], half: torch.dtype
) -> None:
    before = torch.tensor([value for value, _, _ in rows])
    written = torch.tensor([is_written for _, is_written, _ in rows])
    new = torch.tensor([value for _, _, value in rows]).to(half)
    parameter, masters = Parameter(before.clone()), MasterWeights()
    masters.cast_(parameter, half, keep_master=True)
    with torch.no_grad():
        parameter.copy_(torch.where(written, new, parameter))
    pair = masters.pair(parameter)
    ParamPairs([pair]).refresh()
    # The rule: a master stands wherever rounding it still gives what is in the model.
    wanted = torch.where(before.to(half) == parameter, before, parameter.detach().float())
    assert torch.equal(pair.master.nan_to_num(0.5), wanted.nan_to_num(0.5))
    assert torch.equal(pair.master.isnan(), wanted.isnan())
    untouched = ~written & ~before.isnan()
    assert torch.equal(pair.master[untouched], before[untouched])


def test_refresh_without_a_write_leaves_the_master_the_same_bits() -> None:
    masters, parameter = cast_parameter()
    pair = masters.pair(parameter)
    version = pair.master._version
    ParamPairs([pair]).refresh()
    assert pair.master._version == version


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=8))
def test_deep_copy_has_the_same_bits_and_is_independent(values: list[float]) -> None:
    parameter, masters = Parameter(torch.tensor(values)), MasterWeights()
    masters.cast_(parameter, FP16, keep_master=True)
    twins, twin = copy.deepcopy((masters, parameter))
    assert torch.equal(twin, parameter)
    assert torch.equal(twins.pair(twin).master, torch.tensor(values))
    assert twins.original_dtype(twin) is FP32
    with torch.no_grad():
        twins.pair(twin).master.zero_()
        twin.zero_()
    assert torch.equal(masters.pair(parameter).master, torch.tensor(values))
    masters.restore_(parameter)
    assert torch.equal(parameter, torch.tensor(values))


def test_deep_copy_takes_over_what_was_written_into_the_model_just_before() -> None:
    masters, parameter = cast_parameter()
    with torch.no_grad():
        parameter.fill_(7.0)
    twins, twin = copy.deepcopy((masters, parameter))
    assert twins.full_value(twin).tolist() == [7.0] * 4


def test_copy_for_some_tensors_knows_only_those() -> None:
    masters, one = cast_parameter()
    other = Parameter(torch.ones(2))
    masters.cast_(other, FP16, keep_master=True)
    memo: dict[int, object] = {}
    copied = masters.copied_for([one], memo)
    assert copied.has_cast(memo[id(one)])  # type: ignore[arg-type]
    assert id(other) not in memo


def test_model_tensor_is_not_kept_alive() -> None:
    masters, parameter = cast_parameter()
    gone = weakref.ref(parameter)
    del parameter
    gc.collect()
    assert gone() is None
    del masters


def test_master_dies_with_its_model_unless_an_optimizer_holds_it() -> None:
    masters, parameter = cast_parameter()
    gone = weakref.ref(masters.pair(parameter).master)
    del parameter
    gc.collect()
    assert gone() is None
    del masters


def test_undo_restores_its_tensors_and_holds_none_of_them() -> None:
    masters, parameter = cast_parameter()
    other = Parameter(torch.full((2,), THIRD))
    masters.cast_(other, FP16, keep_master=True)
    undo, gone = masters.undo_of([parameter, other]), weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    undo()
    assert torch.equal(parameter, torch.full((4,), THIRD))
    undo()
