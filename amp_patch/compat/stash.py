"""What apex keeps on an optimizer, and scripts look for: `optimizer._amp_stash`."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from amp_patch.casts.patcher import Patcher
from amp_patch.errors import AmpError
from amp_patch.scaling.optimizer_binding import OptimizerBinding
from amp_patch.slot import slot

Tensors = list[torch.Tensor]


class AmpStash:
    """The parameters of an initialized optimizer, in the lists that scripts know.

    The tensors are the masters and the model's own, so that what is written into one counts.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.lazy_init_called = True
        self.already_patched = True

    def lazy_init(self) -> None:
        """Do nothing: masters are there from `initialize` on."""

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Round the masters into the model, as `step` does."""
        halves, masters, _ = self._sorted()
        for half, master in zip(halves, masters, strict=True):
            half.copy_(master)

    def _binding(self) -> OptimizerBinding | None:
        optimizer = self._optimizer()
        if optimizer is None or slot.session is None:
            return None
        try:
            return slot.session.binding_of(optimizer, "_amp_stash")
        except AmpError:  # amp was switched off and on again without this optimizer
            return None

    def _sorted(self) -> tuple[Tensors, Tensors, Tensors]:
        """Half parameters, their masters, and the parameters without a master."""
        binding = self._binding()
        pairs = [] if binding is None else binding.pairs()
        halves = [pair.model for pair in pairs if pair.has_master]
        masters = [pair.master for pair in pairs if pair.has_master]
        return halves, masters, [pair.model for pair in pairs if not pair.has_master]

    @property
    def all_fp16_params(self) -> Tensors:
        """The half parameters of the model."""
        halves, _, others = self._sorted()
        return halves + [p for p in others if p.dtype is not torch.float32]

    @property
    def all_fp32_from_fp16_params(self) -> Tensors:
        """Their masters."""
        return self._sorted()[1]

    @property
    def all_fp32_from_fp32_params(self) -> Tensors:
        """The FP32 parameters, which are their own masters."""
        return [p for p in self._sorted()[2] if p.dtype is torch.float32]

    @property
    def all_fp32_params(self) -> Tensors:
        """All parameters that are updated in FP32."""
        return self.all_fp32_from_fp16_params + self.all_fp32_from_fp32_params

    @property
    def fp16_groups(self) -> list[Tensors]:
        """The half parameters, group by group."""
        return self._grouped("model", has_master=True)

    @property
    def fp32_from_fp16_groups(self) -> list[Tensors]:
        """The masters, group by group."""
        return self._grouped("master", has_master=True)

    @property
    def fp32_from_fp32_groups(self) -> list[Tensors]:
        """The FP32 parameters, group by group."""
        return self._grouped("model", has_master=False)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether the gradients are still multiplied by the loss scale."""
        binding = self._binding()
        return binding is not None and binding.window.is_scaled

    def _grouped(self, name: str, *, has_master: bool) -> list[Tensors]:
        binding, optimizer = self._binding(), self._optimizer()
        if binding is None or optimizer is None:
            return []
        pairs = iter(binding.pairs())
        groups = [[next(pairs) for _ in group["params"]] for group in optimizer.param_groups]
        return [
            [getattr(pair, name) for pair in group if pair.has_master is has_master]
            for group in groups
        ]


class Stashes:
    """Puts the stash and the methods of apex on optimizers, and takes them off again."""

    def __init__(self) -> None:
        self._patcher = Patcher()

    def put_on(self, optimizer: Any) -> None:
        """Let `optimizer` look initialized to scripts."""
        if isinstance(getattr(optimizer, "_amp_stash", None), AmpStash):
            return
        stash = AmpStash(optimizer)
        self._patcher.replace(optimizer, "_amp_stash", stash)
        for name, method in (
            ("_lazy_init_maybe_master_weights", stash.lazy_init),
            ("_master_params_to_model_params", stash.copy_masters),
        ):
            self._patcher.replace(optimizer, name, method)

    def take_off(self) -> None:
        """Leave no trace. A second call does nothing."""
        self._patcher.restore()


stashes = Stashes()
