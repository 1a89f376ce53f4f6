"""What `python -m amp_patch run` was asked for, and how worker processes learn of it."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from amp_patch.errors import AmpError

VARIABLE = "AMP_PATCH_RUN"


@dataclass(frozen=True)
class RunSettings:
    """A script, or a module if `is_module`, the level in place of its own, and the report file.

    Files are absolute: the script, and who starts a process, may change the folder.
    """

    target: str
    is_module: bool = False
    opt_level: str | None = None
    report: str | None = None

    def publish(self) -> None:
        """Let processes that this one starts know."""
        os.environ[VARIABLE] = json.dumps(dataclasses.asdict(self))


def published_settings() -> RunSettings:
    """The settings of the process that started this one. AmpError if there are none."""
    text = os.environ.get(VARIABLE)
    if text is None:
        raise AmpError(
            f"expected a process that `python -m amp_patch run` has started, with {VARIABLE} in "
            "its environment, found none"
        )
    return RunSettings(**json.loads(text))
