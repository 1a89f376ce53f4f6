"""What a tool that trains by itself leaves as it was: random numbers and warnings of others."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from amp_patch.errors import AmpWarning


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Puts the generators of Python, torch (on every device) and numpy back afterwards."""
    numpy = sys.modules.get("numpy")
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(_torch_kept())
        yield


@contextmanager
def _torch_kept() -> Iterator[None]:
    if not torch.accelerator.is_available():
        with torch.random.fork_rng([]):
            yield
        return
    kind = torch.accelerator.current_accelerator()
    devices = range(torch.accelerator.device_count())
    with torch.random.fork_rng(devices, device_type="cpu" if kind is None else kind.type):
        yield


@contextmanager
def own_warnings_caught() -> Iterator[list[warnings.WarningMessage]]:
    """Catches each AmpWarning. Other warnings are issued afterwards, where they came from, once."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AmpWarning)
            yield caught
    finally:
        others = {
            (str(one.message), one.category, one.filename, one.lineno): one
            for one in caught
            if not issubclass(one.category, AmpWarning)
        }
        for (_, category, file, line), one in others.items():
            warnings.warn_explicit(one.message, category, file, line, source=one.source)
