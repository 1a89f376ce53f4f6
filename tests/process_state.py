"""What a test must leave as it found it: attributes of torch, hooks, threads, global settings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # the first optimizer brings it in, and it replaces torch.manual_seed for good
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

OWNERS: Mapping[str, Any] = {
    "torch": torch,
    "torch.functional": torch.functional,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch._VF": torch._VF,
    "torch._C._nn": torch._C._nn,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.RNNBase": torch.nn.RNNBase,
    "torch.nn.LSTM": torch.nn.LSTM,
    "torch.nn.GRU": torch.nn.GRU,
    "torch.nn.RNN": torch.nn.RNN,
    "torch.nn.RNNCellBase": torch.nn.RNNCellBase,
    "torch.nn.MultiheadAttention": torch.nn.MultiheadAttention,
    "torch.optim.Optimizer": torch.optim.Optimizer,
}
HOOK_TABLES = {
    f"{module.__name__}.{name}": table
    for module in (module_hooks, optimizer_hooks)
    for name, table in vars(module).items()
    if name.startswith("_global_") and isinstance(table, dict)
}
THREAD_GRACE = 1.0  # seconds a thread that was told to stop may take to end

_ABSENT = object()


@dataclass(frozen=True, eq=False)
class ProcessState:
    """A picture of this process. It holds the objects themselves, so that no id is used twice."""

    attributes: dict[str, dict[str, Any]]
    hooks: dict[str, Any]
    threads: dict[str, Any]
    settings: dict[str, Any]

    @classmethod
    def capture(cls) -> ProcessState:
        """Take the picture. Costs a fraction of a millisecond."""
        return cls(
            attributes={
                # Python keeps `__slotnames__` in a class when an object of it is first copied.
                name: {key: value for key, value in vars(owner).items() if key != "__slotnames__"}
                for name, owner in OWNERS.items()
            },
            hooks={
                f"{name}[{key}]": hook
                for name, table in HOOK_TABLES.items()
                for key, hook in table.items()
            },
            threads={
                f"{thread.name} ({thread.ident})": thread
                for thread in threading.enumerate()
                # A thread that torch started for its backward pass shows up as a dummy.
                if not isinstance(thread, threading._DummyThread)  # noqa: SLF001 (no public name)
            },
            settings=_settings(),
        )

    def differences(self, later: ProcessState) -> list[str]:
        """One sentence for each thing that is not in `later` as it is here."""
        for thread in later.threads.keys() - self.threads.keys():
            later.threads[thread].join(THREAD_GRACE)
        return [*self._attribute_differences(later), *self._other_differences(later)]

    def _attribute_differences(self, later: ProcessState) -> Iterator[str]:
        for owner, before in self.attributes.items():
            after = later.attributes[owner]
            for name in before.keys() | after.keys():
                old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
                if new is old or (old is _ABSENT and isinstance(new, ModuleType)):
                    continue  # a submodule that torch imports on first use is no patch
                yield f"attribute {owner}.{name} was {_shown(old)}, is {_shown(new)}"

    def _other_differences(self, later: ProcessState) -> Iterator[str]:
        for kind in ("hooks", "threads", "settings"):
            before, after = getattr(self, kind), getattr(later, kind)
            for name in before.keys() | after.keys():
                old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
                ended = kind == "threads" and (new is _ABSENT or not new.is_alive())
                if not ended and new is not old and new != old:
                    yield f"{kind.removesuffix('s')} {name} was {_shown(old)}, is {_shown(new)}"


def _settings() -> dict[str, Any]:
    logger = logging.getLogger("amp_patch")
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled(),
        "torch.are_deterministic_algorithms_enabled()": (
            torch.are_deterministic_algorithms_enabled()
        ),
        "torch.get_num_threads()": torch.get_num_threads(),
        "level of the logger amp_patch": logger.level,
        "handlers of the logger amp_patch": tuple(logger.handlers),
    }


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
