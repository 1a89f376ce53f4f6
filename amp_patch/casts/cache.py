"""The cast cache: each weight is cast once an iteration, however often it is used."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch.nn import Parameter

from amp_patch.casts.tracing import dispatch_modes, is_tracing, jit_state
from amp_patch.errors import AmpError
from amp_patch.policy import CASTABLE

_MIN_PURGE = 256
_is_grad_enabled = torch.is_grad_enabled  # looked up a hundred times an iteration


class _Entry(NamedTuple):
    source: weakref.ref[Parameter]
    version: int
    address: int
    dtype: torch.dtype
    has_history: bool
    cast: torch.Tensor


class CastCache:
    """Casts of weights, each used only as long as it is true.

    An entry serves a call only if the weight is the same object, neither its version counter nor
    its storage has moved, and the history of the cast fits the call: what was cast under `no_grad`
    never serves a call that records gradients. A cast with history keeps its weight alive through
    the graph, so whoever owns models must `clear` when one of them goes. Not for activations.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._purge_at = _MIN_PURGE
        self.verifies = False
        self.is_on = True  # off: every use of a weight casts it anew

    def __len__(self) -> int:
        return len(self._entries)

    def cast(self, weight: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """`weight` in `dtype`: the cast made earlier if it is still true, else a fresh one."""
        entry = self._entries.get(id(weight))
        if entry is not None:
            source, version, address, of_dtype, has_history, cast = entry
            if (
                of_dtype is dtype
                and source() is weight
                and version == weight._version
                and address == weight.data_ptr()
                and (has_history == weight.requires_grad or not _is_grad_enabled())
                and not jit_state()
                and not (dispatch_modes() and is_tracing())
            ):
                if self.verifies:
                    _verify(weight, cast)
                return cast
        return self._fresh(weight, dtype)

    def discard(self, weight: torch.Tensor) -> None:
        """Forget the cast of `weight`."""
        self._entries.pop(id(weight), None)

    def clear(self) -> None:
        """Forget every cast."""
        self._entries.clear()

    def _fresh(self, weight: Parameter, dtype: torch.dtype) -> torch.Tensor:
        if weight.dtype is dtype or weight.dtype not in CASTABLE:
            return weight
        cast = weight.to(dtype)
        is_plain = type(cast) is torch.Tensor  # some mode may make it another kind
        is_inference = torch.is_inference_mode_enabled() or weight.is_inference()
        if self.is_on and is_plain and not is_inference and not is_tracing():
            self._keep(weight, cast)
        return cast

    def _keep(self, weight: Parameter, cast: torch.Tensor) -> None:
        if len(self._entries) >= self._purge_at:
            self._purge()
        self._entries[id(weight)] = _Entry(
            weakref.ref(weight),
            weight._version,
            weight.data_ptr(),
            cast.dtype,
            cast.requires_grad,
            cast,
        )

    def _purge(self) -> None:
        """Drop the casts of weights that are gone; so seldom that it costs nothing a cast."""
        entries = self._entries
        for key in [key for key, entry in list(entries.items()) if entry.source() is None]:
            entries.pop(key, None)
        self._purge_at = max(2 * len(entries), _MIN_PURGE)


def _verify(weight: Parameter, cast: torch.Tensor) -> None:
    fresh = weight.detach().to(cast.dtype)
    if not torch.equal(fresh.nan_to_num(), cast.detach().nan_to_num()):
        raise AmpError(
            f"a cached cast of a weight of shape {tuple(weight.shape)} is stale: the weight was "
            "written to in a way that torch does not count (numpy, a flat buffer, an alias of "
            ".data that was taken earlier). Call amp.clear_cache() after such writes"
        )
