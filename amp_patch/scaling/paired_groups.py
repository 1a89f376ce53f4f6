"""The parameter groups of an optimizer, with masters in them where there are any."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch

from amp_patch.scaling.optimizer_state import move_state
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.param_pairs import NO_PAIRS, ParamPair, ParamPairs


class PairedGroups:
    """Puts masters into the groups, which stay the same objects, and takes them out again."""

    def __init__(self, optimizer: Any, masters: MasterWeights, *, makes_masters: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._masters = masters
        self._makes_masters = makes_masters
        self._mastered: dict[int, ParamPair] = {}  # by the id of the master
        self._known: tuple[list[torch.Tensor], ParamPairs] = ([], NO_PAIRS)

    @property
    def have_masters(self) -> bool:
        """Whether there is any master."""
        return bool(self._mastered)

    def pairs(self) -> ParamPairs:
        """The parameters as they are in the groups now: a user may have edited these."""
        optimizer, mastered = self._optimizer(), self._mastered
        if optimizer is None:
            return NO_PAIRS
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known, pairs = self._known
        if len(parameters) != len(known) or not all(map(operator.is_, parameters, known)):
            pairs = ParamPairs(mastered.get(id(p)) or ParamPair(p, p) for p in parameters)
            self._known = (parameters, pairs)
        return pairs

    def pair(self, parameters: list[torch.Tensor]) -> None:
        """Put the masters into a group's `parameters`, in place, with the state that is theirs."""
        optimizer = self._optimizer()
        for i, parameter in enumerate(parameters):
            if self._makes_masters:
                self._masters.ensure_master(parameter)
            pair = self._masters.pair(parameter)
            if pair.has_master:
                self._mastered[id(pair.master)] = pair
                parameters[i] = pair.master
            if self._masters.has_cast(parameter):
                move_state(optimizer, pair.model, pair.master, pair.master.dtype)

    def unpair(self) -> None:
        """Put the model's parameters back, with the state."""
        optimizer = self._optimizer()
        for pair in self.pairs():
            if self._masters.has_cast(pair.model):
                dtype = self._masters.original_dtype(pair.model)
                move_state(optimizer, pair.master, pair.model, dtype)
        for group in [] if optimizer is None else optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                pair = self._mastered.get(id(parameter), ParamPair(parameter, parameter))
                group["params"][i] = pair.model
