"""The rewriting of sources."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amp_patch.compat import migrate_command

pytest.importorskip("libcst", reason="migrate needs libcst: pip install 'amp_patch[migrate]'")

from amp_patch.compat.codemod import migrate_source
from amp_patch.compat.names import NAMES
from amp_patch.compat.targets import find_target

GIT = shutil.which("git")
NEXT = "# amp_patch migrate: "

REWRITTEN = {
    "from apex import amp": "import amp_patch as amp",
    "import apex.amp as amp": "import amp_patch as amp",
    "from apex.amp import initialize, scale_loss": "from amp_patch import initialize, scale_loss",
    "import apex\napex.amp.initialize(m, o)": "import amp_patch\namp_patch.initialize(m, o)",
    "from apex.parallel import DistributedDataParallel as DDP": (
        "from amp_patch.compat.parallel import DistributedDataParallel as DDP"
    ),
    "import apex, os  # both\nx = apex.optimizers.FusedAdam(p)": (
        "import amp_patch.compat.fused_adam\nimport os  # both\n"
        "x = amp_patch.compat.fused_adam.FusedAdam(p)"
    ),
    "from apex import amp, optimizers\no = optimizers.FusedSGD(p, lr=1)": (
        "import amp_patch as amp\nimport amp_patch.compat.fused_sgd\n"
        "o = amp_patch.compat.fused_sgd.FusedSGD(p, lr=1)"
    ),
    "from apex.fp16_utils import *\nx = to_python_float(y)": (
        "from amp_patch.compat.loss_scalers import to_python_float\nx = to_python_float(y)"
    ),
    "from apex.contrib.clip_grad import clip_grad_norm_": (
        "from torch.nn.utils import clip_grad_norm_"
    ),
    "from apex.amp._amp_state import _amp_state\ns = _amp_state.loss_scalers[0].loss_scale()": (
        "from amp_patch.compat.amp_state import amp_state as _amp_state\n"
        "s = _amp_state.loss_scalers[0].loss_scale()"
    ),
    "def f():\n    import apex  # late\n    return 1": "def f():\n    pass  # late\n    return 1",
    "try:\n    from apex import amp\nexcept ImportError:\n    amp = None": (
        "try:\n    import amp_patch as amp\nexcept ImportError:\n    amp = None"
    ),
    "import apex; x = 1": "x = 1",
    "import torch; from apex import amp  # both": "import torch\nimport amp_patch as amp  # both",
    "try: from apex import amp\nexcept ImportError: pass": (
        "try: import amp_patch as amp\nexcept ImportError: pass"
    ),
    "if half:\n    x = 1\nelse: import apex": "if half:\n    x = 1\nelse: pass",
    "from apex.parallel import (\n    LARC,  # the wrapper\n    convert_syncbn_model,\n)": (
        "# the wrapper\nfrom amp_patch.compat.larc import LARC\n"
        "from amp_patch.compat.sync_batchnorm import convert_syncbn_model"
    ),
    "x = 1": "x = 1",
}


@pytest.mark.parametrize("source", REWRITTEN)
def test_known_names_are_rewritten(source: str) -> None:
    found = migrate_source(f"{source}\n")
    assert found.source == f"{REWRITTEN[source]}\n"
    assert found.remarks == []
    assert migrate_source(found.source).source == found.source


def test_unknown_names_stay_below_a_comment() -> None:
    source = "from apex.contrib.multihead_attn import SelfMultiheadAttn as Attention\n"
    found = migrate_source(source)
    comment, line = found.source.splitlines(keepends=True)
    assert line == source
    assert comment.startswith(f"{NEXT}apex.contrib.multihead_attn.SelfMultiheadAttn is not")
    assert "torch.nn.MultiheadAttention" in comment


def test_known_names_of_a_line_go_without_the_unknown() -> None:
    found = migrate_source("from apex.optimizers import FusedAdam, FusedMixedPrecisionLamb\n")
    lines = found.source.splitlines()
    assert lines[0].startswith(NEXT)
    assert lines[1:] == [
        "from amp_patch.compat.fused_adam import FusedAdam",
        "from apex.optimizers import FusedMixedPrecisionLamb",
    ]


def test_import_stays_where_one_of_its_uses_is_unknown() -> None:
    source = "import apex\nx = apex.parallel.LARC(o)\ny = apex.mlp.MLP(z)\n"
    found = migrate_source(source)
    assert found.source.endswith(source)
    assert found.remarks == [found.source.splitlines()[0].removeprefix(NEXT)]


WHOLE = {
    "import apex\nif apex is not None:\n    x = apex.parallel.LARC": "apex",
    "import apex\nx = getattr(apex.optimizers, 'FusedAdam')": "apex.optimizers",
    "import apex.parallel as p\nx = p and p.LARC": "apex.parallel",
    "from apex import optimizers\nf(optimizers, o=optimizers.FusedSGD)": "apex.optimizers",
    "import apex.parallel as p\ndel p": "apex.parallel",
    "import apex.parallel as p\ndef f():\n    global p": "apex.parallel",
    "from apex.amp import frontend\nx = [frontend, frontend.initialize]": "apex.amp.frontend",
}


@pytest.mark.parametrize("source", WHOLE)
def test_module_that_is_used_as_a_value_stays_with_all_its_uses(source: str) -> None:
    found = migrate_source(f"{source}\n")
    assert found.source.splitlines()[1:] == source.splitlines()
    assert found.remarks[0].startswith(f"{WHOLE[source]} itself is used as a value")


def test_name_that_the_amp_of_a_migrated_script_lacks_is_marked() -> None:
    found = migrate_source("from apex import amp\namp.wrap.make_cast_wrapper(f)\n")
    assert found.remarks[0].startswith("apex.amp.wrap is not among the names")
    assert "half_function" in found.remarks[0]
    assert len(migrate_source("from apex import amp\namp.maybe_print(1)\n").remarks) == 1


@pytest.mark.parametrize(
    "line", ["if args.apex: pass", "f(apex=1)", "def apex(): pass", "class A:\n    apex = None"]
)
def test_same_word_that_is_no_use_of_the_module_keeps_nothing(line: str) -> None:
    found = migrate_source(f"import apex.parallel\nx = apex.parallel.LARC\n{line}\n")
    assert found.source == (
        f"import amp_patch.compat.larc\nx = amp_patch.compat.larc.LARC\n{line}\n"
    )


def test_script_that_reads_private_state_keeps_the_face() -> None:
    source = "from apex import amp\nassert hasattr(optimizer, '_amp_stash')\n"
    assert migrate_source(source).source == (
        f"{NEXT}the script uses _amp_stash, for which the face of apex is kept\n"
        "from amp_patch.compat import apex_amp as amp\n"
        "assert hasattr(optimizer, '_amp_stash')\n"
    )


def test_question_by_a_string_is_marked() -> None:
    source = 'import importlib.util\nhas_apex = importlib.util.find_spec("apex") is not None\n'
    found = migrate_source(source)
    assert found.source.splitlines()[1].startswith(f"{NEXT}asks for apex by a string")


@pytest.mark.parametrize(
    "statement",
    ["import amp_C", "from amp_C import multi_tensor_l2norm", "if x: import apex.mlp"],
)
def test_what_stays_has_one_comment_however_often_it_is_migrated(statement: str) -> None:
    once = migrate_source(f"{statement}\n")
    assert statement in once.source
    assert once.source.count(NEXT) == len(once.remarks) == 1
    assert migrate_source(once.source).source == once.source


def test_state_into_a_destination_keeps_the_face() -> None:
    source = "from apex import amp\nstate = amp.state_dict(destination=state)\n"
    assert "from amp_patch.compat import apex_amp as amp\n" in migrate_source(source).source


def test_names_of_the_user_are_left_alone() -> None:
    source = "apex = find_apex(mountain)\nprint(apex.amp, self.apex.amp)  # apex\n"
    assert migrate_source(source).source == source


def test_formatting_and_line_ends_stay() -> None:
    source = (
        "#!/usr/bin/env python\r\nx  =  {1 :2}\r\n\r\nfrom apex import amp # why\r\ny=[1,\r\n2]\r\n"
    )
    expected = source.replace("from apex import amp", "import amp_patch as amp")
    assert migrate_source(source.encode()).source == expected


@pytest.mark.parametrize("module", NAMES)
def test_every_name_has_a_place_after_the_migration(module: str) -> None:
    for name in NAMES[module]:
        for is_plain in (False, True):
            assert find_target(f"{module}.{name}", is_plain=is_plain) is not None


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    migrate_command.add_command(parser.add_subparsers(required=True))
    options = parser.parse_args(["migrate", *arguments])
    return int(options.run(options))


def test_folder_is_shown_and_then_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inner").mkdir()
    files = {"a.py": "from apex import amp\n", "inner/b.py": "x = 1\n", "c.txt": "import apex\n"}
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    assert command(str(tmp_path)) == 0
    shown = capsys.readouterr()
    assert "-from apex import amp\n+import amp_patch as amp\n" in shown.out
    assert "1 file(s) would change" in shown.err
    assert {name: (tmp_path / name).read_text() for name in files} == files
    assert command(str(tmp_path), "--write") == 0
    assert "1 file(s) changed" in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text() == "import amp_patch as amp\n"
    assert (tmp_path / "c.txt").read_text() == files["c.txt"]


def test_file_of_another_age_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("import apex\nprint 'python 2'\n")
    (tmp_path / "b.py").write_text("from apex import amp\n")
    assert command(str(tmp_path), "--write") == 1
    assert "a.py" in capsys.readouterr().err
    assert (tmp_path / "b.py").read_text() == "import amp_patch as amp\n"
    assert command(str(tmp_path / "none")) == 2


@pytest.mark.skipif(GIT is None, reason="git applies the difference")
@pytest.mark.parametrize(
    "source",
    [
        b"from apex import amp",
        b"x = 1\nfrom apex import amp\nprint(x)",
        b"from apex import amp\n\x0cx = '\xe2\x80\xa8'\n\x0c\ny = 2\n",
        b"from apex import amp\r\nx = 1\r\n",
    ],
    ids=["one line", "last line", "form feeds", "CRLF"],
)
def test_difference_is_a_patch_that_makes_what_write_makes(
    source: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("a.py")
    path.write_bytes(source)
    assert command("a.py") == 0
    patch = capsys.readouterr().out.encode()
    subprocess.run([str(GIT), "apply", "-"], input=patch, check=True)
    patched = path.read_bytes()
    path.write_bytes(source)
    assert command("a.py", "--write") == 0
    assert patched == path.read_bytes() != source


def test_notebook_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("from apex import amp\n")
    notebook = tmp_path / "b.ipynb"
    notebook.write_text(json.dumps({"cells": [{"source": ["from apex import amp"]}]}))
    (tmp_path / "c.ipynb").write_text(json.dumps({"cells": []}))
    for path in (tmp_path, notebook):
        assert command(str(path), "--write") == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert lines[0].startswith(f"migrate: {notebook}: notebooks are not migrated")
        assert "install_as_apex" in lines[0]
        assert lines[1].endswith("1 file(s) not migrated")
    assert (tmp_path / "a.py").read_text() == "import amp_patch as amp\n"


def test_missing_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert command(str(tmp_path)) == 2
    assert "amp_patch[migrate]" in capsys.readouterr().err
