"""The comparison in the README: its table, verdict and picture are those of one stored run."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_patch.tools.compare import compare
from amp_patch.tools.text_table import bytes_text, seconds_text, share_text
from amp_patch.tools.verdict import Standing, verdict

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "which_level.json"
PICTURE = ROOT / "benchmarks" / "which_level.png"
LARGEST_PICTURE = 200_000  # bytes: the picture is read with every clone


@pytest.fixture(scope="module")
def text() -> str:
    return FIGURES.read_text("utf-8").removesuffix("\n")


@pytest.fixture(scope="module")
def figures(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def section() -> str:
    readme = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"^## Which level\?\n(.*?)(?=^## )", readme, re.MULTILINE | re.DOTALL)
    assert found, "README.md has no section 'Which level?'"
    return found[1]


def test_picture_was_drawn_from_these_figures(text: str) -> None:
    data = PICTURE.read_bytes()
    assert len(data) < LARGEST_PICTURE
    place = data.index(b"tEXtFigures\x00") - 4
    length = int.from_bytes(data[place : place + 4], "big")
    chunk = data[place + 4 : place + 8 + length]
    assert zlib.crc32(chunk) == int.from_bytes(
        data[place + 8 + length : place + 12 + length], "big"
    )
    assert chunk.partition(b"\x00")[2].decode() == hashlib.sha256(text.encode()).hexdigest()


def test_figures_are_those_that_a_comparison_gives_today(figures: dict[str, Any]) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    batches = [(torch.ones(1, 2), torch.ones(1, 1))]
    today = compare(build, batches, ["O0", "O4"], 2, turns=1, steps_a_turn=1).to_dict()
    assert figures.keys() == today.keys()
    assert figures["levels"][1].keys() == today["levels"][1].keys()


def test_verdict_is_what_the_code_says_of_these_figures(figures: dict[str, Any]) -> None:
    rows = [
        Standing(level["label"], level["step_ratio"], level["distance"])
        for level in figures["levels"]
    ]
    assert verdict(rows, figures["spread"]) == figures["verdict"]


def test_readme_shows_the_verdict_the_table_and_the_picture(
    figures: dict[str, Any], section: str
) -> None:
    words = " ".join(section.split())
    assert figures["verdict"] in words
    assert "](benchmarks/which_level.png)" in section
    rows = [line.split() for line in section.splitlines()]
    for level in figures["levels"]:
        expected = [
            level["label"],
            *seconds_text(level["step_seconds"]).split(),
            f"{level['step_ratio']:.2f}",
            *bytes_text(level["peak_bytes"]).split(),
            f"{level['final_loss']:.4g}",
            f"{level['distance']:+.2g}",
            f"{level['lowest_cosine']:.4f}",
            str(level["skipped_steps"]),
            f"{level['runs'][0]['scales'][-1]:g}",
        ]
        for name in ("range_at_one", "range_at_scale"):
            lost = level[name]["flushed"] + level[name]["overflowed"]
            expected += share_text(lost).split()
        assert expected in rows, level["label"]
