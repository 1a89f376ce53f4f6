"""The companions of apex.parallel, in one process and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from amp_patch.compat.sync_batchnorm import SyncBatchNorm, convert_syncbn_model

SCRIPTS = Path(__file__).parent / "apex_scripts"
WORKER = Path(__file__).parent / "compat_worker.py"
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


ARGUMENTS = ("--opt_level", "O2", "--larc")


def losses_in(output: str) -> list[float]:
    return list(json.loads(output.partition("losses ")[2]))


def torchrun(*command: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Outcome(NamedTuple):
    """What the ranks of one `torchrun` found."""

    checks: dict[str, str]
    failures: list[str]
    losses: list[float]


@pytest.fixture(scope="module")
def of_the_worker(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A migrated script, and the companions, compared by the ranks themselves."""
    libcst = "migrate needs libcst: pip install 'amp_patch[migrate]'"
    codemod = pytest.importorskip("amp_patch.compat.codemod", reason=libcst, exc_type=ImportError)
    folder = tmp_path_factory.mktemp("worker")
    twin = folder / "distributed.py"
    twin.write_text(codemod.migrate_source((SCRIPTS / "distributed.py").read_bytes()).source)
    output = torchrun(str(WORKER), str(folder), str(twin), *ARGUMENTS)
    checks = json.loads((folder / "results.json").read_text())
    return Outcome(checks, checks.pop("failures"), losses_in(output))


@needs_gloo
def test_companions_agree_with_one_process_that_has_the_whole_batch(of_the_worker: Outcome) -> None:
    assert of_the_worker.failures == []
    assert len(of_the_worker.checks) == 6


@needs_gloo
def test_script_and_its_migrated_twin_agree_under_torchrun(
    of_the_worker: Outcome, tmp_path: Path
) -> None:
    report, script = str(tmp_path / "report.json"), str(SCRIPTS / "distributed.py")
    losses = losses_in(torchrun("-m", "amp_patch", "run", "--report", report, script, *ARGUMENTS))
    assert losses[-1] < losses[0]
    assert of_the_worker.losses == losses
    figures = json.loads(Path(report).read_text())
    assert (figures["level"], figures["steps"], figures["skipped_steps"]) == ("O2", 4, 0)


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
