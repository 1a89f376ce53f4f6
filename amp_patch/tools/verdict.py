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
    distance between the baseline's own final losses over its seeds.
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
        return f"{first}. {_on_the_rest(others, spread)}"
    rest = [one for one in others if one is not best]
    return f"{_on_the_best(best, baseline.label, spread)}. {_on_the_rest(rest, spread)}"


def _ratio(standing: Standing) -> float:
    return math.inf if standing.step_ratio is None else standing.step_ratio


def _on_the_best(best: Standing, baseline: str, spread: float) -> str:
    ratio = best.step_ratio
    if ratio is None:
        speed = f"{best.label} trains"
    elif abs(ratio - 1) <= SAME_TIME:
        speed = f"{best.label} is about as fast as {baseline}"
    elif ratio < 1:
        speed = f"{best.label} is {1 / ratio:.1f} times faster than {baseline}"
    else:
        speed = (
            f"No level is faster than {baseline} here: the fastest, {best.label}, takes {ratio:.1f}"
            " times as long"
        )
    if best.distance < -spread:
        lower = f"its loss ends {-best.distance:.2g} lower"
        return f"{speed}, and {lower}, beyond {baseline}'s spread of {spread:.2g}"
    return f"{speed}, and its loss stays inside {baseline}'s spread"


def _on_the_rest(rest: Sequence[Standing], spread: float) -> str:
    if not rest:
        return "No other level was run."
    faults = [(one, _fault(one, spread)) for one in rest]
    sound = [one for one, fault in faults if not fault]
    slow = [one for one in sound if _ratio(one) > 1 + SAME_TIME and one.step_ratio is not None]
    clauses = [f"{one.label} {fault}" for one, fault in faults if fault]
    inside = [one.label for one in sound if one not in slow]
    if inside:
        clauses.append(f"{_listed(inside)} {_verb('stay', inside)} inside it too")
    if slow:
        names = [one.label for one in slow]
        most = f"{'up to ' if len(slow) > 1 else ''}{max(map(_ratio, slow)):.1f} times as long"
        clauses.append(
            f"{_listed(names)} {_verb('do', names)} too, but {_verb('take', names)} {most}"
        )
    return "; ".join(clauses) + "."


def _verb(verb: str, subjects: Sequence[str]) -> str:
    one = {"do": "does"}.get(verb, f"{verb}s")
    return one if len(subjects) == 1 else verb


def _fault(standing: Standing, spread: float) -> str:
    if standing.trouble:
        return standing.trouble
    if standing.skips_all:
        return "skips every step"
    if math.isnan(standing.distance):
        return "has no final loss"
    if standing.distance > spread:
        return f"ends with a loss {standing.distance:.2g} higher, beyond the spread of {spread:.2g}"
    return ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
