from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import amp_patch.__main__ as command_line
from amp_patch import __version__
from amp_patch.__main__ import main

USAGE_ERROR = 2
INTERRUPTED = 128 + 2  # as a shell reports a command that SIGINT ended

WITHOUT_MODULE = """
import runpy, sys
sys.modules[{missing!r}] = None
sys.argv = ["amp_patch", *{arguments!r}]
runpy.run_module("amp_patch", run_name="__main__", alter_sys=True)
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line in the expectation that it refuses, and return what it says."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == USAGE_ERROR
    return capsys.readouterr().err


def test_demo_runs_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = run_python(
        *("-m", "amp_patch", "demo", "--levels", "O5,O0", "--epochs", "1", "--json", str(file))
    )
    assert result.returncode == 0, result.stderr
    assert [level["level"] for level in json.loads(file.read_text())["levels"]] == ["O5", "O0"]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("O5", "O0")] == ["O5", "O0"]


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for command in ("demo", "compare", "doctor"):
        assert command in text


@pytest.fixture
def its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user in the folder in which the command is run."""
    lines = (
        "import torch",
        "batches = [(torch.ones(2, 8), torch.ones(2, 8))]",
        "half = torch.nn.Sequential(torch.nn.Linear(8, 8).half())",
        "def build():",
        "    model = torch.nn.Linear(8, 8)",
        "    return model, torch.optim.SGD(model.parameters(), lr=0.1)",
    )
    (tmp_path / "its_model.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "its_model"
    sys.modules.pop("its_model", None)


def test_levels_are_compared_from_the_command_line(
    its_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"compare {its_model}:build --batches {its_model}:batches --levels O0,O5 --steps 2"
    assert main([*arguments.split(), "--turns", "1", "--json", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert [level["label"] for level in found["levels"]] == ["O0", "O5"]
    assert capsys.readouterr().out.rstrip().endswith(found["verdict"])


def test_model_is_examined_from_the_command_line(
    its_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", f"{its_model}:half", "--level", "O2"]) == 1
    assert "[wrong] 0.weight: is in half already" in capsys.readouterr().out


def test_help_of_the_demo_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--levels", "--seeds", "--epochs", "--json", "--device"):
        assert option in text


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_command_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in refusal(capsys)


@pytest.mark.parametrize(
    ("levels", "found", "remedy"),
    [
        ("O0,O9", "'O9'", "O0, O1, O2, O3, O4, O5"),
        ("o1", "'o1'", "did you mean 'O1'?"),
        ("01,O2", "'01'", "did you mean 'O1'?"),
        ("", "''", "O0, O1, O2, O3, O4, O5"),
        ("O1,O2,O1", "'O1,O2,O1'", "each level once"),
    ],
)
def test_bad_levels_are_refused_with_what_was_found_and_what_to_do(
    capsys: pytest.CaptureFixture[str], levels: str, found: str, remedy: str
) -> None:
    message = refusal(capsys, "demo", "--levels", levels)
    assert "argument --levels" in message
    assert found in message
    assert remedy in message


@pytest.mark.parametrize("option", ["--seeds", "--epochs"])
@pytest.mark.parametrize("count", ["0", "-1", "2.5", "many"])
def test_counts_are_whole_numbers_of_at_least_one(
    capsys: pytest.CaptureFixture[str], option: str, count: str
) -> None:
    message = refusal(capsys, "demo", f"{option}={count}")
    assert f"argument {option}: expected a whole number of at least 1, found {count!r}" in message


@pytest.mark.parametrize("device", ["nonsense", "meta"])
def test_device_that_cannot_be_used_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], device: str
) -> None:
    message = refusal(capsys, "demo", "--device", device)
    assert f"expected a device that torch can use here, found {device!r}" in message


def test_json_file_without_a_folder_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "absent" / "demo.json")
    message = refusal(capsys, "demo", "--json", file)
    assert f"expected a file in an existing folder, found {file!r}" in message


@pytest.mark.parametrize("missing", ["rich", "sklearn"])
def test_missing_extra_is_named_in_one_line(missing: str) -> None:
    result = run_python("-c", WITHOUT_MODULE.format(missing=missing, arguments=["demo"]))
    assert result.returncode == USAGE_ERROR
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert f"no module {missing!r}" in line
    assert 'pip install "amp_patch[demo]"' in line


def test_help_needs_no_extra() -> None:
    result = run_python("-c", WITHOUT_MODULE.format(missing="rich", arguments=["demo", "--help"]))
    assert result.returncode == 0, result.stderr


def test_interrupt_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run_demo", interrupted)
    assert main(["demo"]) == INTERRUPTED


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def (", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('no data')", "SystemExit: no data"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("", "has no attribute 'build'"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "doctor"])
def test_module_that_cannot_be_imported_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    source: str,
    error: str,
) -> None:
    name = f"faulty_{abs(hash((command, source)))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(capsys, command, f"{name}:build")
    assert f"cannot import '{name}:build': " in message
    assert error in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "json:__all__", "--batches", "json:loads"], "build: expected a function"),
        (["compare", "json:loads", "--batches", "math:pi"], "batches: expected an iterable"),
        (["doctor", "json:__all__"], "build: expected a function or a torch.nn.Module"),
        (["doctor", "builtins:list"], "doctor: expected a torch.nn.Module, found NoneType"),
    ],
)
def test_what_is_no_function_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == USAGE_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["found.txt", "found", "png"])
def test_picture_of_no_known_kind_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    file = str(tmp_path / name)
    message = refusal(capsys, "compare", "--demo", "--plot", file)
    assert "expected the name of a picture, which ends in .png, .svg, .pdf or the like" in message
    assert repr(file) in message
