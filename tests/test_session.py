"""A session: models and optimizers under their policies, and the undo of it all."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp
from amp_patch.call_setup import Setup
from amp_patch.errors import AmpError, AmpWarning
from amp_patch.policy import resolve_policy
from amp_patch.session import Session
from amp_patch.slot import SessionSlot

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = pytest.mark.parametrize("opt_level", amp.OPT_LEVELS)
PLAIN_LINEAR = (F.linear,)  # a plain name in a module would be rebound


@pytest.fixture
def session() -> Iterator[Session]:
    """A session of this test's own."""
    found = Session()
    yield found
    found.close()


def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def add(session: Session, model: Any, optimizer: Any, opt_level: str, **overrides: Any) -> None:
    num_losses = overrides.pop("num_losses", 1)
    optimizers = [] if optimizer is None else [optimizer]
    policy = resolve_policy(opt_level, **overrides)
    session.add([model], optimizers, Setup(policy, num_losses, is_verbose=False))


def linear_dtype() -> torch.dtype:
    """The dtype in which a matrix product runs here and now."""
    return F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype


def test_new_session_is_idle_and_closes_without_effect() -> None:
    session = Session()
    assert session.is_idle
    session.close()
    session.close()
    assert F.linear is PLAIN_LINEAR[0]


@LEVELS
def test_session_works_without_the_functions_of_the_package(
    session: Session, opt_level: str
) -> None:
    model, optimizer = make()
    add(session, model, optimizer, opt_level)
    assert not session.is_idle
    assert session.binding_of(optimizer, "test") is not None
    assert model.weight.dtype is (amp.OPT_LEVELS[opt_level].cast_model_type or FP32)
    assert (F.linear is PLAIN_LINEAR[0]) is (opt_level not in ("O1", "O4"))


@LEVELS
def test_close_puts_everything_back_and_a_second_one_changes_nothing(
    session: Session, opt_level: str
) -> None:
    model, optimizer = make()
    weight, held = model.weight.detach().clone(), list(optimizer.param_groups[0]["params"])
    add(session, model, optimizer, opt_level)
    session.close()
    expected = weight.half().float() if opt_level == "O3" else weight
    for _ in range(2):
        assert F.linear is PLAIN_LINEAR[0]
        assert torch.equal(model.weight, expected)
        pairs = zip(optimizer.param_groups[0]["params"], held, strict=True)
        assert all(now is then for now, then in pairs)
        session.close()


@pytest.mark.filterwarnings("ignore:.*gave its weights no master:amp_patch.AmpWarning")
def test_session_can_be_used_again_after_close(session: Session) -> None:
    model, optimizer = make()
    for opt_level in amp.OPT_LEVELS:
        add(session, model, optimizer, opt_level)
        session.close()
    assert model.weight.dtype is FP32


def test_same_objects_and_policy_change_nothing(session: Session) -> None:
    model, optimizer = make()
    add(session, model, optimizer, "O2")
    binding, scaler = session.binding_of(optimizer, "test"), session.scalers.scaler(0)
    scaler.update(overflow=True)
    add(session, model, optimizer, "O2")
    assert session.binding_of(optimizer, "test") is binding
    assert session.scalers.scaler(0) is scaler
    assert scaler.scale == 2.0**15


@pytest.mark.parametrize(
    "second", [{"opt_level": "O1"}, {"num_losses": 2}, {"loss_scale": 128.0}], ids=str
)
def test_same_objects_under_another_policy_are_released_first(
    session: Session, second: dict[str, Any]
) -> None:
    model, optimizer = make()
    weight = model.weight.detach().clone()
    add(session, model, optimizer, "O2")
    add(session, model, optimizer, **{"opt_level": "O2", **second})
    session.close()
    assert torch.equal(model.weight, weight)
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_levels_can_be_tried_one_after_another_without_loss(session: Session) -> None:
    model, optimizer = make()
    weight = model.weight.detach().clone()
    for first in amp.OPT_LEVELS:
        for second in amp.OPT_LEVELS:
            if "O3" in (first, second):  # rounds the weights, and keeps no exact ones
                continue
            add(session, model, optimizer, first)
            add(session, model, optimizer, second)
    session.close()
    assert torch.equal(model.weight, weight)


def test_new_optimizer_for_a_known_model_replaces_the_old_one(session: Session) -> None:
    model, old = make()
    add(session, model, old, "O2")
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    add(session, model, new, "O2")
    with pytest.raises(AmpError, match="did not"):
        session.binding_of(old, "test")
    assert new.param_groups[0]["params"][0].dtype is FP32
    assert old.param_groups[0]["params"][0] is model.weight


def test_other_objects_are_added_with_scalers_of_their_own(session: Session) -> None:
    (first, first_optimizer), (second, second_optimizer) = make(), make()
    add(session, first, first_optimizer, "O2")
    add(session, second, second_optimizer, "O1", num_losses=2)
    assert list(session.scalers.state_dict()) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    assert (first.weight.dtype, second.weight.dtype) == (FP16, FP32)


def test_casts_leave_with_the_last_object_that_wants_them(session: Session) -> None:
    (first, _), (second, _) = make(), make()
    add(session, first, None, "O1")
    add(session, second, None, "O1")
    add(session, first, None, "O0")
    assert linear_dtype() is FP16
    add(session, second, None, "O0")
    assert F.linear is PLAIN_LINEAR[0]


def test_each_model_runs_under_its_own_policy(session: Session) -> None:
    models = {level: nn.Linear(2, 2) for level in ("O0", "O1", "O4")}
    for level, model in models.items():
        add(session, model, None, level)
    found = {level: model(torch.ones(1, 2)).dtype for level, model in models.items()}
    assert found == {"O0": FP32, "O1": FP16, "O4": BF16}


def test_half_dtype_outside_models_is_that_of_an_object_that_is_still_there(
    session: Session,
) -> None:
    (first, _), (second, _) = make(), make()
    add(session, first, None, "O1")
    add(session, second, None, "O4")
    assert linear_dtype() is BF16
    add(session, second, None, "O0")
    assert linear_dtype() is FP16


def test_optimizer_that_is_unknown_is_refused_with_the_remedy(session: Session) -> None:
    model, optimizer = make()
    add(session, model, optimizer, "O1")
    other = torch.optim.Adam(model.parameters())
    with pytest.raises(AmpError) as caught:
        session.binding_of(other, "scale_loss")
    assert str(caught.value) == (
        "scale_loss: expected an optimizer that went through amp.initialize, found a Adam that did "
        "not (a copy or a new one?); pass it to initialize"
    )


def test_optimizer_that_is_left_alone_has_no_binding(session: Session) -> None:
    (model, optimizer), (_, other) = make(), make()
    add(session, model, optimizer, "O1")
    session.leave_alone([other])
    assert session.binding_of(other, "test") is None
    assert session.binding_of(optimizer, "test") is not None


def test_idle_session_refuses_no_optimizer(session: Session) -> None:
    assert session.binding_of(make()[1], "test") is None


def test_session_keeps_nothing_alive(session: Session) -> None:
    model, optimizer = make()
    add(session, model, optimizer, "O1")
    gone = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_close_after_the_objects_are_gone_removes_the_casts(session: Session) -> None:
    model, optimizer = make()
    add(session, model, optimizer, "O1")
    del model, optimizer
    gc.collect()
    session.close()
    assert F.linear is PLAIN_LINEAR[0]


class FailingStep:
    """An optimizer on which no method can be replaced."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]

    def __setattr__(self, name: str, value: object) -> None:
        if name == "step":
            raise TypeError("step is read only")
        super().__setattr__(name, value)

    def step(self) -> None:
        """Do nothing."""

    def zero_grad(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4"])
def test_failure_leaves_nothing_of_the_call_behind(session: Session, opt_level: str) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight.detach().clone()
    optimizer = FailingStep(list(model.parameters()))
    with pytest.raises(TypeError, match="step is read only"):
        add(session, model, optimizer, opt_level)
    assert torch.equal(model.weight, weight)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert F.linear is PLAIN_LINEAR[0]
    assert model(torch.ones(1, 2)).dtype is FP32


def test_failure_leaves_the_objects_of_earlier_calls_as_they_are(session: Session) -> None:
    model, optimizer = make()
    add(session, model, optimizer, "O1")
    other = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="step is read only"):
        add(session, other, FailingStep(list(other.parameters())), "O2")
    assert session.binding_of(optimizer, "test") is not None
    assert model(torch.ones(1, 2)).dtype is FP16
    assert list(session.scalers.state_dict()) == ["loss_scaler0"]


def test_failure_of_a_second_level_leaves_the_first_in_force(session: Session) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    add(session, model, optimizer, "O1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AmpWarning, match="eps"):
            add(session, model, optimizer, "O3")
    assert model.weight.dtype is FP32
    assert session.binding_of(optimizer, "test") is not None
    assert model(torch.ones(1, 2)).dtype is FP16


def test_eps_that_vanishes_in_float16_is_warned_of_at_the_users_line(session: Session) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    with pytest.warns(AmpWarning) as caught:
        add(session, model, optimizer, "O3")
    (warning,) = caught
    assert warning.filename == __file__
    assert "eps=1e-08 of Adam is 0 in float16" in str(warning.message)
    assert "pass eps=1e-4 or so, or use 'O2'" in str(warning.message)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O4", "O5"])
def test_eps_is_no_matter_where_the_optimizer_works_in_float32(
    session: Session, opt_level: str
) -> None:
    model = nn.Linear(2, 2)
    add(session, model, torch.optim.Adam(model.parameters(), eps=1e-8), opt_level)


def test_eps_that_float16_can_hold_is_no_matter(session: Session) -> None:
    model = nn.Linear(2, 2)
    add(session, model, torch.optim.Adam(model.parameters(), eps=1e-4), "O3")


@pytest.mark.parametrize(("is_verbose", "count"), [(False, 0), (True, 1)])
def test_call_is_logged_unless_told_not_to(
    session: Session, caplog: pytest.LogCaptureFixture, is_verbose: bool, count: int
) -> None:
    model, optimizer = make()
    with caplog.at_level(logging.INFO, logger="amp_patch"):
        session.add([model], [optimizer], Setup(resolve_policy("O1"), is_verbose=is_verbose))
    assert len(caplog.records) == count
    assert all("O1: 1 model(s), 1 optimizer(s)" in record.message for record in caplog.records)


def test_slot_opens_one_session_and_requires_and_closes_it() -> None:
    slot = SessionSlot()
    with pytest.raises(AmpError) as caught:
        slot.require("scale_loss")
    assert str(caught.value) == (
        "scale_loss: expected an earlier call of amp.initialize, found none"
    )
    opened = slot.open()
    assert slot.open() is opened
    assert slot.require("scale_loss") is opened
    slot.close()
    assert slot.session is None
    slot.close()


def test_fast_path_of_attention_is_off_only_while_there_are_casts(session: Session) -> None:
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    add(session, nn.Linear(2, 2).requires_grad_(False), None, "O0")
    assert torch.backends.mha.get_fastpath_enabled() is was_enabled
    model = nn.Linear(2, 2)
    add(session, model, None, "O1")
    assert torch.backends.mha.get_fastpath_enabled() is False
    session.close()
    assert torch.backends.mha.get_fastpath_enabled() is was_enabled
