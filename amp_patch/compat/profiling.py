"""What scripts call of apex.pyprof, which marked torch functions for a profiler."""

from __future__ import annotations


def init() -> None:
    """Do nothing: `torch.profiler`, and `torch.autograd.profiler.emit_nvtx`, need no marks."""
