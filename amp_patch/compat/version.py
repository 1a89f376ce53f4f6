"""The version of apex under which old scripts find their names."""

from __future__ import annotations

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
DISTRIBUTION_VERSION = "0.1"
