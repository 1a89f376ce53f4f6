"""The command that runs a script with the names in place, its workers and its report."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_patch
from amp_patch.__main__ import main
from amp_patch.compat import run_command
from amp_patch.compat.run_report import RunReport
from amp_patch.compat.run_settings import RunSettings, published_settings

TRAINING = """
import sys
import torch
from apex import amp

def train(level, factors):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for factor in factors:
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
MAIN = """
if __name__ == "__main__":
    train("O1", [1e-3, 1e30, 1e-3])
    train("O2", [1e-3])
    print("arguments", sys.argv[1:], __name__, __file__)
"""
SPAWN = """
import multiprocessing

class Marked:
    pass

def work(queue):
    from apex.amp import initialize
    train("O1", [1e-3])
    queue.put((Marked.__module__, initialize.__module__))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print("worker", queue.get(timeout=120))
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("AMP_PATCH_RUN", "")
    parser = argparse.ArgumentParser()
    run_command.add_command(parser.add_subparsers(required=True))

    def command(*arguments: Any) -> int:
        options = parser.parse_args(["run", *map(str, arguments)])
        return int(options.run(options))

    return command


def script(folder: Path, *parts: str) -> Path:
    path = folder / "train.py"
    path.write_text("".join(map(textwrap.dedent, parts)), encoding="utf-8")
    return path


def test_script_is_main_and_gets_its_arguments(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, TRAINING, MAIN)
    argv, search_path = list(sys.argv), list(sys.path)
    assert run(path, "--opt-level", "-m", "x") == 0
    assert f"arguments ['--opt-level', '-m', 'x'] __main__ {path}" in capsys.readouterr().out
    assert (sys.argv, sys.path) == (argv, search_path)


def test_annotations_of_a_script_are_what_python_makes_of_them(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "def f(x: int): pass\nprint(f.__annotations__, __annotations__)\n")
    assert run(path) == 0
    assert capsys.readouterr().out == in_a_process(str(path)).stdout


@pytest.mark.parametrize("target", ["package", "package.inner"])
def test_module_runs_as_main(
    run: Callable[..., int],
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "value.py").write_text("VALUE = 3")
    source = "import sys, apex\nfrom .value import VALUE\nprint(__name__, VALUE, sys.argv[1:])"
    (package / "inner.py").write_text(source)
    (package / "__main__.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    try:
        assert run("-m", target, "--flag", "-m") == 0
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "package"]:
            del sys.modules[name]
    assert capsys.readouterr().out == "__main__ 3 ['--flag', '-m']\n"


@pytest.mark.parametrize(
    "given",
    [
        "PROGRAM --a -- -x y",
        "PROGRAM -- -- -m z",
        "PROGRAM --report r --opt-level O9 -h",
        "PROGRAM -mine -1 a=b",
    ],
)
@pytest.mark.parametrize("program", ["-m arguments", "-marguments", "arguments.py"])
def test_arguments_are_those_that_python_would_give(
    program: str,
    given: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All that stands behind the program."""
    monkeypatch.setenv("AMP_PATCH_RUN", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arguments.py").write_text("import sys\nprint(sys.argv[1:])")
    line = given.replace("PROGRAM", program).split()
    assert main(["run", "--opt-level", "O1", *line]) == 0
    assert capsys.readouterr().out == f"{given.split()[1:]}\n"


def test_report_counts_what_happened(run: Callable[..., int], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text("of an earlier run")
    run("--report", report, script(tmp_path, TRAINING, MAIN))
    figures = json.loads(report.read_text())
    assert figures.pop("seconds_in_casts") > 0
    assert figures == {
        "amp_patch": amp_patch.__version__,
        "level": "O2",
        "levels": ["O1", "O2"],
        "initialize_calls": 2,
        "steps": 3,
        "skipped_steps": 1,
        "loss_scales": [2.0**16, 2.0**15],
    }
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] == ["report.json"]


def test_report_is_written_when_the_script_fails(run: Callable[..., int], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    failing = script(tmp_path, TRAINING, "train('O1', [1e-3])\nsys.exit(3)")
    with pytest.raises(SystemExit) as caught:
        run("--report", report, failing)
    assert caught.value.code == 3
    assert json.loads(report.read_text())["steps"] == 1
    assert "apex" not in sys.modules


@pytest.mark.parametrize("report", ["none/report.json", ""])
def test_report_that_cannot_be_written_shows_before_the_script_runs(
    report: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--report", tmp_path / report, script(tmp_path, "print('trained')"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "--report: expected a file in an existing folder" in shown.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_report_into_a_pipe_leaves_it_a_pipe(run: Callable[..., int], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run("--report", pipe, script(tmp_path, TRAINING, "train('O1', [1e-3])"))
    assert json.loads(os.read(reader, 4096))["steps"] == 1
    os.close(reader)
    assert pipe.is_fifo()


def test_time_of_the_casts_of_a_layer_is_counted() -> None:
    report = RunReport()
    layer = amp_patch.initialize(torch.nn.Linear(2, 1), opt_level="O1")
    layer(torch.ones(1, 2).half())
    report.close()
    counted = report.figures()["seconds_in_casts"]
    assert counted > 0
    amp_patch.clear_cache()
    layer(torch.ones(1, 2))
    assert report.figures()["seconds_in_casts"] == counted


def test_report_leaves_no_trace() -> None:
    report = RunReport()
    report.close()
    report.close()
    assert report.figures()["steps"] == 0
    assert not report.is_of_training


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_level_of_the_script_is_replaced(
    run: Callable[..., int], tmp_path: Path, level: str
) -> None:
    report = tmp_path / "report.json"
    run("--opt-level", level, "--report", report, script(tmp_path, TRAINING, MAIN))
    assert json.loads(report.read_text())["levels"] == [level] * 2


def test_what_cannot_be_run_is_one_line(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ((), ("-m",), (tmp_path / "none.py",), ("-m", "no_such_module_at_all")):
        assert run(*arguments) == 2
        assert capsys.readouterr().err.startswith("run: expected a")


AFTER_THE_SCRIPT = """
import atexit, pickle, threading
from apex import amp

class Result:
    pass

def late(where):
    from apex.optimizers import FusedAdam
    assert pickle.loads(pickle.dumps(Result)) is Result
    train("O1", [1e-3])
    print("late", where)

def wait():
    threading.main_thread().join()
    late("thread")

threading.Thread(target=wait).start()
atexit.register(late, "handler")
"""


FORK = """
import multiprocessing, os

context = multiprocessing.get_context("fork")

def in_fork(*factors):
    process = context.Process(target=train, args=("O1", factors))
    process.start()
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
@pytest.mark.parametrize(
    ("body", "steps", "skipped", "calls"),
    [
        ("in_fork(1e-3, 1e30, 1e-3)", 2, 1, 1),
        ("train('O1', []); in_fork(1e-3)", 1, 0, 2),
        ("in_fork(1e-3); train('O1', [1e-3] * 2)", 2, 0, 1),
    ],
    ids=["fork", "initialized before", "trained afterwards"],
)
def test_report_is_of_the_process_that_trained(
    body: str, steps: int, skipped: int, calls: int, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    path = script(tmp_path, TRAINING, FORK, body)
    done = in_a_process("-m", "amp_patch", "run", "--report", str(report), str(path))
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(report.read_text())
    assert [figures[one] for one in ("steps", "skipped_steps", "initialize_calls")] == [
        steps,
        skipped,
        calls,
    ]


def test_threads_and_exit_handlers_have_the_names_and_are_in_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    path = script(tmp_path, TRAINING, AFTER_THE_SCRIPT)
    done = in_a_process("-m", "amp_patch", "run", "--report", str(report), str(path))
    assert (done.stdout, done.stderr) == ("late thread\nlate handler\n", "")
    assert json.loads(report.read_text())["steps"] == 2


def test_interrupt_of_the_script_ends_it_as_under_python(tmp_path: Path) -> None:
    path = str(script(tmp_path, "def wait():\n    raise KeyboardInterrupt\nwait()\n"))
    plain, done = in_a_process(path), in_a_process("-m", "amp_patch", "run", path)
    assert done.returncode == plain.returncode != 0
    assert done.stderr.endswith(plain.stderr.partition("\n")[2])


def test_settings_go_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PATCH_RUN", "")
    settings = RunSettings("train.py", opt_level="O2")
    settings.publish()
    assert published_settings() == settings
    monkeypatch.delenv("AMP_PATCH_RUN")
    with pytest.raises(amp_patch.AmpError, match="python -m amp_patch run"):
        published_settings()


def test_spawned_workers_have_the_names(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    path = script(tmp_path, TRAINING, SPAWN)
    done = in_a_process("-m", "amp_patch", "run", "--report", str(report), str(path))
    assert "worker ('__mp_main__', 'amp_patch.compat.frontend')" in done.stdout, done.stderr
    assert done.returncode == 0
    assert json.loads(report.read_text())["steps"] == 1  # of the worker, which trained


def test_pool_of_a_script_that_changed_the_folder_returns_its_objects(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import multiprocessing, os
        from apex import amp

        class Result:
            def __init__(self, value):
                self.value = value

        if __name__ == "__main__":
            os.chdir("/")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                [found] = pool.map_async(Result, [amp.__name__]).get(60)
                print(type(found) is Result, found.value)
        """,
    )
    done = in_a_process("-m", "amp_patch", "run", "train.py", cwd=tmp_path)
    assert done.stdout == "True apex.amp\n", done.stderr


@pytest.mark.parametrize("given", ["train.py", "../inner/train.py", "link.py"])
def test_script_knows_its_file_as_under_python(
    given: str,
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    script(folder, "import sys\nprint(sys.argv, __file__, sys._getframe().f_code.co_filename)")
    (folder / "link.py").symlink_to(folder / "train.py")
    monkeypatch.chdir(folder)
    assert run(given, "x") == 0
    assert capsys.readouterr().out == in_a_process(given, "x", cwd=folder).stdout


def test_launchers_may_start_the_script_again(tmp_path: Path) -> None:
    """Some frameworks start their other ranks with `python -m`, by the spec of `__main__`."""
    path = script(
        tmp_path,
        "import subprocess, sys, apex\nprint(sys.argv[1:], flush=True)\n",
        "if not sys.argv[1:]:\n"
        "    name = sys.modules['__main__'].__spec__.name\n"
        "    subprocess.run([sys.executable, '-m', name, 'again'], check=True)\n",
    )
    assert in_a_process("-m", "amp_patch", "run", str(path)).stdout == "[]\n['again']\n"


def in_a_process(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    library = Path(amp_patch.__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "PYTHONPATH": f"{library}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
    )
