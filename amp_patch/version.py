"""The version of the package, and nothing else: setup.py runs this file before torch is there."""

from __future__ import annotations

__version__ = "0.1.0"
