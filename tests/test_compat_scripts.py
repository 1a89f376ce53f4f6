"""Scripts as people wrote them: run unmodified through the names, and migrated, to the same bit."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import amp_patch
from amp_patch.compat import migrate_command, run_command
from amp_patch.compat.installer import install_as_apex

SCRIPTS = Path(__file__).parent / "apex_scripts"
LEVELS = tuple(amp_patch.OPT_LEVELS)
RUNS: dict[str, tuple[str, ...]] = {
    "imagenet.py": (
        "--opt-level O0",
        "--opt-level O1",
        "--opt-level O2 --keep-batchnorm-fp32 True --loss-scale 128.0",
        "--opt-level O2 --loss-scale dynamic --sync_bn",
        "--opt-level O3 --keep-batchnorm-fp32 True --epochs 1",
        "--opt-level O4",
        "--opt-level O5",
    ),
    "dcgan.py": tuple(f"--opt_level {level}" for level in LEVELS if level != "O3"),
    "language_model.py": tuple(f"--opt_level {level}" for level in LEVELS),
    "bert_finetuning.py": (
        "",
        *(f"--fp16 --fp16_opt_level {level}" for level in LEVELS),
        "--fp16 --fp16_opt_level O2 --optimizer lamb --gradient_accumulation_steps 1",
    ),
    "handle_2018.py": ("",),
    "gradient_penalty.py": tuple(f"--level {level}" for level in LEVELS if level != "O3"),
    "fp16_optimizer.py": ("", "--dynamic-loss-scale"),
    "edit_lists.py": ("",),
    "write_loss_scale.py": tuple(f"--opt-level {level}" for level in LEVELS),
}
CASES = [(script, arguments) for script, many in RUNS.items() for arguments in many]

Command = Callable[..., int]


@pytest.fixture
def command() -> Command:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    run_command.add_command(commands)
    migrate_command.add_command(commands)

    def run(*arguments: Any) -> int:
        options = parser.parse_args([str(argument) for argument in arguments])
        return int(options.run(options))

    return run


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AMP_PATCH_RUN", "")  # the command sets it for its workers
    with torch.random.fork_rng():
        yield


def losses(output: str) -> list[float]:
    found = json.loads(output.partition("losses ")[2])
    assert all(map(math.isfinite, found))
    return found


@pytest.mark.parametrize(
    ("script", "arguments"), CASES, ids=[" ".join(case).strip() for case in CASES]
)
def test_script_and_its_migrated_twin_have_the_same_losses(
    script: str,
    arguments: str,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("libcst", reason="migrate needs libcst: pip install 'amp_patch[migrate]'")
    main = sys.modules["__main__"]
    assert command("run", SCRIPTS / script, *arguments.split()) == 0
    through_names = losses(capsys.readouterr().out)
    amp_patch.uninitialize()
    assert sys.modules["__main__"] is main
    assert not any(name.partition(".")[0] == "apex" for name in sys.modules)

    twin = tmp_path / script
    twin.write_bytes((SCRIPTS / script).read_bytes())
    assert command("migrate", "--write", twin) == 0
    assert "import apex\n" not in twin.read_text()
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [str(twin), *arguments.split()])
    runpy.run_path(str(twin), run_name="__main__")
    assert losses(capsys.readouterr().out) == through_names
    reset_face()


def reset_face() -> None:
    """A migrated script is a process of its own; here its traces are taken back by hand."""
    amp_patch.uninitialize()
    install_as_apex()()


def test_script_resumes_from_its_checkpoint(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, file = SCRIPTS / "imagenet.py", tmp_path / "checkpoint.pt"
    level = ("--opt-level", "O2", "--loss-scale", "dynamic")
    command("run", script, *level, "--epochs", 3)
    straight = losses(capsys.readouterr().out)
    amp_patch.uninitialize()
    command("run", script, *level, "--epochs", 2, "--save", file)
    first = losses(capsys.readouterr().out)
    amp_patch.uninitialize()
    command("run", script, *level, "--epochs", 3, "--resume", file)
    assert first + losses(capsys.readouterr().out) == straight


def load_scaler_of_timm() -> Any:
    """timm's own class; the rest of timm, which needs torchvision, is left out."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    root = Path(spec.submodule_search_locations[0])
    for name, folder in (("timm", root), ("timm.utils", root / "utils")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return importlib.import_module("timm.utils.cuda").ApexScaler()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scaler_of_timm_drives_a_step(level: str) -> None:
    undo = install_as_apex()
    try:
        scaler = load_scaler_of_timm()
        amp = importlib.import_module("apex.amp")
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0)
        before = model.weight.clone()
        loss = model(torch.ones(4, 2)).square().mean()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        assert not torch.equal(model.weight, before)
        assert scaler.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 1}}
        scaler.load_state_dict(scaler.state_dict())
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            del sys.modules[name]
        undo()
