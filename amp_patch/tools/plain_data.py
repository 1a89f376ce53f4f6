"""Turn figures into what JSON can write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain_data(value: Any) -> Any:
    """The value with tuples as lists and without numbers that JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    return value
