"""What a measured time depends on: the torch version, the processor and the thread count."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """The machine that a run was made on; `str()` gives one line for a caption."""

    torch_version: str
    cpu: str
    threads: int

    def __str__(self) -> str:
        return f"torch {self.torch_version}, {self.cpu}, threads: {self.threads}"


def describe_machine() -> Machine:
    """Return a description of this machine and of the threads that torch uses now."""
    return Machine(torch.__version__, cpu_name(), torch.get_num_threads())


def cpu_name() -> str:
    """Return the processor's model name where the system tells it, else its architecture."""
    if CPU_INFO.exists():  # Linux: platform.processor() is often empty there
        for line in CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
