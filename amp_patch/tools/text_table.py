"""A table for the terminal: through rich where that is installed, else in plain text."""

from __future__ import annotations

import html
import io
import itertools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from amp_patch.tools.extras import find_extra

_GAP = "  "
_MIN_WIDTH = 60


@dataclass(frozen=True)
class TextTable:
    """Rows under headings. `str()` gives text without colours; `rich.print` shows it as well.

    Columns whose number is in `left` stand to the left, as words do; the others to the right, as
    numbers do. A heading may have several lines. `notes` are sentences below the table.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})
    title: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        console = find_extra("rich.console")
        return self.plain() if console is None else self._through_rich(console)

    def __rich__(self) -> Any:
        """What rich shows: its own table, with the notes below it."""
        table = find_extra("rich.table")
        box = find_extra("rich.box")
        text = find_extra("rich.text")
        if table is None or box is None or text is None:  # whoever calls this has rich
            return self.plain()
        made = table.Table(
            title=text.Text(self.title) if self.title else None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
            collapse_padding=True,
            caption=text.Text("\n".join(self.notes)) if self.notes else None,
            caption_justify="left",
            caption_style="",
        )
        for i, heading in enumerate(self.headings):
            side = "left" if i in self.left else "right"
            made.add_column(text.Text(heading), justify=side, overflow="fold")
        for row in self.rows:
            made.add_row(*(text.Text(cell) for cell in row))
        return made

    def plain(self) -> str:
        """The table in plain text, as wide as it needs."""
        heads = [heading.split("\n") for heading in self.headings]
        height = max(map(len, heads))
        above = [
            tuple(head[i - height + len(head)] if i >= height - len(head) else "" for head in heads)
            for i in range(height)
        ]
        lines = [*above, *self.rows]
        widths = [
            max(len(part) for line in lines for part in line[i].split("\n"))
            for i in range(len(self.headings))
        ]
        text = [row for line in lines for row in self._lines(line, widths)]
        rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
        text.insert(height, rule)
        if self.title:
            text.insert(0, self.title)
        wrapped = [textwrap.fill(note, max(len(rule), _MIN_WIDTH)) for note in self.notes]
        return "\n".join([*text, *([""] if wrapped else []), *wrapped])

    def html(self) -> str:
        """The table as an HTML element, without the notes."""
        heads = self._html_row("th", self.headings)
        rows = "".join(self._html_row("td", row) for row in self.rows)
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead>{heads}</thead><tbody>{rows}</tbody></table>"

    def _html_row(self, tag: str, cells: Sequence[str]) -> str:
        parts = [_html_cell(tag, i in self.left, cell) for i, cell in enumerate(cells)]
        return f"<tr>{''.join(parts)}</tr>"

    def _lines(self, cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        for parts in itertools.zip_longest(*(cell.split("\n") for cell in cells), fillvalue=""):
            padded = [
                part.ljust(width) if i in self.left else part.rjust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            ]
            yield _GAP.join(padded).rstrip()

    def _through_rich(self, console: Any) -> str:
        needed = max(map(len, TextTable(self.headings, self.rows).plain().splitlines()))
        needed += 2 * len(self.headings)
        width = max(shutil.get_terminal_size((100, 24)).columns, needed, _MIN_WIDTH)
        written = io.StringIO()
        console.Console(file=written, width=width, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _html_cell(tag: str, is_left: bool, text: str) -> str:
    side = ' class="left"' if is_left else ""
    return f"<{tag}{side}>{html.escape(text).replace(chr(10), '<br>')}</{tag}>"


def bytes_text(count: float | None) -> str:
    """A number of bytes with the unit that a reader wants: "1.2 MiB"; "-" for None."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds_text(seconds: float | None) -> str:
    """A duration in milliseconds with three digits; "-" for None."""
    return "-" if seconds is None else f"{seconds * 1e3:.3g} ms"


def share_text(share: float | None) -> str:
    """A share in percent, "<0.01 %" rather than a zero that is none; "-" for None."""
    if share is None:
        return "-"
    if 0 < share < 1e-4:
        return "<0.01 %"
    return f"{share * 100:.2f} %" if share else "0 %"
