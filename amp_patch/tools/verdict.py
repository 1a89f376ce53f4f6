"""Put the figures of a comparison into two sentences, of which each follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SAME_TIME = 0.05  # ratios this near to 1 are called about as fast: timings scatter by as much


@dataclass(frozen=True)
class Standing:
    """How one level did. `trouble` says in what way it does not train at all, "" if it does."""

    label: str
    step_ratio: float | None  # time of a step by that of O0
    distance: float  # final loss minus O0's
    trouble: str = ""
    skips_all: bool = False


def verdict(standings: Sequence[Standing], spread: float) -> str:
    """One sentence on the best of the levels, and one on the rest. The first is the baseline.

    A level is sound if its final loss is no higher than the baseline's by more than `spread`, the
    distance between the baseline's own final losses over its seeds. A spread of 0 is none: the
    seeds made no difference, so that nothing says how far losses lie apart by chance.
    """
    baseline, *others = standings
    if baseline.trouble:
        return (
            f"{baseline.label} itself {baseline.trouble}, so there is nothing to compare with. "
            "Mend the training in FP32 first."
        )
    if not others:
        return f"Only {baseline.label} was run. Add levels to compare it with."
    sound = [one for one in others if _fault(one, spread) == ""]
    best = min(sound, key=_ratio, default=None)
    if best is None:
        first = f"No other level trains as {baseline.label} does"
        return f"{first}. {_on_the_faulty(others, spread)}."
    is_fastest = all(_ratio(one) >= 1 for one in others)
    rest = [one for one in others if one is not best]
    first = f"{_on_the_speed(best, baseline.label, is_fastest)}, and its loss "
    first += _on_the_loss(best, baseline.label, spread)
    return f"{first}. {_on_the_rest(rest, spread, is_best_inside=_is_inside(best, spread))}"


def _ratio(standing: Standing) -> float:
    return math.inf if standing.step_ratio is None else standing.step_ratio


def _is_inside(standing: Standing, spread: float) -> bool:
    return abs(standing.distance) <= spread


def _is_slow(standing: Standing) -> bool:
    return standing.step_ratio is not None and standing.step_ratio > 1 + SAME_TIME


def _on_the_speed(best: Standing, baseline: str, is_fastest: bool) -> str:
    ratio = best.step_ratio
    if ratio is None:
        return f"{best.label} trains"
    if abs(ratio - 1) <= SAME_TIME:
        return f"{best.label} is about as fast as {baseline}"
    if ratio < 1:
        return f"{best.label} is {1 / ratio:.1f} times faster than {baseline}"
    which = "No level" if is_fastest else f"No level that trains as {baseline} does"
    fastest = f"the fastest{'' if is_fastest else ' of those'}, {best.label}"
    return f"{which} is faster than {baseline} here: {fastest}, takes {ratio:.1f} times as long"


def _on_the_loss(best: Standing, baseline: str, spread: float) -> str:
    if _is_inside(best, spread):
        return f"stays inside {baseline}'s spread" if spread else f"is {baseline}'s"
    if spread:
        return f"{_ends(best)}, beyond {baseline}'s spread of {spread:.2g}"
    return f"{_ends(best)} ({baseline} ends alike from all seeds: nothing says what chance does)"


def _on_the_rest(rest: Sequence[Standing], spread: float, *, is_best_inside: bool) -> str:
    """First those that do as the best does, then others, then those that are not sound."""
    if not rest:
        return "No other level was run."
    sound = [one for one in rest if not _fault(one, spread)]
    inside = [one for one in sound if _is_inside(one, spread)]
    fast = [one.label for one in inside if not _is_slow(one)]
    slow = [one for one in inside if _is_slow(one)]
    what = "stay inside it" if spread else "end as it does"
    clauses = []
    if fast:
        clauses.append(f"{_listed(fast)} {_verb(what, fast)}{' too' if is_best_inside else ''}")
    if slow:
        names = [one.label for one in slow]
        verb = _verb("do too" if fast or is_best_inside else what, names)
        clauses.append(f"{_listed(names)} {verb}, but {_verb('take', names)} {_times(slow)}")
    for one in sound:
        if one not in inside:
            takes = f", but takes {_times([one])}" if _is_slow(one) else ""
            clauses.append(f"{one.label} {_ends(one)}{takes}")
    faulty = [one for one in rest if one not in sound]
    return "; ".join([*clauses, *([_on_the_faulty(faulty, spread)] if faulty else [])]) + "."


def _on_the_faulty(faulty: Sequence[Standing], spread: float) -> str:
    return "; ".join(f"{one.label} {_fault(one, spread)}" for one in faulty)


def _ends(standing: Standing) -> str:
    side = "higher" if standing.distance > 0 else "lower"
    return f"ends {abs(standing.distance):.2g} {side}"


def _times(slow: Sequence[Standing]) -> str:
    return f"{'up to ' if len(slow) > 1 else ''}{max(map(_ratio, slow)):.1f} times as long"


def _verb(words: str, subjects: Sequence[str]) -> str:
    verb, _, more = words.partition(" ")
    one = {"do": "does"}.get(verb, f"{verb}s")
    return f"{verb if len(subjects) > 1 else one} {more}".rstrip()


def _fault(standing: Standing, spread: float) -> str:
    if standing.trouble:
        return standing.trouble
    if standing.skips_all:
        return "skips every step"
    if math.isnan(standing.distance):
        return "has no final loss"
    if standing.distance > spread > 0:
        return f"ends with a loss {standing.distance:.2g} higher, beyond the spread of {spread:.2g}"
    return ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
