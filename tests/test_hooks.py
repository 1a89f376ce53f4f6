"""The hooks that amp_patch puts on models: they are copied with the model and pickle as nothing."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.hooks import ModelHook


class AddTo(ModelHook):
    """A forward hook that adds `amount` and remembers what it saw."""

    def __init__(self, amount: torch.Tensor) -> None:
        self.amount = amount
        self.seen: list[float] = []

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(result))
        return result + self.amount


def test_deep_copy_has_attributes_of_its_own() -> None:
    hook = AddTo(torch.ones(1))
    twin = copy.deepcopy(hook)
    twin.seen.append(1.0)
    assert type(twin) is AddTo
    assert hook.seen == []
    assert twin.amount is not hook.amount
    assert torch.equal(twin.amount, hook.amount)


def test_deep_copy_keeps_what_is_shared_with_the_model_shared() -> None:
    model = nn.Linear(1, 1)
    hook = AddTo(model.weight)
    twin_model, twin_hook = copy.deepcopy((model, hook))
    assert twin_hook.amount is twin_model.weight


def test_hook_that_is_reached_twice_is_copied_once() -> None:
    hook = AddTo(torch.ones(1))
    first, second = copy.deepcopy([hook, hook])
    assert first is second


def test_hook_that_refers_to_itself_can_be_copied() -> None:
    hook = AddTo(torch.ones(1))
    hook.seen.append(hook)  # type: ignore[arg-type]
    twin = copy.deepcopy(hook)
    assert twin.seen == [twin]


def test_copied_model_runs_its_own_hook() -> None:
    model = nn.Identity()
    hook = AddTo(torch.ones(1))
    model.register_forward_hook(hook)
    twin = copy.deepcopy(model)
    assert float(twin(torch.zeros(1))) == 1.0
    assert hook.seen == []


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_hook_does_nothing_whatever_it_is_given(protocol: int) -> None:
    loaded = pickle.loads(pickle.dumps(AddTo(torch.ones(1)), protocol))  # noqa: S301 (our own bytes)
    assert loaded(nn.Identity(), (), {}, "prefix", [], None) is None
    assert loaded() is None


@pytest.mark.parametrize("opt_level", amp.OPT_LEVELS)
def test_saved_model_loads_and_runs_where_there_is_no_amp_patch(
    opt_level: str, models_without_amp: dict[str, str]
) -> None:
    assert models_without_amp[opt_level] == "loaded [2, 1] hookless"


@pytest.fixture(scope="module")
def models_without_amp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process without amp_patch says of a model saved at each level."""
    folder = tmp_path_factory.mktemp("models")
    for opt_level in amp.OPT_LEVELS:
        model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)).eval()
        amp.initialize(model, opt_level=opt_level, verbosity=0)
        torch.save(model, folder / f"{opt_level}.pt")
        amp.uninitialize()
    script = (
        "import sys, pathlib, torch\n"
        "sys.modules['amp_patch'] = None\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n"
        "    model = torch.load(path, weights_only=False)\n"
        "    dtype = model[0].weight.dtype\n"
        "    out = model[0](torch.ones(2, 3, dtype=dtype))\n"
        "    model.state_dict(), model.load_state_dict(model.state_dict())\n"
        "    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())\n"
        "    is_hookless = all(hook(1, 2, 3) is None for hook in hooks)\n"
        "    print(path.stem, 'loaded', list(out.shape), 'hookless' if is_hookless else hooks)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())
