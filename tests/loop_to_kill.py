"""A training loop that saves after every step and goes on from its newest file, to be killed.

`python loop_to_kill.py FOLDER STEPS KILLS O1:adam O2:sgd ...` runs it in child processes, kills
those at random moments and says what became of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer brings it in, and no child shall spend its time on that
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


def run(opt_level: str, optimizer_name: str, path: Path, steps: int) -> tuple[int, str]:
    """Train to `steps`, from the newest file if there is one. Returns where it began, a digest."""
    model, optimizer = start(opt_level, optimizer_name)
    first = load(path, model, optimizer) if path.exists() else 0
    for step in range(first, steps):
        train_step(model, optimizer, step)
        save(path, model, optimizer, step + 1)
    found = digest(model, optimizer)
    amp.uninitialize()
    return first, found


def run_in_child(place: tuple[str, str], path: Path, steps: int, dies_after: float | None) -> bool:
    """Run in a process of its own, and kill that after so many seconds. Whether it was killed."""
    child = os.fork()
    if not child:
        first, found = run(*place, path, steps)
        with path.with_suffix(".log").open("a") as log:
            log.write(f"{first} {found}\n")
        os._exit(0)
    if dies_after is not None:
        time.sleep(dies_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def kill_and_resume(place: tuple[str, str], folder: Path, steps: int, kills: int) -> dict[str, Any]:
    """What a run left alone and one that was killed so often came to."""
    randomly = random.Random(str(place))
    alone, killed = folder / f"{place}-alone.pt", folder / f"{place}.pt"
    begin = time.perf_counter()
    run_in_child(place, alone, steps, None)
    seconds = time.perf_counter() - begin
    deaths, reached = 0, []
    for _ in range(kills):
        deaths += run_in_child(place, killed, steps, randomly.uniform(0.2, 0.5) * seconds)
        reached.append(torch.load(killed)["step"] if killed.exists() else 0)
    run_in_child(place, killed, steps, None)
    logs = [path.with_suffix(".log").read_text().split() for path in (alone, killed)]
    return {"place": place, "deaths": deaths, "reached": reached, "digests": [x[-1] for x in logs]}


def main() -> None:
    """Kill and resume at each place of the command line (as O1:adam), a line of JSON each."""
    torch.set_num_threads(1)
    folder, steps, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for place in sys.argv[4:]:
        opt_level, name = place.split(":")
        print(json.dumps(kill_and_resume((opt_level, name), folder, steps, kills)), flush=True)


if __name__ == "__main__":
    main()
