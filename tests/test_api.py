"""The public functions: what they take, what they give back, and what they say before `initialize`.

How whole training loops behave is tested elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

import amp_patch as amp

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = pytest.mark.parametrize("opt_level", amp.OPT_LEVELS)
SCALED = pytest.mark.parametrize("opt_level", ["O1", "O2"])
INF = float("inf")
X = torch.ones(1, 2)


def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def started(opt_level: str, **overrides: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **overrides)
    return model, optimizer


def small_loss(*models: nn.Module) -> torch.Tensor:
    """A loss whose gradients stay finite in float16 at the first loss scale."""
    return torch.stack([model(X).float().square().sum() for model in models]).sum() * 1e-3


def overflow(model: nn.Linear) -> None:
    """What a backward pass leaves where it overflowed."""
    model.weight.grad[0, 0] = INF


def linear_dtype() -> torch.dtype:
    """The dtype in which a matrix product runs here and now."""
    return F.linear(X, torch.ones(2, 2)).dtype


# -- initialize: what comes back -------------------------------------------------------------------


@LEVELS
def test_one_comes_back_as_one_and_is_the_object_passed(opt_level: str) -> None:
    model, optimizer = make()
    found = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert type(found) is tuple
    assert found[0] is model
    assert found[1] is optimizer


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("enabled", [True, False])
def test_list_comes_back_as_the_list_of_the_objects_passed(kind: Any, enabled: bool) -> None:
    pairs = [make(), make()]
    models, optimizers = kind(m for m, _ in pairs), kind(o for _, o in pairs)
    got_models, got_optimizers = amp.initialize(models, optimizers, enabled, verbosity=0)
    assert type(got_models) is type(got_optimizers) is kind
    assert all(a is b for a, b in zip(got_models, models, strict=True))
    assert all(a is b for a, b in zip(got_optimizers, optimizers, strict=True))


@pytest.mark.parametrize("enabled", [True, False])
def test_without_optimizers_only_the_models_come_back(enabled: bool) -> None:
    model = nn.Linear(2, 2)
    assert amp.initialize(model, enabled=enabled, verbosity=0) is model
    models = [nn.Linear(2, 2)]
    assert amp.initialize(models, enabled=enabled, verbosity=0)[0] is models[0]


def test_names_order_and_defaults_are_those_that_scripts_use() -> None:
    found = inspect.signature(amp.initialize).parameters
    positional = [name for name, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "models",
        "optimizers",
        "enabled",
        "opt_level",
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
        "cast_model_outputs",
        "num_losses",
        "verbosity",
        "min_loss_scale",
        "max_loss_scale",
    ]
    given_ = {name: found[name].default for name in positional[1:]}
    expected = dict.fromkeys(positional[1:])
    expected |= {"enabled": True, "opt_level": "O1", "num_losses": 1, "verbosity": 1}
    assert given_ == {**expected, "max_loss_scale": 2.0**24}
    assert all(p.kind is p.KEYWORD_ONLY for name, p in found.items() if name not in positional)
    assert list(inspect.signature(amp.scale_loss).parameters)[:6] == [
        "loss",
        "optimizers",
        "loss_id",
        "model",
        "delay_unscale",
        "delay_overflow_check",
    ]


def test_public_names_are_there_once_each() -> None:
    assert len(set(amp.__all__)) == len(amp.__all__)
    assert all(hasattr(amp, name) for name in amp.__all__)


# -- initialize: what it takes ---------------------------------------------------------------------


def test_options_of_a_command_line_work_as_strings() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level")
    parser.add_argument("--keep-batchnorm-fp32", default=None)
    parser.add_argument("--loss-scale", default=None)
    parser.add_argument("--master-weights", default=None)
    line = "--opt-level O2 --keep-batchnorm-fp32 False --loss-scale 128.0 --master-weights True"
    options = parser.parse_args(line.split())
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, verbosity=0, **vars(options))
    assert model[1].weight.dtype is FP16
    assert amp.loss_scale() == 128.0
    assert next(amp.master_params(optimizer)).dtype is FP32


@pytest.mark.parametrize("text", ["None", "", None], ids=repr)
def test_option_that_was_not_given_leaves_the_property_to_the_level(text: str | None) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(
        model,
        optimizer,
        opt_level="O2",
        verbosity=0,
        keep_batchnorm_fp32=text,
        loss_scale=text,
        master_weights=text,
        cast_model_type=text,
        half_dtype=text,
    )
    assert model[0].weight.dtype is FP32
    assert amp.loss_scale() == 65536.0


@pytest.mark.parametrize("text", ["False", "0", "no", False, 0], ids=repr)
def test_disabled_may_be_a_string(text: Any) -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=text, opt_level="O2")
    assert model.weight.dtype is FP32


class Slotted:
    """An optimizer on which nothing can be put."""

    __slots__ = ("param_groups",)

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def step(self) -> None:
        """Do nothing."""

    def zero_grad(self) -> None:
        """Do nothing."""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "models-none": (lambda: amp.initialize(None), "models: expected a torch.nn.Module or a list"),
    "models-class": (lambda: amp.initialize(nn.Linear), "models: expected a torch.nn.Module"),
    "models-function": (lambda: amp.initialize(F.relu), "models: expected a torch.nn.Module"),
    "models-in-list": (lambda: amp.initialize([nn.Linear(1, 1), 3]), "found int 3"),
    "models-dict": (lambda: amp.initialize({"a": nn.Linear(1, 1)}), "models: expected"),
    "models-generator": (lambda: amp.initialize(m for m in ()), "models: expected"),
    "models-twice": (
        lambda: amp.initialize([twin := nn.Linear(1, 1), twin]),
        "models: expected different objects, found one of them twice",
    ),
    "optimizers-number": (lambda: amp.initialize(nn.Linear(1, 1), 3), "optimizers: expected"),
    "optimizers-class": (
        lambda: amp.initialize(nn.Linear(1, 1), torch.optim.SGD),
        "optimizers: expected an optimizer (with param_groups and step)",
    ),
    "optimizers-scheduler": (
        lambda: amp.initialize(
            nn.Linear(1, 1), torch.optim.lr_scheduler.StepLR(make()[1], step_size=1)
        ),
        "optimizers: expected",
    ),
    "optimizers-with-slots": (
        lambda: amp.initialize(nn.Linear(1, 1), Slotted()),
        "optimizers: expected",
    ),
    "optimizers-twice": (
        lambda: amp.initialize(nn.Linear(1, 1), [twin := make()[1], twin]),
        "optimizers: expected different objects",
    ),
    "swapped": (lambda: amp.initialize(*reversed(make())), "models: expected a torch.nn.Module"),
    "enabled": (
        lambda: amp.initialize(nn.Linear(1, 1), enabled="maybe"),
        "enabled: expected True, False or None, found 'maybe'",
    ),
    "opt-level": (lambda: amp.initialize(nn.Linear(1, 1), opt_level="01"), "did you mean 'O1'?"),
    "num-losses-zero": (
        lambda: amp.initialize(nn.Linear(1, 1), num_losses=0),
        "num_losses: expected an integer of at least 1, found 0",
    ),
    "num-losses-text": (lambda: amp.initialize(nn.Linear(1, 1), num_losses="x"), "num_losses: "),
    "verbosity": (
        lambda: amp.initialize(nn.Linear(1, 1), verbosity=-1),
        "verbosity: expected an integer of at least 0, found -1",
    ),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_argument_that_is_wrong_is_refused_by_name(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(amp.AmpError) as caught:
        call()
    assert words in str(caught.value)
    assert F.linear is torch.nn.functional.linear
    with pytest.raises(amp.AmpError, match=r"expected an earlier call of amp\.initialize"):
        amp.loss_scale()


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=2),
    st.sampled_from(["dynamic", "O2", "o3", "True", "nan", "-1", "float16", " none ", "1e999"]),
    st.sampled_from([torch.float64, torch.float16, torch.int8]),
    st.lists(st.one_of(st.integers(0, 2), st.just("dynamic"), st.none()), max_size=2),
    st.sampled_from([object(), torch.ones(2), torch.tensor(2.0), torch.empty(1, device="meta")]),
)
SWITCHES = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
    "verbosity",
    "min_loss_scale",
    "max_loss_scale",
    "half_dtype",
)
WAYS = ("models", "optimizers", *SWITCHES)


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=25)
@given(junk=JUNK, opt_level=st.sampled_from(list(amp.OPT_LEVELS)))
def test_any_value_works_or_is_refused_by_name(name: str, junk: object, opt_level: str) -> None:
    model, optimizer = make()
    weight = model.weight.detach().clone()
    arguments = {"models": model, "optimizers": optimizer, "opt_level": opt_level, "verbosity": 0}
    arguments[name] = junk
    try:
        amp.initialize(**arguments)
        model(X)
    except amp.AmpError as error:
        assert name in str(error)  # noqa: PT017 (most values work)
        with pytest.raises(amp.AmpError, match=r"earlier call of amp\.initialize"):
            amp.state_dict()
    finally:
        amp.uninitialize()
    assert model.weight.dtype is FP32
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert torch.allclose(model.weight, weight, rtol=2**-8)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_loss_has_a_scale(count: int) -> None:
    started("O1", num_losses=count)
    assert [amp.loss_scale(i) for i in range(count)] == [65536.0] * count
    with pytest.raises(amp.AmpError, match=rf"loss_id: expected 0 to {count - 1}, found {count}"):
        amp.loss_scale(count)


@SCALED
def test_warning_in_initialize_that_is_an_error_leaves_everything_as_it_was(opt_level: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    weight = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(amp.AmpWarning):
            amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert torch.equal(model.weight, weight)
    assert "step" not in vars(optimizer)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)


def test_warning_of_initialize_points_at_the_call() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    with pytest.warns(amp.AmpWarning) as caught:
        amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(("verbosity", "count"), [(0, 0), (1, 1), (2, 1)])
def test_verbosity_says_whether_there_is_a_line_in_the_log(
    verbosity: int, count: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="amp_patch"):
        amp.initialize(nn.Linear(2, 2), verbosity=verbosity)
    assert len(caplog.records) == count
    assert capsys.readouterr() == ("", "")


# -- before initialize -----------------------------------------------------------------------------

NEEDS_INITIALIZE: dict[str, Callable[[], Any]] = {
    "scale_loss": lambda: amp.scale_loss(torch.ones(1, requires_grad=True), make()[1]),
    "master_params": lambda: list(amp.master_params(make()[1])),
    "state_dict": amp.state_dict,
    "load_state_dict": lambda: amp.load_state_dict({}),
    "loss_scale": amp.loss_scale,
    "step_was_skipped": lambda: amp.step_was_skipped(make()[1]),
}
NEEDS_NOTHING: dict[str, Callable[[], Any]] = {
    "uninitialize": amp.uninitialize,
    "clear_cache": amp.clear_cache,
    "disable_casts": lambda: contextlib.ExitStack().enter_context(amp.disable_casts()),
}


@pytest.mark.parametrize(
    ("name", "call"), NEEDS_INITIALIZE.items(), ids=lambda v: v if isinstance(v, str) else ""
)
@pytest.mark.parametrize("was_there", [False, True], ids=["before", "after-uninitialize"])
def test_call_that_needs_initialize_says_so(
    name: str, call: Callable[[], Any], was_there: bool
) -> None:
    if was_there:
        started("O1")
        amp.uninitialize()
    with pytest.raises(amp.AmpError) as caught:
        call()
    assert str(caught.value) == f"{name}: expected an earlier call of amp.initialize, found none"


@pytest.mark.parametrize("call", NEEDS_NOTHING.values(), ids=NEEDS_NOTHING.keys())
def test_call_that_needs_no_initialize_does_nothing(call: Callable[[], Any]) -> None:
    for _ in range(2):
        assert call() is None


# -- enabled=False ---------------------------------------------------------------------------------


def test_disabled_changes_nothing_and_every_call_is_a_no_op() -> None:
    model, optimizer = make()
    before = (dict(vars(optimizer)), dict(vars(model)), F.linear)
    amp.initialize(model, optimizer, enabled=False, opt_level="O2", num_losses=3)
    assert (dict(vars(optimizer)), dict(vars(model)), F.linear) == before
    loss = small_loss(model)
    for loss_id in (0, 7):
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            assert scaled is loss
    with amp.disable_casts():
        assert linear_dtype() is FP32
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.loss_scale() == amp.loss_scale(5) == 1.0
    assert amp.step_was_skipped(optimizer) is False
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    amp.clear_cache()
    amp.uninitialize()
    assert (dict(vars(optimizer)), dict(vars(model)), F.linear) == before


@pytest.mark.parametrize("loss", [3.0, torch.ones(1), torch.ones(1, dtype=torch.int64)], ids=repr)
def test_disabled_scale_loss_hands_out_whatever_it_is_given(loss: Any) -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=False)
    with amp.scale_loss(loss, [optimizer]) as scaled:
        assert scaled is loss


def test_disabled_takes_options_that_contradict() -> None:
    amp.initialize(*make(), enabled=False, opt_level="O1", master_weights=True)


@SCALED
def test_checkpoint_of_an_enabled_run_loads_into_a_disabled_one(opt_level: str) -> None:
    started(opt_level)
    state = amp.state_dict()
    amp.uninitialize()
    amp.initialize(*make(), enabled=False)
    amp.load_state_dict(state)
    assert amp.state_dict() == {}
    assert amp.loss_scale() == 1.0


@SCALED
def test_checkpoint_of_a_disabled_run_loads_into_an_enabled_one_with_a_warning(
    opt_level: str,
) -> None:
    amp.initialize(*make(), enabled=False)
    state = amp.state_dict()
    amp.uninitialize()
    started(opt_level)
    with pytest.warns(amp.AmpWarning, match=r"missing \['loss_scaler0'\]") as caught:
        amp.load_state_dict(state)
    assert [warning.filename for warning in caught] == [__file__]
    assert amp.loss_scale() == 65536.0


@SCALED
@pytest.mark.parametrize("is_disabled_first", [True, False])
def test_disabled_pair_beside_an_enabled_one_is_left_alone(
    opt_level: str, is_disabled_first: bool
) -> None:
    (plain, plain_optimizer), (model, optimizer) = make(), make()
    calls = [
        lambda: amp.initialize(plain, plain_optimizer, enabled=False),
        lambda: amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0),
    ]
    for call in calls if is_disabled_first else reversed(calls):
        call()
    loss = small_loss(plain)
    with amp.scale_loss(loss, plain_optimizer) as scaled:
        assert scaled is loss
    with amp.scale_loss(small_loss(model), optimizer) as scaled:
        assert scaled.item() > 1.0
        scaled.backward()
    assert amp.step_was_skipped(plain_optimizer) is False
    assert list(amp.master_params(plain_optimizer)) == list(plain.parameters())
    assert amp.loss_scale() == 65536.0
    assert "step" not in vars(plain_optimizer)
    assert list(amp.state_dict()) == ["loss_scaler0"]


@SCALED
def test_one_loss_of_an_enabled_and_a_disabled_pair_leaves_no_scaled_gradients(
    opt_level: str,
) -> None:
    (plain, plain_optimizer), (model, optimizer) = make(), make()
    amp.initialize(plain, plain_optimizer, enabled=False)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    (expected,) = torch.autograd.grad(small_loss(plain), [plain.weight])
    try:
        with amp.scale_loss(small_loss(plain, model), [optimizer, plain_optimizer]) as scaled:
            scaled.backward()
    except amp.AmpError:
        return  # to refuse this is right as well
    assert torch.allclose(plain.weight.grad, expected, rtol=1e-2)


def test_pair_that_was_disabled_can_be_enabled() -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=False)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.weight.dtype is FP16
    with amp.scale_loss(small_loss(model), optimizer) as scaled:
        assert scaled.item() > 1.0
        scaled.backward()


# -- scale_loss ------------------------------------------------------------------------------------

WRONG_LOSSES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "number": (lambda _: 3.0, "loss: expected a floating-point tensor, found float 3.0"),
    "none": (lambda _: None, "loss: expected a floating-point tensor, found NoneType None"),
    "integer": (lambda _: torch.ones(1, dtype=torch.int64), "loss: expected a floating-point"),
    "list": (lambda model: [model(X).sum()], "loss: expected a floating-point tensor, found list"),
    "detached": (lambda model: model(X).sum().detach(), "found one without history"),
}


@LEVELS
@pytest.mark.parametrize(("make_loss", "words"), WRONG_LOSSES.values(), ids=WRONG_LOSSES.keys())
def test_what_is_no_loss_is_refused(
    opt_level: str, make_loss: Callable[[nn.Module], Any], words: str
) -> None:
    model, optimizer = started(opt_level)
    with pytest.raises(amp.AmpError) as caught:
        amp.scale_loss(make_loss(model), optimizer)
    assert words in str(caught.value)


def test_long_value_is_cut_short_in_the_error() -> None:
    _, optimizer = started("O1")
    with pytest.raises(amp.AmpError) as caught:
        amp.scale_loss("x" * 1000, optimizer)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 150


@LEVELS
@pytest.mark.parametrize("other", [None, 3, "optimizer"], ids=repr)
def test_optimizer_that_is_none_is_refused(opt_level: str, other: Any) -> None:
    model, _ = started(opt_level)
    with pytest.raises(amp.AmpError, match="scale_loss: expected an optimizer that went through"):
        amp.scale_loss(small_loss(model), other)


@LEVELS
def test_unknown_optimizer_is_refused_by_every_call(opt_level: str) -> None:
    model, _ = started(opt_level)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = {
        "scale_loss": lambda: amp.scale_loss(small_loss(model), other),
        "master_params": lambda: list(amp.master_params(other)),
        "step_was_skipped": lambda: amp.step_was_skipped(other),
    }
    for name, call in calls.items():
        with pytest.raises(amp.AmpError, match=f"{name}: expected an optimizer.*pass it to init"):
            call()


@LEVELS
def test_empty_list_of_optimizers_is_refused(opt_level: str) -> None:
    model, _ = started(opt_level)
    with pytest.raises(amp.AmpError, match="at least one optimizer, found an empty list"):
        amp.scale_loss(small_loss(model), [])


@pytest.mark.parametrize("loss_id", [-1, 1, "0", None], ids=repr)
def test_unknown_loss_id_is_refused(loss_id: Any) -> None:
    model, optimizer = started("O1")
    with pytest.raises(amp.AmpError) as caught:
        amp.scale_loss(small_loss(model), optimizer, loss_id=loss_id)
    assert "loss_id: expected 0 to 0" in str(caught.value)
    assert f"found {loss_id!r}" in str(caught.value)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2, 2)], ids=str)
def test_loss_of_any_floating_dtype_is_scaled_in_float32_or_wider(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    _, optimizer = started("O1")
    loss = torch.full(shape, 4.0, dtype=dtype, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is (torch.float64 if dtype is torch.float64 else FP32)
        assert torch.equal(scaled, torch.full(shape, 4.0 * 65536, dtype=scaled.dtype))
    assert torch.equal(loss, torch.full(shape, 4.0, dtype=dtype))


@pytest.mark.parametrize("opt_level", ["O0", "O3", "O4", "O5"])
def test_scale_of_one_hands_out_the_loss_itself(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    loss = small_loss(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


@LEVELS
def test_block_inside_a_block_of_the_same_optimizer_is_refused_at_every_level(
    opt_level: str,
) -> None:
    model, optimizer = started(opt_level)
    loss = small_loss(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward(retain_graph=True)
        with (
            pytest.raises(amp.AmpError, match="one block at a time"),
            amp.scale_loss(loss, optimizer),
        ):
            pytest.fail("a block inside a block was entered")
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss, optimizer):
        1 / 0  # noqa: B018
    with amp.scale_loss(loss, optimizer) as scaled:  # neither has left the optimizer inside a block
        scaled.backward()
    optimizer.step()


@SCALED
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_in_the_block_leaves_all_as_before(
    opt_level: str, error: type[BaseException]
) -> None:
    model, optimizer = started(opt_level)
    with amp.scale_loss(small_loss(model), optimizer) as scaled:
        scaled.backward()
    before = [p.grad.clone() for p in amp.master_params(optimizer)]
    state, dtype = amp.state_dict(), linear_dtype()
    with pytest.raises(error), amp.scale_loss(small_loss(model), optimizer) as scaled:
        scaled.backward()
        raise error
    for parameter, gradient in zip(amp.master_params(optimizer), before, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert amp.state_dict() == state
    assert linear_dtype() is dtype
    assert not amp.step_was_skipped(optimizer)
    with amp.scale_loss(small_loss(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@SCALED
def test_warning_at_the_end_of_a_block_that_is_an_error_leaves_a_session_that_works(
    opt_level: str,
) -> None:
    model, optimizer = started(opt_level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            contextlib.suppress(amp.AmpWarning),
            amp.scale_loss(small_loss(model) * INF, optimizer) as scaled,
        ):
            scaled.backward()
    optimizer.zero_grad()
    with amp.scale_loss(small_loss(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@SCALED
def test_warning_of_overflows_that_no_scale_helps_against_points_at_the_block(
    opt_level: str,
) -> None:
    model, optimizer = started(opt_level, max_loss_scale=1.0)

    def block() -> None:
        with amp.scale_loss(small_loss(model), optimizer) as scaled:
            scaled.backward()
            overflow(model)

    with pytest.warns(amp.AmpWarning) as caught:
        block()
    assert [warning.filename for warning in caught] == [__file__]
    assert "min_loss_scale" in str(caught[0].message)


@SCALED
def test_overflow_is_news_for_the_log_not_a_warning(
    opt_level: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=opt_level)
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, logger="amp_patch"),
        amp.scale_loss(small_loss(model), optimizer) as scaled,
    ):
        scaled.backward()
        overflow(model)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "Gradients overflowed" in record.message


@SCALED
@pytest.mark.parametrize("delays", [False, True], ids=["at-once", "delayed-check"])
def test_overflow_of_one_optimizer_of_a_block_skips_all_and_halves_once(
    opt_level: str, delays: bool
) -> None:
    pairs = [make(), make()]
    models, optimizers = [m for m, _ in pairs], [o for _, o in pairs]
    amp.initialize(models, optimizers, opt_level=opt_level, verbosity=0)
    with amp.scale_loss(small_loss(*models), optimizers, delay_overflow_check=delays) as scaled:
        scaled.backward()
        overflow(models[0])
    before = [[p.detach().clone() for p in amp.master_params(o)] for o in optimizers]
    for optimizer in optimizers:
        optimizer.step()
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [True, True]
    assert amp.loss_scale() == 32768.0
    for optimizer, values in zip(optimizers, before, strict=True):
        for parameter, value in zip(amp.master_params(optimizer), values, strict=True):
            assert torch.equal(parameter, value)


def test_clean_block_of_two_optimizers_with_a_delayed_check_counts_once() -> None:
    pairs = [make(), make()]
    models, optimizers = [m for m, _ in pairs], [o for _, o in pairs]
    amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
    with amp.scale_loss(small_loss(*models), optimizers, delay_overflow_check=True) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


@SCALED
def test_delayed_check_of_one_loss_is_charged_to_its_own_scale(opt_level: str) -> None:
    model, optimizer = started(opt_level, num_losses=2)
    with amp.scale_loss(
        small_loss(model), optimizer, loss_id=0, delay_overflow_check=True
    ) as scaled:
        scaled.backward()
        overflow(model)
    with amp.scale_loss(small_loss(model), optimizer, loss_id=1) as scaled:
        scaled.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert (amp.loss_scale(0), amp.loss_scale(1)) == (32768.0, 65536.0)


@SCALED
def test_parameter_that_joins_between_delayed_blocks_is_unscaled_too(opt_level: str) -> None:
    (model, optimizer), late = make(), nn.Linear(2, 2)
    amp.initialize([model, late], optimizer, opt_level=opt_level, verbosity=0)
    with amp.scale_loss(small_loss(model), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    optimizer.add_param_group({"params": list(late.parameters())})
    with amp.scale_loss(small_loss(model, late), optimizer) as scaled:
        scaled.backward()
    gradients = [p.grad for p in amp.master_params(optimizer)]
    assert all(gradient is not None for gradient in gradients)
    assert max(gradient.abs().max().item() for gradient in gradients) < 1.0


# -- master_params ---------------------------------------------------------------------------------


@LEVELS
def test_master_params_are_those_of_the_groups_in_order(opt_level: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [{"params": model[1].parameters()}, {"params": model[0].parameters()}], lr=0.1
    )
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found = amp.master_params(optimizer)
    assert iter(found) is found
    assert all(a is b for a, b in zip(found, held, strict=True))


@SCALED
def test_clipping_through_master_params_clips_what_the_step_uses(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    with amp.scale_loss(small_loss(model), optimizer) as scaled:
        scaled.backward()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-6)
    assert 1e-6 < norm.item() < 1.0
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    optimizer.step()
    moved = [a - b for a, b in zip(before, amp.master_params(optimizer), strict=True)]
    total = math.sqrt(sum(delta.double().square().sum().item() for delta in moved))
    assert total < 0.1 * 1e-6 * 1.5


# -- state_dict ------------------------------------------------------------------------------------


@LEVELS
def test_state_is_what_checkpoints_in_the_field_hold(opt_level: str) -> None:
    started(opt_level)
    scale = 65536.0 if opt_level in ("O1", "O2") else 1.0
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}


@SCALED
def test_state_makes_the_round_trip_through_a_file(opt_level: str, tmp_path: Any) -> None:
    model, optimizer = started(opt_level, num_losses=2)
    with amp.scale_loss(small_loss(model), optimizer, loss_id=1) as scaled:
        scaled.backward()
        overflow(model)
    state = amp.state_dict()
    torch.save({"amp": state}, tmp_path / "checkpoint.pt")
    amp.uninitialize()
    started(opt_level, num_losses=2)
    amp.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["amp"])
    assert amp.state_dict() == state
    assert (amp.loss_scale(0), amp.loss_scale(1)) == (65536.0, 32768.0)


@pytest.mark.parametrize("state", [None, [], "state", 3], ids=repr)
@pytest.mark.parametrize("enabled", [True, False])
def test_state_that_is_no_dict_is_refused(state: Any, enabled: bool) -> None:
    amp.initialize(*make(), enabled=enabled, verbosity=0)
    with pytest.raises(amp.AmpError) as caught:
        amp.load_state_dict(state)
    assert f"load_state_dict: expected a dict, found {state!r}" in str(caught.value)


def test_newest_call_has_the_first_scaler() -> None:
    first = started("O1")
    second = started("O1", loss_scale=128.0)
    assert amp.loss_scale(0) == 128.0
    assert amp.loss_scale(1) == 65536.0
    del first, second


def test_loss_scale_after_the_objects_are_gone_makes_sense() -> None:
    started("O1")
    try:
        scale = amp.loss_scale()
    except amp.AmpError as error:
        assert "0 to -1" not in str(error)  # noqa: PT017 (either is right: an error, or a number)
    else:
        assert scale in (1.0, 65536.0)


# -- disable_casts, clear_cache, uninitialize ------------------------------------------------------


def test_casts_are_off_inside_disable_casts_and_on_again_after_it() -> None:
    started("O1")
    with amp.disable_casts():
        with amp.disable_casts():
            assert linear_dtype() is FP32
        assert linear_dtype() is FP32
    assert linear_dtype() is FP16


def test_casts_are_on_again_after_an_exception() -> None:
    started("O1")
    with pytest.raises(ValueError, match="inside"), amp.disable_casts():
        raise ValueError("inside")
    assert linear_dtype() is FP16


def test_disable_casts_works_as_a_decorator_made_before_initialize() -> None:
    plain = amp.disable_casts()(linear_dtype)
    started("O1")
    assert [plain(), plain(), linear_dtype()] == [FP32, FP32, FP16]


@pytest.mark.parametrize("opt_level", ["O0", "O2", "O3", "O5"])
def test_disable_casts_is_a_no_op_where_no_casts_are_active(opt_level: str) -> None:
    model, _ = started(opt_level)
    with amp.disable_casts():
        assert model(X).dtype is FP32
        assert linear_dtype() is FP32


def test_session_that_ends_inside_disable_casts_and_a_new_one_work() -> None:
    started("O1")
    with amp.disable_casts():
        amp.uninitialize()
        started("O4")
    assert linear_dtype() is BF16


def test_clear_cache_makes_hidden_writes_seen() -> None:
    model, _ = started("O1")
    alias = model.weight.detach().numpy()
    before = model(X).detach().clone()
    alias[:] = 5.0
    amp.clear_cache()
    assert not torch.equal(model(X), before)
    assert torch.allclose(model(X), torch.full((1, 2), 10.0).half() + model.bias.half(), atol=1e-2)


@LEVELS
def test_uninitialize_twice_leaves_the_model_usable_and_exact(opt_level: str) -> None:
    model, optimizer = make()
    weight = model.weight.detach().clone()
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    amp.uninitialize()
    amp.uninitialize()
    expected = weight.half().float() if opt_level == "O3" else weight
    assert torch.equal(model.weight, expected)
    model(X).sum().backward()
    optimizer.step()


@SCALED
def test_uninitialize_gives_unscaled_gradients_back_also_in_the_middle_of_a_window(
    opt_level: str,
) -> None:
    model, optimizer = make()
    (expected,) = torch.autograd.grad(small_loss(model), [model.weight])
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    with amp.scale_loss(small_loss(model), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    amp.uninitialize()
    assert model.weight.grad is None or torch.allclose(model.weight.grad, expected, rtol=2e-2)
