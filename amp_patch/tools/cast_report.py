"""What a recording of casts holds: as a table sorted by cost, plain data, advice and a picture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amp_patch.tools.ink import BLUE, ORANGE, check_picture_name, ink, new_figure
from amp_patch.tools.plain_data import plain_data
from amp_patch.tools.text_table import TextTable, bytes_text

_HEADINGS = ("operation", "where", "module", "rule", "ran in", "calls", "casts", "saved", "moved")
_SHOWN = 30
_BARS = 15
_SIZES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}
SHORT = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


class Place(NamedTuple):
    """One operation at one line of code in one module, and the rule that decides about it."""

    operation: str
    site: str
    module: str
    rule: str

    @property
    def function(self) -> str:
        """The operation as `resolve_rules` takes it: "torch.nn.functional.linear"."""
        prefix = "torch.nn.functional." if self.operation.startswith("F.") else "torch."
        return prefix + self.operation.removeprefix("F.")


@dataclass
class CastRecord:
    """What was counted at one place.

    Bytes are those read and those written by casts. A cast in the forward pass has its mirror image
    in the backward pass, which is counted when it runs.
    """

    place: Place
    calls: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    casts: int = 0
    backward_casts: int = 0
    saved: int = 0  # casts that the cache made unnecessary
    cast_bytes: int = 0
    backward_bytes: int = 0
    sizes: set[tuple[int, ...]] = field(default_factory=set)  # of matrix products: m, k, n
    round_trips: int = 0  # results that were cast straight back
    largest: float = 0.0  # magnitude among its arguments and results, where it is an FP32 island
    repeated: dict[str, int] = field(default_factory=dict)  # weights, and casts that were needless

    @property
    def moved(self) -> int:
        """All bytes that its casts read and wrote."""
        return self.cast_bytes + self.backward_bytes

    def to_dict(self) -> dict[str, Any]:
        """All that was counted, as plain data."""
        return {
            **self.place._asdict(),
            "dtypes": dict(self.dtypes),
            "calls": self.calls,
            "casts": self.casts,
            "backward_casts": self.backward_casts,
            "saved": self.saved,
            "cast_bytes": self.cast_bytes,
            "backward_bytes": self.backward_bytes,
            "sizes": [list(size) for size in sorted(self.sizes)],
            "round_trips": self.round_trips,
            "largest": plain_data(self.largest),
            "repeated": dict(self.repeated),
        }


class CastReport:
    """The records of one recording, filled while it runs. `print` it to read them."""

    def __init__(self) -> None:
        self._records: dict[Place, CastRecord] = {}

    @property
    def records(self) -> list[CastRecord]:
        """The records, those whose casts moved the most bytes first."""
        found = self._records.values()
        return sorted(found, key=lambda one: (-one.moved, -one.casts, -one.calls, one.place))

    @property
    def advice(self) -> list[str]:
        """What follows from the records, a sentence or two each."""
        return [text for record in self.records for text in advice_on(record)]

    def at(self, place: Place) -> CastRecord:
        """The record of a place, made when it is first asked for."""
        return self._records.setdefault(place, CastRecord(place))

    def total(self, name: str) -> int:
        """The sum over all records of one of their counts, as "casts"."""
        return sum(getattr(record, name) for record in self._records.values())

    def __str__(self) -> str:
        lines = [str(self.table())]
        advice = self.advice
        if advice:
            lines += ["", "Advice:", *(f"- {text}" for text in advice)]
        return "\n".join(lines)

    def table(self, limit: int = _SHOWN) -> TextTable:
        """The records with the highest cost."""
        records = self.records
        rows = tuple(_row(record) for record in records[:limit])
        left_out = f" {len(records) - limit} places are not shown." if len(records) > limit else ""
        note = (
            f"{self.total('calls')} calls, {self.total('casts')} casts and "
            f"{self.total('backward_casts')} in backward, {self.total('saved')} saved by the cache,"
            f" {bytes_text(self.total('moved'))} moved.{left_out}"
        )
        return TextTable(_HEADINGS, rows, left=frozenset({0, 1, 2, 3, 4}), notes=(note,))

    def to_dict(self) -> dict[str, Any]:
        """Records, totals and advice as plain data."""
        names = ("calls", "casts", "backward_casts", "saved", "cast_bytes", "backward_bytes")
        return {
            "records": [record.to_dict() for record in self.records],
            "totals": {name: self.total(name) for name in names},
            "advice": self.advice,
        }

    def plot(self, file: str | Path) -> None:
        """Write a picture: a bar for each of the places whose casts move the most bytes.

        Raises AmpError for a name that is not that of a picture (PNG, SVG, PDF), and where
        matplotlib, of the extra "plots", is not installed.
        """
        check_picture_name(file)
        records = [record for record in self.records if record.moved][:_BARS]
        divisor, unit = _unit(max((record.moved for record in records), default=0))
        forward = [record.cast_bytes / divisor for record in records]
        backward = [record.backward_bytes / divisor for record in records]
        with ink():
            figure, grid = new_figure(1200, 140 + 38 * max(len(records), 3), 1, 1)
            axes = grid[0, 0]
            rows = list(range(len(records)))
            axes.barh(rows, forward, 0.7, color=BLUE, label="forward")
            bars = axes.barh(rows, backward, 0.7, left=forward, color=ORANGE, label="backward")
            labels = [_counts(record) for record in records]
            axes.bar_label(bars, labels, padding=4, fontsize=10)
            axes.set_yticks(rows, [_name(record.place) for record in records])
            axes.invert_yaxis()
            axes.margins(x=0.2)
            axes.set(title="What casts cost", xlabel=f"bytes read and written by casts, {unit}")
            axes.legend(loc="lower right")
            figure.savefig(file)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def advice_on(record: CastRecord) -> list[str]:
    """What follows from one record."""
    place = record.place
    where = f"{place.operation} in {place.module or 'no module'} ({place.site})"
    found = []
    ran_in_half = any(name in ("float16", "bfloat16") for name in record.dtypes)
    odd = sorted(size for size in record.sizes if any(one % 8 for one in size))
    if odd and ran_in_half:
        shown = ", ".join(" x ".join(map(str, size)) for size in odd[:3])
        padded = " x ".join(str(-(-one // 8) * 8) for one in odd[0])
        found.append(
            f"{where}: sizes {shown} are no multiples of 8, which matrix units of GPUs want for "
            f"half operands; pad to {padded}."
        )
    if record.round_trips:
        found.append(
            f"{where}: {record.round_trips} result(s) were cast up and straight back, "
            f"{bytes_text(record.moved)} for the casts."
        )
        if 0 < record.largest < torch.finfo(torch.float16).max / 4:
            found.append(
                f"{where}: an FP32 island that may cost more than it protects: the largest value "
                f"it saw is {record.largest:.3g}, and float16 holds 65504. Try it in half."
            )
    for name, count in record.repeated.items():
        found.append(
            f"{where}: the weight {name} was cast {count} times more than it changed; use "
            "amp.keep_casts() for inference, or the weight itself, not a view, in training."
        )
    return found


def _row(record: CastRecord) -> tuple[str, ...]:
    place = record.place
    dtypes = " ".join(record.dtypes)
    casts = str(record.casts)
    if record.backward_casts:
        casts += f"+{record.backward_casts}"
    return (
        place.operation,
        place.site,
        place.module,
        place.rule,
        dtypes,
        str(record.calls),
        casts,
        str(record.saved),
        bytes_text(record.moved),
    )


def _name(place: Place) -> str:
    return f"{place.operation}, {place.module or place.site}"


def _counts(record: CastRecord) -> str:
    return f"{record.casts + record.backward_casts} casts in {record.calls} calls"


def _unit(largest: int) -> tuple[int, str]:
    for divisor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= divisor:
            return divisor, unit
    return 1, "B"
