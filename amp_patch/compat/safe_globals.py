"""Let `torch.load` read the loss scalers in files of the old package, which it would refuse."""

from __future__ import annotations

import torch

from amp_patch.compat.loss_scalers import DynamicLossScaler, LossScaler

_MODULE = "apex.fp16_utils.loss_scaler"
_OURS = [(DynamicLossScaler, f"{_MODULE}.DynamicLossScaler"), (LossScaler, f"{_MODULE}.LossScaler")]


def allow() -> None:
    """Name the two classes as harmless: they are made of numbers."""
    torch.serialization.add_safe_globals([*_OURS])


def forbid() -> None:
    """Undo `allow`."""
    kept = [one for one in torch.serialization.get_safe_globals() if one not in _OURS]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(kept)
