"""What a tool that runs a model leaves as it was: the model, random numbers, others' warnings."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

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
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        kept = torch.random.fork_rng([])
    else:
        devices = range(torch.accelerator.device_count())
        kept = torch.random.fork_rng(devices, device_type=kind.type)
    with kept:
        yield


@contextmanager
def model_kept(model: nn.Module) -> Iterator[None]:
    """Puts gradients and buffers back, the objects and their values. Begins without gradients."""
    gradients = [(p, p.grad) for p in model.parameters()]
    values = [(one, one.detach().clone()) for one in model.buffers()]
    held = [(module, _buffers(module)) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, names in held:
            _put_back(module, names)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return dict(vars(module)["_buffers"].items())


def _put_back(module: nn.Module, names: dict[str, torch.Tensor | None]) -> None:
    """Undo that a forward put other tensors in the place of buffers, or added some."""
    now = _buffers(module)
    for name in now.keys() - names.keys():
        delattr(module, name)
    for name, buffer in names.items():
        if now.get(name) is not buffer:
            setattr(module, name, buffer)


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
