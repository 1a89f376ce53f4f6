"""How the pictures look: few lines, and colours that the colour-blind can tell apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from amp_patch.errors import AmpError
from amp_patch.tools.extras import load_extra

# Okabe and Ito, "Color Universal Design": distinct in all common kinds of colour blindness.
BLACK, ORANGE, SKY = "#000000", "#E69F00", "#56B4E9"
GREEN, BLUE, VERMILION, PURPLE = "#009E73", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#6b6b6b"
COLOURS: Mapping[str, str] = MappingProxyType(
    {"O0": BLACK, "O1": BLUE, "O2": VERMILION, "O3": GREEN, "O4": SKY, "O5": PURPLE}
)
# Never by colour alone.
DASHES: Mapping[str, Any] = MappingProxyType(
    {"O0": "-", "O1": "--", "O2": "-.", "O3": ":", "O4": (0, (5, 1)), "O5": (0, (3, 1, 1, 1))}
)
_SPARE = (ORANGE, GREY, BLUE, PURPLE)
_KINDS = (".png", ".svg", ".pdf", ".eps", ".jpg", ".jpeg", ".ps", ".svgz", ".tif", ".tiff", ".webp")
_DPI = 100
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "svg.hashsalt": "amp_patch",
}


def colour_of(label: str, position: int) -> str:
    """The colour of a level, the same in every picture; a spare one for other variants."""
    return COLOURS.get(label, _SPARE[position % len(_SPARE)])


def dashes_of(label: str) -> Any:
    """The line style of a level, the same for its variants ("O2 keep_fp32=head")."""
    return DASHES.get(label.partition(" ")[0], "-")


def check_picture_name(file: str | Path) -> None:
    """Raise AmpError for a file whose name does not end as that of a picture."""
    if Path(file).suffix.lower() not in _KINDS:
        raise AmpError(
            f"expected the name of a picture, which ends in {', '.join(_KINDS[:3])} or the like, "
            f"found {str(file)!r}"
        )


@contextmanager
def ink() -> Iterator[None]:
    """Inside, what is drawn has the style of these pictures. matplotlib's own is put back."""
    matplotlib = load_extra("matplotlib", "plots")
    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(width: int, height: int, rows: int, columns: int, **options: Any) -> Any:
    """A figure of so many pixels, and its axes in a grid. Leaves matplotlib's globals alone."""
    figure_module = load_extra("matplotlib.figure", "plots")
    size = (width / _DPI, height / _DPI)
    figure = figure_module.Figure(figsize=size, dpi=_DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)
