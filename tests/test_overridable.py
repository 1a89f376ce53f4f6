"""Every public function of torch has a rule, or a stated reason to have none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from amp_patch.casts.follows import FOLLOWS, reason_to_follow
from amp_patch.casts.rules import DEFAULT_OPERATIONS, OP_RULES
from amp_patch.casts.spellings import DELEGATING


def _overridable() -> Iterator[tuple[Any, str, str]]:
    """Owner, name and full name of what torch lets a tensor subclass override; no attributes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        functions = torch.overrides.get_overridable_functions()
    for owner, found in functions.items():
        for function in found:
            full_name = torch.overrides.resolve_name(function)
            name = full_name.rpartition(".")[2]
            if name != "__get__":
                yield owner, name, full_name


OVERRIDABLE = list(_overridable())


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_public_function_has_a_rule_or_a_reason_to_follow_its_inputs() -> None:
    ruled = {(id(row.owner), row.name) for row in OP_RULES}
    unknown = [
        full_name
        for owner, name, full_name in OVERRIDABLE
        if (id(owner), name) not in ruled
        and not _is_private(name)
        and reason_to_follow(name) is None
    ]
    assert not unknown, (
        f"torch {torch.__version__} has functions that nobody has classified: {unknown}. Give each "
        "a rule in amp_patch/casts/rules.py, or put its name under a reason in "
        "amp_patch/casts/follows.py. tests/test_op_database.py tells what fails without a rule"
    )


def test_a_new_function_of_torch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        globals(), "OVERRIDABLE", [(torch, "brand_new", "torch.brand_new"), *OVERRIDABLE]
    )
    with pytest.raises(AssertionError, match=r"torch\.brand_new.*casts/rules\.py"):
        test_every_public_function_has_a_rule_or_a_reason_to_follow_its_inputs()


def test_no_reason_is_given_for_what_torch_does_not_have() -> None:
    known = {name for _, name, _ in OVERRIDABLE}
    known |= {name.removesuffix("_") for name in known if not name.endswith("__")}
    assert FOLLOWS.keys() <= known


def test_nothing_has_both_a_rule_and_a_reason_to_have_none() -> None:
    pools = {"fractional_max_pool2d", "fractional_max_pool3d"}  # ruled where they meet, in C++
    bare = {name.rpartition(".")[2] for name in DEFAULT_OPERATIONS} - DELEGATING - pools
    assert not FOLLOWS.keys() & bare


def test_in_place_spelling_follows_as_the_operation_does() -> None:
    assert reason_to_follow("add_") == reason_to_follow("add") == "promotes by itself"
    assert reason_to_follow("exp_") is None
    assert reason_to_follow("__add__") == "promotes by itself"
