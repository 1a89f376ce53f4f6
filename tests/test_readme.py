"""Every Python block of README.md runs. The blocks of one section share their names, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

README = Path(__file__).parents[1] / "README.md"


class Block(NamedTuple):
    """One fenced block: the section it is in, what its fence says, its first line, its text."""

    section: str
    language: str
    line: int
    text: str


def _blocks(markdown: str) -> list[Block]:
    blocks, section, opened = [], "", None
    lines = markdown.splitlines()
    for number, line in enumerate(lines):
        if opened is None and (heading := re.match(r"##? (.+)", line)):
            section = heading[1].strip()
        elif line.startswith("```") and opened is None:
            opened = number
        elif line.rstrip() == "```" and opened is not None:
            text = "\n".join(lines[opened + 1 : number])
            blocks.append(Block(section, lines[opened][3:].strip(), opened + 2, text))
            opened = None
    assert opened is None, f"the block that line {(opened or 0) + 1} opens is never closed"
    return blocks


BLOCKS = _blocks(README.read_text("utf-8")) if README.is_file() else []
SECTIONS = list(dict.fromkeys(block.section for block in BLOCKS if block.language == "python"))


@pytest.mark.parametrize("section", SECTIONS)
def test_python_blocks_run(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what a block saves
    names: dict[str, object] = {"__name__": "readme"}
    for block in BLOCKS:
        if (block.section, block.language) == (section, "python"):
            # The empty lines make a traceback show the line of README.md.
            code = compile("\n" * (block.line - 1) + block.text, str(README), "exec")
            exec(code, names)  # noqa: S102 (to run them is the point)


def test_readme_has_blocks_of_python() -> None:
    assert SECTIONS, f"expected blocks of Python in {README}, found none"


def test_no_block_of_python_is_left_out() -> None:
    others = {block.language for block in BLOCKS} - {"python"}
    assert [name for name in others if name.lower().startswith("py")] == []


def test_blocks_are_found_with_their_section_and_line() -> None:
    markdown = "# Top\n```python\na = 1\n# no heading\n```\n## Next\n\n```sh\nls\n```\n"
    assert _blocks(markdown) == [
        Block("Top", "python", 3, "a = 1\n# no heading"),
        Block("Next", "sh", 9, "ls"),
    ]
