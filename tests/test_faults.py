"""Ten thousand faults and more, and no trace of any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from fault_campaign import (
    LOOPS,
    OPTIMIZERS,
    Episode,
    Fault,
    episodes,
    error_faults,
    value_faults,
    visits_of,
)
from hypothesis import given, settings
from networks import LEVELS

import amp_patch as amp

FAULTS_AT_A_LEVEL = 2000
pytestmark = pytest.mark.filterwarnings("ignore::amp_patch.AmpWarning")  # a bad loss is told of


@pytest.mark.parametrize("opt_level", LEVELS)
def test_thousands_of_faults_leave_no_trace(opt_level: str) -> None:
    met = sum(episode.run() for episode in episodes(opt_level, FAULTS_AT_A_LEVEL, seed=0))
    assert met >= FAULTS_AT_A_LEVEL
    assert met * len(LEVELS) >= 10_000


@given(data=st.data())
@settings(max_examples=25)
def test_any_sequence_of_faults_ends_where_training_without_them_ends(data: st.DataObject) -> None:
    loop = data.draw(st.sampled_from(list(LOOPS)))
    possible = [f for f in (*value_faults(), *error_faults()) if f.visit < visits_of(loop, f)]
    faults = data.draw(st.lists(st.sampled_from(possible), min_size=1, max_size=9))
    level, optimizer = data.draw(st.tuples(st.sampled_from(LEVELS), st.sampled_from([*OPTIMIZERS])))
    assert Episode(level, loop, optimizer, 1, tuple(faults)).run() == len(faults)


@pytest.mark.parametrize("site", ["loss", "gradient"])
def test_the_campaign_notices_a_library_that_lets_faults_through(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def blind(loss: torch.Tensor, *_: Any, **__: Any) -> Iterator[torch.Tensor]:
        yield loss

    monkeypatch.setattr(amp, "scale_loss", blind)
    episode = Episode("O1", "plain", "sgd", 1, (Fault(site, float("inf")),))
    with pytest.raises(AssertionError, match=r"inf in .*: not skipped"):
        episode.run()


def test_the_campaign_notices_a_skip_that_changes_a_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = amp.step_was_skipped

    def meddling(optimizer: Any) -> bool:
        was_skipped = plain(optimizer)
        if was_skipped:
            next(amp.master_params(optimizer)).data.add_(2.0**-20)
        return was_skipped

    monkeypatch.setattr(amp, "step_was_skipped", meddling)
    episode = Episode("O1", "plain", "sgd", 1, (Fault("loss", float("nan")),))
    with pytest.raises(AssertionError, match=r"nan in loss.*: tensor 0 was"):
        episode.run()
