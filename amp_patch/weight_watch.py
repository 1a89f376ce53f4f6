"""What a session does about writes and cleared gradients that nothing of torch tells of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from amp_patch.casts.context import CastContext
from amp_patch.casts.patcher import Patcher
from amp_patch.casts.surroundings import meet_torchs_own_amp_and_script
from amp_patch.casts.watch import watch_weights
from amp_patch.errors import AmpError
from amp_patch.scaling.optimizer_binding import OptimizerBinding
from amp_patch.weights.master_weights import MasterWeights


class WeightWatch:
    """Keeps the cast cache, the masters and the gradients of `bindings` true."""

    def __init__(
        self,
        context: CastContext,
        masters: MasterWeights,
        bindings: Mapping[int, OptimizerBinding],
    ) -> None:
        self.context = context
        self._masters = masters
        self._bindings = bindings
        self._patcher = Patcher()
        self._is_there = False

    def keep(self, is_wanted: bool) -> None:
        """Install the watch, or take it off; on top of whatever else is installed."""
        if is_wanted and not self._is_there:
            watch_weights(self._patcher, self)
            meet_torchs_own_amp_and_script(self._patcher, self.context)
        elif not is_wanted:
            self._patcher.restore()
        self._is_there = is_wanted

    def on_data_taken(self, parameter: torch.Tensor) -> None:
        """Told by the watch: `parameter.data` may be written to."""
        self.context.cache.discard(parameter)
        self._masters.distrust(parameter)

    def on_data_set(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Told by the watch: `parameter.data` is assigned to."""
        self.on_data_taken(parameter)
        return self._masters.accepted(parameter, value)

    def on_swap(self, tensor: torch.Tensor) -> None:
        """Told by the watch: `tensor` becomes another, which torch refuses if it is referred to."""
        self.context.cache.discard(tensor)
        if self._masters.has_cast(tensor):
            raise AmpError(
                "torch.utils.swap_tensors: expected a tensor that amp has not cast, found a weight "
                f"in {tensor.dtype} of shape {tuple(tensor.shape)}; "
                "write into it instead (load_state_dict and conversions do, unless "
                "torch.__future__.set_swap_module_params_on_conversion is on), or call "
                "amp.uninitialize() before"
            )

    def on_step(self) -> None:
        """Told by the watch: some optimizer has stepped."""
        self.context.cache.clear()

    def on_zero_grad(self, module: nn.Module) -> None:
        """Told by the watch: the user clears gradients through a model, not the optimizer."""
        ids = {id(parameter) for parameter in module.parameters()}
        self._masters.clear_gradients(module.parameters())
        for binding in list(self._bindings.values()):
            if binding.holds_only(ids):
                binding.zero()
