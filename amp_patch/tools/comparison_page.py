"""Write a comparison as one HTML page that needs no other file and no script."""

from __future__ import annotations

import html
import io
from typing import Any

from amp_patch.tools.ink import ink
from amp_patch.tools.text_table import TextTable

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto;
       max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict { font-size: 1.15rem; border-left: 4px solid #0072B2; padding-left: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block;
        overflow-x: auto; }
th, td { text-align: right; padding: .25rem .75rem; vertical-align: bottom; }
td { vertical-align: top; } th { border-bottom: 1px solid #6b6b6b; font-weight: 600; }
th.left, td.left { text-align: left; } .note { color: #555; font-size: .9rem; }
svg { width: 100%; height: auto; }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Opt levels compared</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<h1>Opt levels compared</h1>
<p class="verdict">{verdict}</p>
{picture}
<h2>Figures</h2>
{table}
{notes}
<h2>Gradients beside those of O0, by layer</h2>
{gaps}
</body>
</html>
"""


def comparison_page(verdict: str, figure: Any, table: TextTable, gaps: TextTable) -> str:
    """The page as text, with `figure`, one of matplotlib, inside."""
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in table.notes)
    return _PAGE.format(
        style=_STYLE,
        verdict=html.escape(verdict),
        picture=inline_picture(figure, verdict),
        table=table.html(),
        notes=notes,
        gaps=gaps.html(),
    )


def inline_picture(figure: Any, label: str) -> str:
    """The picture as SVG, its letters as shapes: it looks the same with any fonts."""
    written = io.StringIO()
    with ink():
        figure.savefig(written, format="svg", metadata={"Date": None})
    svg = written.getvalue()
    start = svg.index("<svg")
    text = html.escape(label, quote=True)
    return svg[start:].replace("<svg", f'<svg role="img" aria-label="{text}"', 1)
