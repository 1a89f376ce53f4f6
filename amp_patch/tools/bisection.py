"""Find a smallest set of things that is enough, by trying as few sets as possible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

Thing = TypeVar("Thing")


def smallest_subset(
    things: Sequence[Thing], is_enough: Callable[[list[Thing]], bool]
) -> list[Thing]:
    """A subset that is enough and of which nothing can be left out, in the order of `things`.

    All of `things` must be enough, and no more than that is assumed. Where one thing suffices it is
    found in about `2 * log2(n)` trials (Zeller and Hildebrandt, "Simplifying and Isolating
    Failure-Inducing Input", IEEE TSE 28, 2002: delta debugging).

        >>> smallest_subset(range(100), lambda found: {17, 40} <= set(found))
        [17, 40]
    """
    kept = list(things)
    pieces = 2
    while len(kept) > 1:
        parts = _split(kept, pieces)
        smaller = next((part for part in parts if is_enough(part)), None)
        if smaller is not None:
            kept, pieces = smaller, 2
            continue
        rests = [[one for other in parts if other is not part for one in other] for part in parts]
        smaller = next((rest for rest in rests if is_enough(rest)), None) if pieces > 2 else None
        if smaller is not None:
            kept, pieces = smaller, max(pieces - 1, 2)
        elif pieces >= len(kept):
            break
        else:
            pieces = min(2 * pieces, len(kept))
    return kept


def _split(things: list[Thing], pieces: int) -> list[list[Thing]]:
    """`pieces` parts of about the same length."""
    ends = [round(i * len(things) / pieces) for i in range(pieces + 1)]
    return [things[start:end] for start, end in itertools.pairwise(ends) if start < end]
