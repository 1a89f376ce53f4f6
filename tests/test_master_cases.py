"""Master weights, sessions and inference in the situations in which they went wrong elsewhere."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import LEVELS, MASTER_LEVELS, assert_identical, backward, snapshot, train_step
from torch import nn

import amp_patch as amp

EVERY = pytest.mark.parametrize("opt_level", LEVELS)
MASTERED = pytest.mark.parametrize("opt_level", MASTER_LEVELS)
ROOT = Path(__file__).parent.parent


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def started(opt_level: str, **options: Any) -> tuple[nn.Sequential, Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return amp.initialize(model, optimizer, opt_level=opt_level, **options)


# -- masters ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*gave its weights no master:amp_patch.AmpWarning")
@MASTERED
def test_a_new_optimizer_after_thawing_goes_on_from_the_exact_masters(opt_level: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    for _ in range(2):
        train_step(model, optimizer, batch(), factor=2.0**-8)
    before = copy.deepcopy(dict(model.state_dict()))
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    found = dict(model.state_dict())
    for name in ("2.weight", "2.bias"):
        assert_identical(found[name], before[name])
    train_step(model, optimizer, batch(), factor=2.0**-8)
    assert {master.dtype for master in amp.master_params(optimizer)} == {torch.float32}


@MASTERED
def test_memory_for_masters_is_taken_in_initialize_and_not_in_backward(opt_level: str) -> None:
    def full_bytes() -> int:
        gc.collect()
        found = {
            t.data_ptr(): t.numel() * 4
            for t in gc.get_objects()
            if type(t) in (torch.Tensor, nn.Parameter) and t.dtype is torch.float32
        }
        return sum(found.values())

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    after_initialize = full_bytes()
    loss = model(torch.randn(2, 64)).sum() * 2.0**-10
    backward(loss, optimizer)
    del loss
    optimizer.step()
    optimizer.zero_grad()
    assert full_bytes() - after_initialize < 64 * 64  # no second copy of any weight


@EVERY
def test_half_weights_given_to_initialize_are_met_with_a_warning_or_a_refusal(
    opt_level: str,
) -> None:
    model = net().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if opt_level in ("O2", "O3", "O5"):
        with pytest.warns(amp.AmpWarning, match="half weights already"):
            amp.initialize(model, optimizer, opt_level=opt_level)
        train_step(model, optimizer, batch(), factor=2.0**-8)
    elif opt_level == "O0":
        amp.initialize(model, optimizer, opt_level=opt_level)
    else:
        with pytest.raises(amp.AmpError, match=r"expects FP32 weights, found .* call model\.float"):
            amp.initialize(model, optimizer, opt_level=opt_level)
        assert {p.dtype for p in model.parameters()} == {torch.float16}


@EVERY
def test_a_model_on_the_cpu_makes_nothing_elsewhere(opt_level: str) -> None:
    model, optimizer = started(opt_level)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    tensors = [
        *model.parameters(),
        *amp.master_params(optimizer),
        *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    ]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert not torch.cuda.is_initialized()


# -- several sessions ------------------------------------------------------------------------------


@pytest.mark.parametrize("second", LEVELS)
@pytest.mark.parametrize("first", LEVELS)
def test_two_models_at_any_two_levels_train_as_each_does_alone(first: str, second: str) -> None:
    def train(levels: tuple[str, ...]) -> list[Any]:
        pairs = []
        for i, level in enumerate(levels):
            torch.manual_seed(int(level[1]) * 10 + i * (len(levels) == 1) * 0)
            pairs.append(started(level, loss_scale=128.0))
        for step in range(2):
            for pair in pairs:
                torch.manual_seed(step)
                train_step(*pair, batch())
        found = [snapshot(*pair) for pair in pairs]
        amp.uninitialize()
        return found

    together = train((first, second))
    alone = train((first,)) + train((second,))
    assert_identical(together, alone)


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
def test_rounds_of_fresh_models_wrap_torch_once_and_train_alike(opt_level: str) -> None:
    originals = {name: getattr(torch, name) for name in ("mm", "matmul")}
    losses = []
    for _ in range(5):
        torch.manual_seed(0)
        pair = started(opt_level)
        losses.append([train_step(*pair, batch(), factor=2.0**-8) for _ in range(3)])
        for name, original in originals.items():
            function, depth = getattr(torch, name), 0
            while hasattr(function, "__wrapped__"):
                function, depth = function.__wrapped__, depth + 1
            assert depth <= 1
            assert function is original
        assert amp.loss_scale() in (1.0, 65536.0)
    assert all(one == losses[0] for one in losses)
    amp.uninitialize()
    assert all(getattr(torch, name) is original for name, original in originals.items())


@EVERY
def test_initialize_in_every_epoch_with_its_own_output_changes_nothing(opt_level: str) -> None:
    found = []
    for calls in (1, 3):
        torch.manual_seed(0)
        model, optimizer = started(opt_level, loss_scale=128.0)
        for epoch in range(3):
            if epoch and calls > 1:
                model, optimizer = amp.initialize(
                    model, optimizer, opt_level=opt_level, loss_scale=128.0
                )
            torch.manual_seed(epoch)
            train_step(model, optimizer, batch())
        found.append(snapshot(model, optimizer))
        amp.uninitialize()
    assert_identical(found[0], found[1])


@EVERY
def test_the_objects_returned_may_be_ignored(opt_level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one_model, one_optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    assert one_model is model
    assert one_optimizer is optimizer
    models, optimizers = amp.initialize([model], [optimizer], opt_level=opt_level)
    assert models == [model]
    assert optimizers == [optimizer]


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_casts_can_be_kept_from_the_code_of_others(opt_level: str) -> None:
    started(opt_level)
    other = nn.Linear(3, 3)
    with amp.disable_casts():
        assert other(torch.ones(1, 3)).dtype is torch.float32
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


# -- inference -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
@EVERY
def test_without_an_optimizer_the_model_comes_back_and_predicts(opt_level: str, mode: Any) -> None:
    model = net().eval()
    inputs = batch()[0]
    expected = copy.deepcopy(model)(inputs)
    found = amp.initialize(model, opt_level=opt_level)
    assert found is model
    with mode():
        result = model(inputs)
    unit = 2.0**-8 if opt_level in ("O4", "O5") else 2.0**-11
    torch.testing.assert_close(result.float(), expected, rtol=16 * unit, atol=16 * unit)
    assert all("loss_scale" in entry for entry in amp.state_dict().values())


@EVERY
def test_a_list_of_models_without_optimizer_comes_back_as_a_list(opt_level: str) -> None:
    models = [net(), net()]
    found = amp.initialize(models, opt_level=opt_level)
    assert isinstance(found, list)
    assert found == models


@EVERY
def test_inference_after_training_under_inference_mode_leaves_training_possible(
    opt_level: str,
) -> None:
    model, optimizer = started(opt_level)
    for _ in range(2):
        with torch.inference_mode():
            assert model(batch()[0]).isfinite().all()
        train_step(model, optimizer, batch(), factor=2.0**-8)
        assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("opt_level", ["O1", "O4", "O2"])
def test_evaluation_does_not_gather_casts(opt_level: str) -> None:
    def half_tensors() -> int:
        gc.collect()
        halves = (torch.float16, torch.bfloat16)
        return sum(
            type(t) in (torch.Tensor, nn.Parameter) and t.dtype in halves for t in gc.get_objects()
        )

    model, optimizer = started(opt_level)
    counts = []
    for _ in range(5):
        model.train()
        train_step(model, optimizer, batch(), factor=2.0**-8)
        model.eval()
        with torch.no_grad():
            for _ in range(20):
                model(batch()[0])
        counts.append(half_tensors())
    assert len(set(counts)) == 1


@MASTERED
def test_a_checkpoint_predicts_without_amp_patch_as_the_masters_do(
    opt_level: str, tmp_path: Path
) -> None:
    model, optimizer = started(opt_level)
    train_step(model, optimizer, batch(), factor=2.0**-8)
    inputs = torch.ones(1, 6)
    with torch.no_grad(), amp.full_precision(model):
        expected = model(inputs)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        "sys.modules['amp_patch'] = None\n"
        "nn = torch.nn\n"
        "model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))\n"
        "model.load_state_dict(torch.load('model.pt', weights_only=True))\n"
        "print(model(torch.ones(1, 6)).tolist())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stderr
    found = torch.tensor(eval(result.stdout))  # noqa: S307 (a list of numbers that we printed)
    torch.testing.assert_close(found, expected, rtol=2.0**-20, atol=2.0**-22)


# -- inside of cast models -------------------------------------------------------------------------


class Coder(nn.Module):
    """Used by its parts and by other methods than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(4, 4)
        self.dec = nn.Linear(4, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.enc(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dec(self.encode(x))


@EVERY
def test_parts_and_methods_take_fp32_inputs_where_operations_are_patched(
    opt_level: str,
) -> None:
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level, patch_torch_functions=True)
    x = torch.randn(2, 4)
    hidden = model.encode(x)
    loss = model.dec(hidden.float()).float().square().mean() + model.enc(x).float().mean()
    backward(loss * 2.0**-8, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert model(x).dtype in (torch.float32, torch.float16, torch.bfloat16)


class Maker(nn.Module):
    """Makes FP32 tensors in its forward, which meet half weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(4, dtype=torch.float32).expand(4, 4)
        x = x @ torch.ones(4, 4) + F.linear(positions, self.weight, self.bias)
        return torch.addmm(self.bias, x, torch.ones(4, 4))


@EVERY
def test_tensors_made_in_forward_meet_half_weights_without_an_error_or_with_a_readable_one(
    opt_level: str,
) -> None:
    model = Maker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=opt_level)
    try:
        found = model(torch.ones(4, 4))
    except RuntimeError as error:
        assert opt_level in ("O2", "O3", "O5")
        assert "dtype" in str(error)  # noqa: PT017 (torch says which dtypes met)
    else:
        assert found.isfinite().all()


@pytest.mark.parametrize("opt_level", ["O2", "O3", "O5"])
def test_casts_around_operations_can_be_added_to_a_cast_model(opt_level: str) -> None:
    models = [Maker(), Coder()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    amp.initialize(models, optimizer, opt_level=opt_level, patch_torch_functions=True)
    assert models[0](torch.ones(4, 4)).isfinite().all()
    assert models[1].dec(models[1].encode(torch.randn(2, 4)).float()).isfinite().all()


# -- misuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["01", "o1", 1, " O1", "O1 ", "0", None, "O9", "1", ""])
def test_an_opt_level_that_is_nearly_right_is_named_in_the_error(value: Any) -> None:
    with pytest.raises(amp.AmpError, match="opt_level: expected one of O0, O1") as caught:
        amp.initialize(net(), opt_level=value)
    if value not in (None, "O9", ""):
        wanted = "O0" if value == "0" else "O1"
        assert f"did you mean '{wanted}'?" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, None),
        ({"opt_level": "O1", "keep_batchnorm_fp32": False}, "drop keep_batchnorm_fp32"),
        ({"opt_level": "O1", "master_weights": True}, "drop master_weights"),
        ({"opt_level": "O2", "patch_torch_functions": True}, None),
        ({"opt_level": "O2", "cast_model_type": torch.bfloat16}, None),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "False"}, None),
        ({"opt_level": "O2", "master_weights": "perhaps"}, "master_weights"),
        ({"opt_level": "O3", "keep_batchnorm_fp32": "True"}, None),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "which leaves the weights in FP32"),
    ],
    ids=str,
)
def test_overrides_work_or_say_what_to_do(options: dict[str, Any], message: str | None) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if message is None:
        amp.initialize(model, optimizer, **options)
        train_step(model, optimizer, batch(), factor=2.0**-8)
    else:
        with pytest.raises(amp.AmpError, match=message):
            amp.initialize(model, optimizer, **options)


def test_amp_patch_lives_beside_torchs_own_amp_and_takes_no_name_of_others() -> None:
    before = set(sys.modules)
    importlib.import_module("amp_patch")
    assert "apex" not in set(sys.modules) - before
    from torch import amp as torchs

    model, optimizer = started("O1")
    with torchs.autocast("cpu", dtype=torch.bfloat16), amp.disable_casts():
        assert model(batch()[0]).dtype is torch.bfloat16
    train_step(model, optimizer, batch(), factor=2.0**-8)


def test_an_import_says_nothing(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import amp_patch"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
