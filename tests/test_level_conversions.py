"""What is saved at one level goes on at any other, in plain torch, and from older programs."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import LEVELS, assert_identical, train_step
from plain_torch import PlainTorch
from torch import nn

import amp_patch as amp

PLAIN = "plain"
PLACES = (PLAIN, *LEVELS)
STEPS = 10

# Saving rounds nothing: the next loss differs by how the next level computes it. O3 has rounded
# its weights already. 16 roundings of the coarser of both half dtypes, relative to the loss.
COARSE = {"O4", "O5"}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(8, 6, generator=generator)
    return [(inputs, inputs[:, :3].tanh() + 0.1)] * (STEPS + 5)


def start(place: str) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    if place != PLAIN:
        # From a scale without overflow, so that every step is taken.
        scale = {"loss_scale": 128.0} if place in ("O1", "O2") else {}
        amp.initialize(model, optimizer, opt_level=place, **scale)
    return model, optimizer


def train(place: str, model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    if place != PLAIN:
        return [train_step(model, optimizer, one) for one in batches]
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(place: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    file = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if place != PLAIN:
        state["amp"] = amp.state_dict()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def load(place: str, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    state = copy.deepcopy(state)  # torch's optimizers go on to write into what they loaded
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if place != PLAIN and "amp" in state:
        amp.load_state_dict(state["amp"])


@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("before", PLACES)
def test_the_loss_goes_on_where_it_was_from_any_level_to_any_other(before: str, after: str) -> None:
    batches = data()
    model, optimizer = start(before)
    losses = train(before, model, optimizer, batches[:STEPS])
    state = saved(before, model, optimizer)
    stayed = train(before, model, optimizer, batches[STEPS:])
    amp.uninitialize()

    torch.manual_seed(99)
    model, optimizer = start(after)
    load(after, model, optimizer, state)
    moved = train(after, model, optimizer, batches[STEPS:])
    assert losses[-1] < 0.9 * losses[0]
    unit = 2.0**-8 if COARSE & {before, after} else 2.0**-11
    for one, other in zip(moved, stayed, strict=True):
        assert one == pytest.approx(other, rel=16 * unit)
    if before == after:
        assert moved == stayed


@pytest.mark.parametrize(("before", "after"), itertools.permutations(PLACES, 2))
def test_what_is_saved_is_fp32_with_the_usual_names_at_every_level(before: str, after: str) -> None:
    model, optimizer = start(before)
    train(before, model, optimizer, data()[:2])
    state = saved(before, model, optimizer)
    amp.uninitialize()
    assert list(state["model"]) == list(net().state_dict())
    floating = [v for v in state["model"].values() if v.is_floating_point()]
    assert {value.dtype for value in floating} == {torch.float32}
    model, optimizer = start(after)
    load(after, model, optimizer, state)
    found = saved(after, model, optimizer)["model"]
    for name, value in state["model"].items():
        expected = value.half().float() if after == "O3" and value.is_floating_point() else value
        assert_identical(found[name], expected)
    kept = torch.float16 if after == "O3" else torch.float32
    states = list(optimizer.state.values())
    assert {s["exp_avg"].dtype for s in states} == {kept}
    amp.uninitialize()


@pytest.mark.filterwarnings("ignore:.*gave its weights no master:amp_patch.AmpWarning")
@pytest.mark.parametrize("opt_level", LEVELS)
def test_changing_level_within_a_process_keeps_the_loss(opt_level: str) -> None:
    batches = data()
    model, optimizer = start(opt_level)
    losses = train(opt_level, model, optimizer, batches[:STEPS])
    for other in LEVELS:
        amp.initialize(model, optimizer, opt_level=other, loss_scale=128.0)
        found = train(other, model, optimizer, batches[STEPS : STEPS + 2])
        assert all(loss < losses[0] for loss in found)
    amp.uninitialize()
    assert train(PLAIN, model, optimizer, batches[STEPS : STEPS + 1])[0] < losses[0]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_loading_before_and_after_initialize_comes_to_the_same(opt_level: str) -> None:
    batches = data()
    model, optimizer = start(PLAIN)
    train(PLAIN, model, optimizer, batches[:STEPS])
    state = saved(PLAIN, model, optimizer)
    found = []
    for loads_first in (True, False):
        torch.manual_seed(7)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
        if loads_first:
            load(PLAIN, model, optimizer, state)
        amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0)
        if not loads_first:
            load(PLAIN, model, optimizer, state)
        losses = train(opt_level, model, optimizer, batches[STEPS:])
        found.append((losses, copy.deepcopy(dict(model.state_dict()))))
        amp.uninitialize()
    assert_identical(found[0], found[1])


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_model_and_optimizer_may_be_loaded_on_different_sides_of_initialize(
    opt_level: str, part: str
) -> None:
    batches = data()
    model, optimizer = start(PLAIN)
    train(PLAIN, model, optimizer, batches[:STEPS])
    state = saved(PLAIN, model, optimizer)
    found = []
    for first in (("model", "optimizer"), (part,)):
        torch.manual_seed(7)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
        parts, own = {"model": model, "optimizer": optimizer}, copy.deepcopy(state)
        for name in first:
            parts[name].load_state_dict(own[name])
        amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=128.0)
        for name in parts.keys() - set(first):
            parts[name].load_state_dict(own[name])
        found.append(train(opt_level, model, optimizer, batches[STEPS:]))
        amp.uninitialize()
    assert found[0] == found[1]


# -- states of other programs ----------------------------------------------------------------------


def test_a_state_of_torchs_scaler_is_taken_over() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale(torch.ones(()))  # it makes its tensors at the first use
    start("O1")
    amp.uninitialize()
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O1")
    amp.load_state_dict(scaler.state_dict())
    assert amp.loss_scale() == 4096.0
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 0}}


@pytest.mark.parametrize(("scale", "tracker"), [(2.0**12, 17), (2.0**30, 3), (0.5, 0)])
def test_a_state_of_torchs_scaler_keeps_its_count_and_stays_in_the_bounds(
    scale: float, tracker: int
) -> None:
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O2")
    amp.load_state_dict(
        {
            "scale": scale,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": tracker,
        }
    )
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == tracker
    assert amp.loss_scale() == min(max(scale, 1.0), 2.0**24)


def test_an_empty_state_of_a_disabled_scaler_of_torch_changes_nothing() -> None:
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O1")
    with pytest.warns(amp.AmpWarning, match="missing"):
        amp.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert amp.loss_scale() == 65536.0


def test_a_state_of_the_old_package_is_taken_over_in_any_order_of_its_keys() -> None:
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O1", num_losses=3)
    entries = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)}
    amp.load_state_dict(dict(reversed(entries.items())))
    assert amp.state_dict() == entries
    assert [amp.loss_scale(i) for i in range(3)] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("losses", [1, 2, 4])
def test_a_state_with_another_number_of_losses_loads_what_fits_and_tells_of_the_rest(
    losses: int,
) -> None:
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O1", num_losses=losses)
    entries = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)}
    with pytest.warns(amp.AmpWarning, match="does not match the losses of this run") as caught:
        amp.load_state_dict(entries)
    text = str(caught[0].message)
    odd = {f"loss_scaler{i}" for i in range(min(losses, 3), max(losses, 3))}
    assert all(name in text for name in odd)
    assert [amp.loss_scale(i) for i in range(min(losses, 3))] == [1.0, 2.0, 4.0][: min(losses, 3)]


def test_an_unknown_key_is_told_of_and_the_rest_is_loaded() -> None:
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O1")
    entry = {"loss_scale": 32.0, "unskipped": 5}
    with pytest.warns(amp.AmpWarning, match="not used .*'extra'"):
        amp.load_state_dict({"loss_scaler0": entry, "extra": 1})
    assert amp.state_dict() == {"loss_scaler0": entry}


MALFORMED: dict[str, Any] = {
    "zero": {"loss_scale": 0.0, "unskipped": 0},
    "negative": {"loss_scale": -1.0, "unskipped": 0},
    "nan": {"loss_scale": float("nan"), "unskipped": 0},
    "inf": {"loss_scale": float("inf"), "unskipped": 0},
    "negative count": {"loss_scale": 1.0, "unskipped": -1},
    "text": {"loss_scale": "much", "unskipped": 0},
    "nothing": None,
    "list": [1.0, 0],
    "no count": {"loss_scale": 1.0},
    "infinite count": {"loss_scale": 1.0, "unskipped": float("inf")},
}


@pytest.mark.parametrize("entry", MALFORMED.values(), ids=MALFORMED)
def test_nothing_is_loaded_from_a_state_with_one_malformed_entry(entry: Any) -> None:
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O1", num_losses=3)
    before = amp.state_dict()
    good = {"loss_scale": 2.0, "unskipped": 1}
    state = {"loss_scaler0": good, "loss_scaler1": entry, "loss_scaler2": good}
    with pytest.raises(amp.AmpError, match=r"'loss_scaler1': expected .*; nothing was loaded"):
        amp.load_state_dict(state)
    assert amp.state_dict() == before


@pytest.mark.parametrize("state", [None, 3, [], "loss_scaler0"], ids=repr)
def test_what_is_no_state_is_refused(state: Any) -> None:
    start("O1")
    with pytest.raises(amp.AmpError, match="load_state_dict: expected a dict"):
        amp.load_state_dict(state)


@pytest.mark.parametrize("saved_as", ["tensor", "numpy"])
def test_scales_saved_as_tensors_are_read(saved_as: str) -> None:
    start("O1")
    amp.uninitialize()
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O1")
    scale = torch.tensor(64.0)
    value = scale if saved_as == "tensor" else scale.numpy()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": value, "unskipped": torch.tensor(3)}})
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 3}}


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_before_initialize_there_is_a_clear_error(name: str) -> None:
    arguments = ({},) if name == "load_state_dict" else ()
    with pytest.raises(amp.AmpError, match=f"{name}: expected an earlier call of amp.initialize"):
        getattr(amp, name)(*arguments)


def test_disabled_there_is_nothing_to_save_and_nothing_is_loaded() -> None:
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, enabled=False)
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}})
    assert amp.loss_scale() == 1.0


def test_a_state_saved_while_disabled_loads_with_a_warning() -> None:
    start("O1")
    amp.uninitialize()
    model, optimizer = start(PLAIN)
    amp.initialize(model, optimizer, opt_level="O1")
    with pytest.warns(amp.AmpWarning, match=r"missing \['loss_scaler0'\]"):
        amp.load_state_dict({})
    assert amp.loss_scale() == 65536.0


@pytest.mark.parametrize("opt_level", LEVELS)
def test_the_state_is_plain_numbers(opt_level: str) -> None:
    start(opt_level)
    for entry in amp.state_dict().values():
        assert {type(value) for value in entry.values()} <= {int, float}
    file = io.BytesIO()
    torch.save(amp.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == amp.state_dict()


def lbfgs_pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


def lbfgs_steps(library: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        with library.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


@pytest.mark.filterwarnings("ignore::amp_patch.AmpWarning")  # where O3 has left its range
@pytest.mark.parametrize("after", [*LEVELS, "loaded", "plain"])
@pytest.mark.parametrize("before", LEVELS)
def test_a_history_of_tensors_follows_from_any_level_to_any_other(before: str, after: str) -> None:
    model, optimizer = lbfgs_pair()
    amp.initialize(model, optimizer, opt_level=before)
    lbfgs_steps(amp, model, optimizer)
    saved = model.state_dict(), optimizer.state_dict()
    if after in LEVELS:
        amp.initialize(model, optimizer, opt_level=after)
        lbfgs_steps(amp, model, optimizer)
    elif after == "loaded":
        model, optimizer = lbfgs_pair()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        amp.initialize(model, optimizer, opt_level=before)
        lbfgs_steps(amp, model, optimizer)
    else:
        amp.uninitialize()
        lbfgs_steps(PlainTorch(), model, optimizer)
    if "O3" not in (before, after):  # LBFGS leaves the range of half weights without masters
        assert all(parameter.isfinite().all() for parameter in model.parameters())
