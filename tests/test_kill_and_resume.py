"""A loop that is killed at any moment goes on bit for bit from its newest file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from loop_to_kill import OPTIMIZERS, digest, load, run, save, start, train_step
from networks import LEVELS

import amp_patch as amp

ROOT = Path(__file__).parent.parent
STEPS = 10
# A process takes seconds to start; these are the levels and optimizers that differ most.
KILLED = [("O1", "adam"), ("O2", "momentum"), ("O2", "adamw-fused"), ("O5", "lbfgs")]


def spawn(opt_level: str, name: str, file: Path, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "loop_to_kill.py"), opt_level, name, file, str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
@pytest.mark.parametrize(("opt_level", "name"), KILLED)
def test_a_loop_killed_at_random_moments_ends_as_one_that_was_left_alone(
    opt_level: str, name: str, tmp_path: Path
) -> None:
    steps, file = 400, tmp_path / "checkpoint.pt"
    randomly = random.Random(f"{opt_level} {name}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = run(opt_level, name, tmp_path / "undisturbed.pt", steps)
    finally:
        torch.set_num_threads(threads)
        amp.uninitialize()
    killed_at = []
    for _ in range(2):
        with spawn(opt_level, name, file, steps) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step") and randomly.random() < 0.02:
                    time.sleep(randomly.random() * 0.01)  # anywhere in a step, or in a save
                    process.kill()
                    killed_at.append(line.strip())
                    break
            process.stdout.read()
        assert process.returncode in (0, -signal.SIGKILL)
    with spawn(opt_level, name, file, steps) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    print("killed at", killed_at)
    assert output.splitlines()[-1] == f"digest {expected}"
    assert killed_at


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_resuming_after_any_step_is_bit_exact(opt_level: str, name: str, tmp_path: Path) -> None:
    # The optimizers of half weights without masters may end in NaN, and then stay at that exactly.
    model, optimizer = start(opt_level, name)
    files = []
    for step in range(STEPS):
        train_step(model, optimizer, step)
        files.append(tmp_path / f"{step}.pt")
        save(files[-1], model, optimizer, step + 1)
    expected = digest(model, optimizer)
    amp.uninitialize()
    for file in files[::3]:
        model, optimizer = start(opt_level, name)
        for step in range(load(file, model, optimizer), STEPS):
            train_step(model, optimizer, step)
        assert digest(model, optimizer) == expected
        amp.uninitialize()


def test_a_save_that_was_cut_short_leaves_the_earlier_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "checkpoint.pt"
    model, optimizer = start("O2", "adam")
    train_step(model, optimizer, 0)
    save(file, model, optimizer, 1)
    before = file.read_bytes()

    def cut_short(_: object, path: Path) -> None:
        path.write_bytes(before[:100])
        raise KeyboardInterrupt

    train_step(model, optimizer, 1)
    monkeypatch.setattr(torch, "save", cut_short)
    with pytest.raises(KeyboardInterrupt):
        save(file, model, optimizer, 2)
    assert file.read_bytes() == before
    assert load(file, model, optimizer) == 1
