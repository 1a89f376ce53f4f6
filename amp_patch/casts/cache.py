"""The cast cache: each weight is cast once an iteration, however often it is used."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_patch.casts.arguments import CONVERSIONS
from amp_patch.casts.tracing import dispatch_modes, is_tracing, is_tracing_to_script
from amp_patch.errors import AmpError

_MIN_PURGE = 256
_is_grad_enabled = torch.is_grad_enabled  # looked up a hundred times an iteration
_is_inference = torch.is_inference_mode_enabled

# Of a weight and its cast: the weight, its version and address, the dtype of the cast, whether it
# has history, and the cast. A plain tuple, which is made and read four times as quickly as a named.
_Entry = tuple[weakref.ref[Parameter], int, int, torch.dtype, bool, Tensor]


class CastCache:
    """Casts of weights, each used only as long as it is true.

    An entry serves a call only if the weight is the same object, neither its version counter nor
    its storage has moved, and the history of the cast fits the call: what was cast under `no_grad`
    never serves a call that records gradients. A cast with history keeps its weight alive through
    the graph, so whoever owns models must `clear` when one of them goes. Not for activations.

    Without gradients nobody else needs a cast after its use, and memory that is free again at once
    is what the next cast is quickest in: only casts of weights that a forward uses more than once
    are kept, from the second use in the first such forward on.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._purge_at = _MIN_PURGE
        self.verifies = False
        self.is_on = True  # off: every use of a weight casts it anew
        self.keeps_all = False  # also what is cast without gradients
        # Ids of weights cast without gradients: since the last `clear`, and twice before one. That
        # of a weight that is gone does no harm: another one's cast is kept for a while.
        self._used: set[int] = set()
        self._reused: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def cast(self, weight: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """`weight` in `dtype`: the cast made earlier if it is still true, else a fresh one."""
        entry = self._entries.get(id(weight))
        if entry is not None:
            source, version, address, of_dtype, has_history, cast = entry
            if (
                source() is weight
                and of_dtype is dtype
                and version == weight._version
                and address == weight.data_ptr()
                and (has_history is weight.requires_grad or not _is_grad_enabled())
                and not is_tracing_to_script()
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
        self._used.clear()

    def _fresh(self, weight: Parameter, dtype: torch.dtype) -> torch.Tensor:
        found = weight.dtype
        if found is dtype or found not in CONVERSIONS:
            return weight
        cast = CONVERSIONS[dtype](weight)
        is_plain = type(cast) is Tensor  # some mode may make it another kind
        can_keep = self.is_on and is_plain and not _is_inference() and not is_tracing()
        if can_keep and (_is_grad_enabled() or self.keeps_all or self._is_reused(weight)):
            self._keep(weight, dtype, cast)
        return cast

    def _is_reused(self, weight: Parameter) -> bool:
        key = id(weight)
        if key in self._used:
            self._reused.add(key)
        self._used.add(key)
        return key in self._reused

    def _keep(self, weight: Parameter, dtype: torch.dtype, cast: Tensor) -> None:
        entries = self._entries
        if len(entries) >= self._purge_at:
            self._purge()
        try:
            version = weight._version
        except RuntimeError:  # made in inference mode: writes are not counted
            return
        history = cast.requires_grad
        source, address = weakref.ref(weight), weight.data_ptr()
        entries[id(weight)] = (source, version, address, dtype, history, cast)

    def _purge(self) -> None:
        """Drop the casts of weights that are gone; so seldom that it costs nothing a cast."""
        entries = self._entries
        for key in [key for key, entry in list(entries.items()) if entry[0]() is None]:
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
