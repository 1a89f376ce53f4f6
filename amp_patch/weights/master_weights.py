"""FP32 master weights: which master belongs to which tensor of the model, kept true both ways."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from amp_patch.scaling import ranks
from amp_patch.weights.param_pairs import CastTensor, ParamPair


class MasterWeights:
    """The FP32 values behind the tensors of cast models.

    Model tensors are held weakly: a master lives as long as its model's tensor or its optimizer.
    A value that somebody writes into the model reaches the master (`CastTensor.refresh`): where
    rounding the master still gives the model's value the master stands, elsewhere it takes that.
    """

    def __init__(self) -> None:
        self._casts: Any = WeakTensorKeyDictionary()  # model tensor -> CastTensor
        self._by_master: Any = WeakTensorKeyDictionary()  # master -> weak CastTensor
        self._rounded: Any = WeakTensorKeyDictionary()  # model tensors once restored without master
        self._writes_itself = False

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        return self.copied_for(list(self._casts), memo)

    def copied_for(self, tensors: Iterable[torch.Tensor], memo: dict[int, Any]) -> MasterWeights:
        """What is known of `tensors`, for their copies in the deep copy that `memo` belongs to."""
        copied = MasterWeights()
        for tensor in tensors:
            known = self._casts.get(tensor)
            if known is not None:
                known.refresh(tensor)
                twin = copy.deepcopy(tensor, memo)
                master = copy.deepcopy(known.master, memo)
                copied._casts[twin] = CastTensor(master, known.original_dtype, twin._version)
        return copied

    def cast_(self, tensor: torch.Tensor, dtype: torch.dtype, keep_master: bool) -> None:
        """Cast a tensor of a model in place, keeping what it was as its master if asked to.

        The tensor stays the same object. An FP32 gradient goes to the master with it.
        """
        known = self._casts.get(tensor)
        if known is not None:  # another model holds it too
            known.holders += 1
            if keep_master:
                self.ensure_master(tensor)
            return
        original, gradient = tensor.data, tensor.grad
        master: torch.Tensor | None = None
        if keep_master:
            full = original.float()
            is_weight = isinstance(tensor, Parameter)
            master = Parameter(full, tensor.requires_grad) if is_weight else full
        tensor.grad = None
        try:
            self._set_data(tensor, original.to(dtype))
        except BaseException:
            tensor.grad = gradient
            raise
        if gradient is not None and master is not None:
            master.grad = gradient.float()
        elif gradient is not None:
            tensor.grad = gradient.to(dtype)
        self._remember(tensor, CastTensor(master, original.dtype, tensor._version))

    def restore_(self, tensor: torch.Tensor) -> None:
        """Undo `cast_`: the dtype is back, the value that of the master where there is one."""
        known = self._casts.get(tensor)
        if known is None:
            return
        known.holders -= 1
        if known.holders > 0:
            return
        del self._casts[tensor]
        known.refresh(tensor)
        master, gradient = known.master, tensor.grad
        if master is None and known.original_dtype is torch.float32:
            self._rounded[tensor] = True
        if master is not None and gradient is None:
            gradient = master.grad
        tensor.grad = None
        full = tensor.data if master is None else master.detach()
        self._set_data(tensor, full.to(known.original_dtype))
        if gradient is not None:
            tensor.grad = gradient.to(known.original_dtype)

    def pair(self, parameter: torch.Tensor) -> ParamPair:
        """`parameter` and its master, or `parameter` twice."""
        known = self._casts.get(parameter)
        if known is None or known.master is None:
            return ParamPair(parameter, parameter)
        return ParamPair(parameter, known.master, known)

    def has_cast(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is one that was cast."""
        return tensor in self._casts

    def original_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype that `tensor` had before it was cast; its own if it was not."""
        known = self._casts.get(tensor)
        return tensor.dtype if known is None else known.original_dtype

    def ensure_master(self, parameter: torch.Tensor) -> None:
        """Give a half `parameter` a master made from its present value, if it has none."""
        if (
            parameter.dtype not in (torch.float16, torch.bfloat16)
            or self.pair(parameter).has_master
        ):
            return
        known = self._casts.get(parameter)
        master = Parameter(parameter.detach().float(), parameter.requires_grad)
        if known is None:
            known = self._casts[parameter] = CastTensor(None, parameter.dtype, 0)
        known.master = master
        self._remember(parameter, known)
        known.mark_agreed(parameter)

    def full_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value behind a cast tensor: its master, else a copy in its original dtype.

        None for a tensor that was not cast.
        """
        known = self._casts.get(tensor)
        if known is None:
            return None
        known.refresh(tensor)
        if known.master is not None:
            return known.master  # type: ignore[no-any-return]
        return tensor.to(known.original_dtype)

    def set_master_(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write `value` into the master of `tensor`, if it has one of this shape."""
        known = self._casts.get(tensor)
        if known is not None and known.master is not None and known.master.shape == value.shape:
            with torch.no_grad():
                known.master.copy_(value)  # the model follows: torch copies into it next

    def distrust(self, tensor: torch.Tensor) -> None:
        """`tensor` may have been written to unseen by any counter: compare it next time."""
        if self._writes_itself:
            return
        known = self._casts.get(tensor)
        if known is not None:
            known.version = -1
        reference = self._by_master.get(tensor)
        of_master = None if reference is None else reference()
        if of_master is not None:
            of_master.master_version = -1

    def is_rounded(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has lost its FP32 value to an earlier cast without a master."""
        return tensor in self._rounded

    def _remember(self, tensor: torch.Tensor, known: CastTensor) -> None:
        self._casts[tensor] = known
        if known.master is not None:
            self._by_master[known.master] = weakref.ref(known)

    def accepted(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What to assign where the user assigns `value` to the data of `tensor`.

        FP32 data for a cast tensor go to its master, and rounded to the tensor.
        """
        known = self._casts.get(tensor)
        if known is None or self._writes_itself or value.dtype is tensor.dtype:
            return value
        self.set_master_(tensor, value)
        return value.to(tensor.dtype)

    def clear_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Clear the gradients of the masters of `tensors`."""
        for _, known in self._known(tensors):
            if known.master is not None:
                known.master.grad = None

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._writes_itself = True
        try:
            tensor.data = value
        finally:
            self._writes_itself = False

    def broadcast_(self, model: nn.Module, group: object) -> None:
        """Give all ranks of `group` the FP32 values that the first one has for `model`.

        `DistributedDataParallel` does so with what it sees, which are the rounded values.
        """
        own = itertools.chain(model.parameters(), model.buffers())
        rows = self._known(own)
        for tensor, known in rows:
            known.refresh(tensor)
        masters = [known.master for _, known in rows if known.master is not None]
        ranks.broadcast_(masters, group)
        for tensor, known in rows:
            known.follow(tensor)

    def follower(self, tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
        """A function that rounds into the model what was written into masters of `tensors`."""
        rows = [(weakref.ref(tensor), known) for tensor, known in self._known(tensors)]
        casts = [known for _, known in rows]

        def follow() -> None:
            for known in casts:
                if known.master is not None and known.master._version != known.master_version:
                    break
            else:
                return  # the common case, at the cost of one comparison a tensor
            for reference, known in rows:
                tensor = reference()
                if tensor is not None:
                    known.follow(tensor)

        return follow

    def widen_(self, tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
        """Put the FP32 values into the model's tensors. Returns the function that takes them out.

        What is written into the tensors meanwhile reaches the masters, and the model in half.
        """
        rows = []
        for tensor, known in self._known(tensors):
            known.follow(tensor)
            half, tensor.grad = tensor.data, None
            full = half.to(known.original_dtype) if known.master is None else known.master.detach()
            self._set_data(tensor, full)
            rows.append((tensor, known, half))

        def take_out() -> None:
            for tensor, known, half in rows:
                full, tensor.grad = tensor.data, None
                half.copy_(full)
                if known.master is not None and full.data_ptr() != known.master.data_ptr():
                    known.master.detach().copy_(full)
                self._set_data(tensor, half)
                known.mark_agreed(tensor)

        return take_out

    def _known(self, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, CastTensor]]:
        found = ((tensor, self._casts.get(tensor)) for tensor in tensors)
        return [(tensor, known) for tensor, known in found if known is not None]

    def undo_of(self, tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
        """A function that restores `tensors`. It holds them weakly."""
        known: Any = WeakTensorKeyDictionary(dict.fromkeys(tensors))

        def restore() -> None:
            for tensor in list(known):
                self.restore_(tensor)

        return restore
