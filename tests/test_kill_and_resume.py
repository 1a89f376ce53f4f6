"""A loop that is killed at any moment goes on bit for bit from its newest file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loop_to_kill import OPTIMIZERS, digest, load, save, start, train_step
from networks import LEVELS

import amp_patch as amp

ROOT = Path(__file__).parent.parent
STEPS = 10
# Each level and each optimizer once.
KILLED = [f"{level}:{name}" for level, name in zip((*LEVELS, "O1", "O2"), OPTIMIZERS, strict=True)]
KILLS = 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no signals and forks here")
def test_loops_killed_at_random_moments_end_as_those_left_alone(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tests" / "loop_to_kill.py", tmp_path, "60", str(KILLS), *KILLED],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [":".join(one["place"]) for one in found] == KILLED
    for one in found:
        assert one["digests"][0] == one["digests"][1], one
    # A loaded machine may finish a run before its signal comes; most must die on the way.
    assert sum(one["deaths"] for one in found) >= len(found)
    assert any(0 < step < 60 for one in found for step in one["reached"])


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
