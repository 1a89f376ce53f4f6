"""A training loop that saves after every step and goes on from its newest file, to be killed.

`python loop_to_kill.py LEVEL OPTIMIZER FILE STEPS` prints each step, so that a test can kill it in
the midst of one, and at the end a line with a digest of all it has trained.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.2, max_iter=2, history_size=3),
}


def start(opt_level: str, optimizer_name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
    )
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    # A high start: the first steps overflow, so that skips are part of what is resumed.
    scale = amp.DynamicLossScale(initial=2.0**18, growth_interval=4)
    options = {"loss_scale": scale} if opt_level in ("O1", "O2") else {}
    return amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)


def train_step(model: nn.Module, optimizer: Any, step: int) -> None:
    torch.manual_seed(100 + step)
    inputs, targets = torch.randn(8, 6), torch.randn(8, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    optimizer.step(closure)


def save(path: Path, model: nn.Module, optimizer: Any, step: int) -> None:
    """Write beside the file and rename: there is always a whole one."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
            "step": step,
        },
        unfinished,
    )
    unfinished.replace(path)


def load(path: Path, model: nn.Module, optimizer: Any) -> int:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    return int(state["step"])


def digest(model: nn.Module, optimizer: Any) -> str:
    """Of every bit that was trained."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.numpy().tobytes())
    for parameter in amp.master_params(optimizer):
        found.update(parameter.detach().float().numpy().tobytes())
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            found.update(f"{name} {_plain(value)}".encode())
    found.update(repr(amp.state_dict()).encode())
    return found.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.double().tolist()
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def run(opt_level: str, optimizer_name: str, path: Path, steps: int) -> str:
    """Train to `steps`, from the newest file if there is one."""
    model, optimizer = start(opt_level, optimizer_name)
    step = load(path, model, optimizer) if path.exists() else 0
    while step < steps:
        print("step", step, flush=True)
        train_step(model, optimizer, step)
        step += 1
        save(path, model, optimizer, step)
    return digest(model, optimizer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    level, name, file, count = sys.argv[1:]
    print("digest", run(level, name, Path(file), int(count)), flush=True)
