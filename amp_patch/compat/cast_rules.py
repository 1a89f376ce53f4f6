"""What scripts say of single functions, made to hold at the next `initialize`."""

from __future__ import annotations

from amp_patch.compat import lists
from amp_patch.compat.registrations import register


def apply_edits() -> None:
    """Let the edits of the lists hold."""
    for edit in lists.edits():
        if edit.rule is not None:
            register(edit.owner, edit.name, edit.rule)


def use_rules_of_2019(*, allow_banned: bool) -> None:
    """Let the lists of 2019 hold."""
