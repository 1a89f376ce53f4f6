"""The companions of apex.parallel, in one process and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_patch.compat.sync_batchnorm import SyncBatchNorm, convert_syncbn_model

SCRIPTS = Path(__file__).parent / "apex_scripts"
WORKER = Path(__file__).parent / "compat_worker.py"
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


def torchrun(*command: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_gloo
def test_companions_agree_with_one_process_that_has_the_whole_batch(tmp_path: Path) -> None:
    torchrun(str(WORKER), str(tmp_path))
    found = json.loads((tmp_path / "results.json").read_text())
    assert found.pop("failures") == []
    assert len(found) == 6


@needs_gloo
def test_script_and_its_migrated_twin_agree_under_torchrun(tmp_path: Path) -> None:
    libcst = "migrate needs libcst: pip install 'amp_patch[migrate]'"
    codemod = pytest.importorskip("amp_patch.compat.codemod", reason=libcst, exc_type=ImportError)
    report, twin = tmp_path / "report.json", tmp_path / "distributed.py"
    script, arguments = SCRIPTS / "distributed.py", ("--opt_level", "O2", "--larc")
    output = torchrun("-m", "amp_patch", "run", "--report", str(report), str(script), *arguments)
    losses = json.loads(output.partition("losses ")[2])
    assert losses[-1] < losses[0]
    figures = json.loads(report.read_text())
    assert (figures["level"], figures["steps"], figures["skipped_steps"]) == ("O2", 4, 0)

    twin.write_text(codemod.migrate_source(script.read_bytes()).source)
    migrated = torchrun(str(twin), *arguments)
    assert json.loads(migrated.partition("losses ")[2]) == losses


def test_converted_model_keeps_parameters_and_statistics() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 3),
        torch.nn.Sequential(torch.nn.BatchNorm1d(3, eps=1e-3, momentum=0.3)),
        torch.nn.InstanceNorm1d(3),
    )
    model.eval()
    before = model[1][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    converted = convert_syncbn_model(model)[1][0]
    assert isinstance(converted, SyncBatchNorm)
    assert (converted.eps, converted.momentum, converted.training) == (1e-3, 0.3, False)
    assert converted.weight is before.weight
    assert converted.running_mean is before.running_mean
    assert any(converted.weight is p for p in optimizer.param_groups[0]["params"])
    assert isinstance(model[2], torch.nn.InstanceNorm1d)
    assert isinstance(convert_syncbn_model(torch.nn.BatchNorm2d(2)), SyncBatchNorm)


def test_sync_batchnorm_alone_is_batchnorm() -> None:
    plain, ours = torch.nn.BatchNorm2d(3), SyncBatchNorm(3)
    last = SyncBatchNorm(3, channel_last=True, fuse_relu=True)
    x = torch.randn(4, 3, 2, 2)
    expected = plain(x)
    assert torch.equal(ours(x), expected)
    z = torch.randn(4, 2, 2, 3)
    result = last(x.movedim(1, -1), z)
    torch.testing.assert_close(result, torch.relu(expected.movedim(1, -1) + z))
    assert torch.equal(ours.running_var, plain.running_var)
