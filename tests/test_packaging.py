"""What is installed: the metadata, the marker of the annotations, and what an import costs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata, resources

import pytest

import amp_patch as amp

OPTIONAL = ("libcst", "matplotlib", "rich", "sklearn")
IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import amp_patch
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def test_version_of_the_metadata_is_that_of_the_package() -> None:
    assert metadata.version("amp_patch") == amp.__version__


def test_extras_are_declared() -> None:
    extras = metadata.metadata("amp_patch").get_all("Provides-Extra") or []
    assert sorted(extras) == ["demo", "migrate", "plots", "test"]


def test_plain_install_needs_torch_and_wrapt_only() -> None:
    required = metadata.requires("amp_patch") or []
    names = [line.split(">=")[0] for line in required if "extra ==" not in line]
    assert sorted(names) == ["torch", "wrapt"]


def test_metadata_says_license_and_python() -> None:
    found = metadata.metadata("amp_patch")
    assert found["License-Expression"] == "BSD-3-Clause"
    assert found["Requires-Python"] == ">=3.10"


def test_annotations_are_shipped() -> None:
    assert (resources.files(amp) / "py.typed").is_file()


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    """What `import amp_patch` adds to a process that has imported torch."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", IMPORT],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return dict(json.loads(done.stdout))


def test_import_brings_no_optional_package(imported: dict[str, object]) -> None:
    print(f"import amp_patch: {imported['seconds']:.3f} s")  # shown by pytest -rP
    modules = imported["modules"]
    assert isinstance(modules, list)
    assert [name for name in modules if name.split(".")[0] in OPTIONAL] == []


def test_import_changes_nothing_in_torch() -> None:
    before = "import torch, torch.nn.functional as F; old = F.linear, torch.matmul"
    after = "assert (F.linear, torch.matmul) == old and 'matmul' not in vars(torch.Tensor)"
    subprocess.run([sys.executable, "-c", f"{before}; import amp_patch; {after}"], check=True)
