"""Pictures and pages: sizes, labels, colours, and the page as a real browser shows it."""

from __future__ import annotations

import math
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree as ET

import pytest
import torch
from networks import mlp
from torch import nn

import amp_patch as amp
from amp_patch.tools import extras, ink
from amp_patch.tools.cast_report import CastReport
from amp_patch.tools.comparison import Comparison
from amp_patch.tools.comparison_plot import comparison_figure
from amp_patch.tools.gradient_figures import (
    ExponentHistogram,
    GradientGap,
    RangeShare,
)
from amp_patch.tools.level_result import LevelResult
from amp_patch.tools.level_runs import Divergence, SeedRun
from amp_patch.tools.machine import Machine
from amp_patch.tools.record_casts import record_casts

pytest.importorskip("matplotlib", reason="the pictures need matplotlib, of the extra 'plots'")

STEPS = 100
WIDTH = 1200


def a_level(label: str, ratio: float, scale: float, *, diverges_at: int = STEPS) -> LevelResult:
    losses = [2.3 * math.exp(-step / 40) + 0.1 for step in range(min(diverges_at + 1, STEPS))]
    divergence = None
    if diverges_at < STEPS:
        losses[-1] = math.nan
        divergence = Divergence(diverges_at, "head.weight")
    skipped = (0, 1) if scale > 1 else ()
    scales = [scale * 4 / 2 ** min(step, 2) if scale > 1 else 1.0 for step in range(len(losses))]
    run = SeedRun(0, tuple(losses), tuple(scales), skipped, divergence)
    gaps = (GradientGap("body.0", 0.9999, 0.001), GradientGap("head", 0.97, 0.2))
    return LevelResult(
        label, (run,), "", 0.01 * ratio, ratio, int(2**22 * ratio), {"start": gaps, "end": gaps},
        RangeShare(1.0, 0.02, 0.0), RangeShare(scale, 0.0, 0.0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    levels = (
        a_level("O0", 1.0, 1.0),
        a_level("O1", 0.7, 2.0**14),
        a_level("O2", 0.55, 2.0**15),
        a_level("O3", 0.5, 1.0, diverges_at=31),
        a_level("O4", 0.72, 1.0),
        LevelResult("O5", failure="RuntimeError: no kernel for <this>"),
    )
    counts = [int(1000 * math.exp(-(((i - 50) / 6) ** 2))) for i in range(97)]
    exponents = ExponentHistogram(-64, tuple(counts))
    return Comparison(levels, STEPS, 1, (0.3, 0.32, 0.29), exponents, Machine("2.13", "a cpu", 2))


@pytest.fixture
def report() -> CastReport:
    model = amp.initialize(nn.Sequential(mlp(), nn.LayerNorm(3)), opt_level="O1", verbosity=0)
    with record_casts() as report:
        model(torch.randn(4, 6)).sum().backward()
    return report


def png_size(file: Path) -> tuple[int, int]:
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


class TestPictures:
    def test_comparison_is_1200_pixels_wide(self, comparison: Comparison, tmp_path: Path) -> None:
        comparison.plot(tmp_path / "compare.png")
        width, height = png_size(tmp_path / "compare.png")
        assert width == WIDTH
        assert 600 <= height <= 1200

    def test_casts_are_1200_pixels_wide(self, report: CastReport, tmp_path: Path) -> None:
        report.plot(tmp_path / "casts.png")
        assert png_size(tmp_path / "casts.png")[0] == WIDTH

    @pytest.mark.parametrize("name", ["found.txt", "found", "found.xlsx"])
    def test_file_of_another_kind_is_refused(
        self, comparison: Comparison, tmp_path: Path, name: str
    ) -> None:
        for found in (comparison, CastReport()):
            with pytest.raises(amp.AmpError, match=r"^expected the name of a picture"):
                found.plot(tmp_path / name)
        assert not list(tmp_path.iterdir())

    def test_empty_report_can_be_drawn(self, tmp_path: Path) -> None:
        CastReport().plot(tmp_path / "casts.png")
        assert png_size(tmp_path / "casts.png")[0] == WIDTH

    def test_every_axis_says_what_it_shows(self, comparison: Comparison) -> None:
        figure = comparison_figure(comparison.levels, comparison.exponents)
        assert len(figure.axes) == 4
        for axes in figure.axes:
            assert axes.get_title(loc="left")
            assert axes.get_xlabel()
        assert figure.axes[3].get_ylabel() == "share of values, %"

    def test_letters_are_large_enough_to_read(self, comparison: Comparison) -> None:
        import matplotlib.text

        figure = comparison_figure(comparison.levels, comparison.exponents)
        texts = [one for one in figure.findobj(matplotlib.text.Text) if one.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 7.5  # exponents of ticks are smallest
        plain = [text for text in texts if "mathdefault" not in text.get_text()]
        assert min(text.get_fontsize() for text in plain) >= 9

    def test_long_labels_leave_room_for_the_pictures(self, comparison: Comparison) -> None:
        labels = [f"O2 keep_fp32=['decoder.{i}', '$head$'] loss_scale=128.0" for i in range(5)]
        levels = [comparison.levels[0], *(a_level(label, 0.5, 128.0) for label in labels)]
        figure = comparison_figure(levels, comparison.exponents)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        for box in (legend.get_window_extent(), *(one.get_tightbbox() for one in figure.axes)):
            assert 0 <= box.x0 < box.x1 <= WIDTH
        assert min(axes.get_window_extent().width for axes in figure.axes) > WIDTH / 3
        shown = ["".join(one.get_text().split()) for one in legend.get_texts()]
        assert shown == ["O0", *("".join(one.replace("$", r"\$").split()) for one in labels)]

    @pytest.mark.parametrize("step", [0, 1, 31])
    def test_every_level_that_diverges_has_a_mark_and_a_name(
        self, comparison: Comparison, step: int
    ) -> None:
        ends = [a_level(label, 0.5, 1.0, diverges_at=step) for label in ("O1", "O2", "O3")]
        figure = comparison_figure([comparison.levels[0], *ends], comparison.exponents)
        marks = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
        assert [line.get_color() for line in marks] == [ink.COLOURS[one.label] for one in ends]
        assert all(len(line.get_xdata()) == 1 for line in marks)
        named = [one.get_text() for one in figure.legends[0].get_texts()]
        assert named == ["O0", *(f"{one.label}\ndiverges at step {step}" for one in ends)]
        if step == 0:  # no loss says where: they are told apart by their height
            assert len({float(line.get_ydata()[0]) for line in marks}) == len(marks)

    def test_style_of_the_users_own_pictures_is_left_alone(self, comparison: Comparison) -> None:
        import matplotlib as mpl

        before = dict(mpl.rcParams)
        comparison_figure(comparison.levels, comparison.exponents)
        assert dict(mpl.rcParams) == before

    def test_same_data_gives_the_same_svg(self, comparison: Comparison, tmp_path: Path) -> None:
        for name in ("a.html", "b.html"):
            comparison.to_html(tmp_path / name)
        assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()

    def test_without_matplotlib_the_error_names_the_extra(
        self, comparison: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def missing(module: str) -> Any:
            raise ModuleNotFoundError(name=module.partition(".")[0])

        monkeypatch.setattr(extras.importlib, "import_module", missing)
        with pytest.raises(amp.AmpError, match=r'pip install "amp_patch\[plots\]"'):
            comparison.plot(tmp_path / "compare.png")


class TestColours:
    """Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009: severity 1.0, for linear RGB."""

    SIGHT: ClassVar[dict[str, list[list[float]]]] = {
        "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        "protanopia": [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
        "deuteranopia": [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ],
        "tritanopia": [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ],
    }

    @staticmethod
    def linear(colour: str) -> list[float]:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]

    @staticmethod
    def lab(rgb: list[float]) -> list[float]:
        to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
        white = (0.9505, 1.0, 1.089)
        xyz = [sum(a * b for a, b in zip(row, rgb, strict=True)) for row in to_xyz]
        f = [
            max(one / w, 0.0) ** (1 / 3) if one / w > 0.008856 else 7.787 * one / w + 16 / 116
            for one, w in zip(xyz, white, strict=True)
        ]
        return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]

    @pytest.mark.parametrize("sight", SIGHT)
    def test_levels_and_bars_can_be_told_apart(self, sight: str) -> None:
        matrix = self.SIGHT[sight]
        seen = {}
        for name, colour in ink.COLOURS.items():
            rgb = self.linear(colour)
            seen[name] = self.lab([sum(a * b for a, b in zip(m, rgb, strict=True)) for m in matrix])
        for first, second in combinations(seen, 2):
            # A difference of 2.3 in CIELAB is just noticeable; lines differ in their dashes too.
            assert math.dist(seen[first], seen[second]) > 10, (first, second)
        dashes = [str(ink.dashes_of(level)) for level in amp.OPT_LEVELS]
        assert len(set(dashes)) == len(dashes)


class Markup(HTMLParser):
    """What is wrong with a page: tags that do not match, names used twice, links that lead off."""

    VOID = frozenset({"br", "link", "meta"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.faults: list[str] = []
        self._open: list[str] = []
        self._ids: list[str] = []
        self._used: list[str] = re.findall(r"url\((.*?)\)", page)
        self.feed(page)
        self.close()
        self.faults += [f"{tag} is never closed" for tag in self._open]
        self.faults += [f"id {one} twice" for one, count in Counter(self._ids).items() if count > 1]
        known = {"data:,", *(f"#{one}" for one in self._ids)}
        self.faults += [f"leads to {one}" for one in self._used if one not in known]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self._ids += [value for name, value in attrs if name == "id"]
        self._used += [value for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"/{tag} closes something else")


class TestPage:
    def test_it_is_well_formed(self, comparison: Comparison, tmp_path: Path) -> None:
        comparison.to_html(tmp_path / "compare.html")
        page = (tmp_path / "compare.html").read_text("utf-8")
        assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
        assert '<meta charset="utf-8">' in page
        assert Markup(page).faults == []
        picture = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
        root = ET.fromstring(picture)  # noqa: S314 (made here): it raises for bad XML
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("aria-label") == comparison.verdict
        assert page.count("<svg") == 1

    def test_what_is_not_well_formed_would_be_seen(self) -> None:
        assert Markup("<p><b>x</p>").faults == ["/p closes something else", "p is never closed"]
        assert Markup('<i id="a"></i><i id="a"></i>').faults == ["id a twice"]
        assert Markup('<a href="https://x"></a>').faults == ["leads to https://x"]
        assert Markup('<p style="fill: url(#b)"></p>').faults == ["leads to #b"]

    def test_it_needs_no_other_file(self, comparison: Comparison, tmp_path: Path) -> None:
        comparison.to_html(tmp_path / "compare.html")
        page = (tmp_path / "compare.html").read_text()
        assert "<svg" in page
        assert "<script" not in page
        for source in ('src="http', 'href="http', "url(http", "@import"):
            assert source not in page.replace('xlink:href="#', "")
        assert "no kernel for &lt;this&gt;" in page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there is no chromium with its chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={WIDTH},1600")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield opened
    opened.quit()


class TestBrowser:
    def test_page_opens_without_errors(
        self, browser: Any, comparison: Comparison, tmp_path: Path
    ) -> None:
        file = tmp_path / "compare.html"
        comparison.to_html(file)
        browser.get(file.as_uri())
        assert browser.get_log("browser") == []
        requests = [entry["message"] for entry in browser.get_log("performance")]
        urls = [text for text in requests if '"Network.requestWillBeSent"' in text]
        assert all("file://" in url or "data:" in url for url in urls)
        assert browser.title == "Opt levels compared"

    def test_page_shows_verdict_picture_and_tables(
        self, browser: Any, comparison: Comparison, tmp_path: Path
    ) -> None:
        file = tmp_path / "compare.html"
        comparison.to_html(file)
        browser.get(file.as_uri())
        (verdict,) = browser.find_elements("class name", "verdict")
        assert verdict.text == comparison.verdict
        (picture,) = browser.find_elements("tag name", "svg")
        assert picture.size["width"] > 0.9 * WIDTH - 100
        figures, gaps = browser.find_elements("tag name", "table")
        rows = figures.find_elements("css selector", "tbody tr")
        assert [row.text.split()[0] for row in rows] == ["O0", "O1", "O2", "O3", "O4", "O5"]
        assert "head" in gaps.text
        # Nothing is wider than the window.
        assert browser.execute_script("return document.body.scrollWidth <= window.innerWidth")

    def test_an_error_on_a_page_would_be_seen(self, browser: Any, tmp_path: Path) -> None:
        file = tmp_path / "broken.html"
        file.write_text("<!DOCTYPE html><script>nowhere.to.be.found()</script>")
        browser.get(file.as_uri())
        assert any("nowhere" in entry["message"] for entry in browser.get_log("browser"))
