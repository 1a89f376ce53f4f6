"""Pickles, saved models, spawned processes and DataLoader workers, while casts are installed."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_identical
from torch import nn
from torch.utils.data import DataLoader, Dataset

import amp_patch as amp

HALF = torch.bfloat16
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


class Net(nn.Module):
    """Holds functions of torch that are patched, and a method of a tensor class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.functions = [F.linear, torch.matmul, torch.Tensor.matmul, torch.exp]
        self.loss, self.product = F.mse_loss, torch.matmul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(F.linear(self.linear(x), x), x)


def through_torch(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),  # noqa: S301
    "torch.save": through_torch,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_model_that_holds_patched_functions_comes_back(way: str, opt_level: str) -> None:
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4)), opt_level=opt_level, verbosity=0)
    holder = Net()
    twin = WAYS[way](holder)
    x = torch.randn(4, 4)
    assert_identical(twin(x).detach(), holder(x).detach())
    assert twin.functions == holder.functions
    assert twin.loss is holder.loss
    del model


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_model_that_took_the_functions_before_initialize_comes_back(
    way: str, opt_level: str
) -> None:
    model = Net()
    loss, product, functions = model.loss, model.product, [*model.functions]
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    twin = WAYS[way](model)
    half = amp.OPT_LEVELS[opt_level].cast_model_type or torch.float32
    x = torch.randn(4, 4)
    assert_identical(twin(x.to(half)).detach().float(), model(x).detach().float())
    amp.uninitialize()
    assert model.loss is loss
    assert model.product is product
    assert model.functions == functions


@pytest.mark.parametrize("way", WAYS)
def test_bound_methods_and_results_come_back(way: str) -> None:
    model = amp.initialize(Net(), opt_level="O4", verbosity=0)
    tensor = torch.ones(2, 2)
    bound = WAYS[way](tensor.matmul)
    assert bound(tensor).dtype is HALF
    output = model(torch.ones(4, 4)).detach()
    assert_identical(WAYS[way](output), output)


def test_layers_that_clone_functions_can_be_built_after_initialize() -> None:
    kept = amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    for activation in ("gelu", "relu", F.gelu):
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2)
        assert encoder(torch.ones(2, 3, 8)).shape == (2, 3, 8)
        assert WAYS["pickle"](encoder)(torch.ones(2, 3, 8)).shape == (2, 3, 8)
    del kept


LOADING = """
import sys
sys.modules["amp_patch"] = None  # as if it were not installed
sys.path.insert(0, {folder!r})
import torch, users_model
with open({pickle!r}, "rb") as file:
    import pickle
    loaded = pickle.load(file)
whole = torch.load({saved!r}, weights_only=False)
x = torch.ones(4, 4)
for model in (loaded, whole):
    half = next(model.parameters()).dtype
    print(model(x.to(half)).dtype is half, model.functions[0] is torch.nn.functional.linear)
"""
USERS_MODEL = """
import torch
import torch.nn.functional as F
from torch.nn.functional import linear, mse_loss
from torch import matmul

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.functions = [F.linear, matmul, torch.Tensor.matmul, torch.exp]
        self.loss = mse_loss

    def forward(self, x):
        return matmul(F.linear(self.linear(x), x), x)
"""


@pytest.mark.parametrize("opt_level", ["O1", "O4", "O2", "O3", "O5"])
def test_a_pickle_loads_where_amp_patch_is_not_installed(
    opt_level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_model.py").write_text(USERS_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    users_model = __import__("users_model")
    try:
        model = users_model.Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        model.functions[0] = F.linear  # as it is taken during the session
        model(torch.ones(4, 4)) if opt_level in ("O1", "O4") else None
        with (tmp_path / "model.pickle").open("wb") as file:
            pickle.dump(model, file)
        torch.save(model, tmp_path / "model.pt")
    finally:
        amp.uninitialize()
        del sys.modules["users_model"]
    program = LOADING.format(
        folder=str(tmp_path),
        pickle=str(tmp_path / "model.pickle"),
        saved=str(tmp_path / "model.pt"),
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"] * 4


# -- other processes ------------------------------------------------------------------------------


class Products(Dataset[torch.Tensor]):
    """Computes in the worker with functions that are patched in the parent."""

    def __init__(self) -> None:
        self.product = torch.mm

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.product(torch.full((2, 2), float(index)), torch.eye(2))


def collate(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items)


@pytest.mark.parametrize(
    ("start", "dtype"), [("fork", HALF), ("spawn", torch.float32)], ids=["fork", "spawn"]
)
def test_loader_workers_run_beside_the_session(start: str, dtype: torch.dtype) -> None:
    model = amp.initialize(Net(), opt_level="O4", verbosity=0)
    loader = DataLoader(
        Products(), 2, num_workers=1, collate_fn=collate, multiprocessing_context=start
    )
    batches = list(loader)
    # A forked worker has the session of its parent, a spawned one has none.
    assert [batch.dtype for batch in batches] == [dtype] * 2
    assert_identical(torch.cat(batches).float()[:, 0, 0], torch.arange(4.0))
    assert model(torch.ones(4, 4)).dtype is HALF


def run_in_child(model: nn.Module, queue: Any) -> None:
    """Runs where the parent has casts and this process has none."""
    output = model(torch.ones(4, 4, dtype=next(model.parameters()).dtype))
    queue.put((str(output.dtype), output.detach().float().sum().item()))


@pytest.mark.parametrize("opt_level", ["O4", "O5"])
def test_model_goes_to_a_spawned_process_as_a_plain_one(opt_level: str) -> None:
    model = amp.initialize(Net().eval(), opt_level=opt_level, verbosity=0)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=run_in_child, args=(model, queue))
    process.start()
    dtype, total = queue.get(timeout=60)
    process.join()
    queue.close()
    queue.join_thread()
    assert dtype == ("torch.float32" if opt_level == "O4" else "torch.bfloat16")
    expected = model(torch.ones(4, 4)).detach().float().sum().item()
    assert total == pytest.approx(expected, rel=0.05, abs=0.05)
