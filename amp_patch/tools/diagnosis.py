"""Findings about a model and its optimizer, each with its fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Severity(Enum):
    """How much a finding matters."""

    WRONG = "wrong"  # training will fail, or be wrong
    RISK = "risk"  # it may
    SLOW = "slow"  # it will work, slower than it could


@dataclass(frozen=True)
class Finding:
    """One thing that was found: what kind, where, what about it, and what to do."""

    kind: str
    severity: Severity
    where: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"[{self.severity.value}] {self.where}: {self.text}\n    Fix: {self.fix}"


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the gravest first. `print` it to read them."""

    opt_level: str
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, opt_level: str, findings: Sequence[Finding]) -> Diagnosis:
        """Sort the findings."""
        order = list(Severity)
        return cls(opt_level, tuple(sorted(findings, key=lambda one: order.index(one.severity))))

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong; risks and lost time may be left."""
        return all(one.severity is not Severity.WRONG for one in self.findings)

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind, as "eps"."""
        return tuple(one for one in self.findings if one.kind == kind)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.opt_level}: nothing found that stands against it."
        lines = [f"{self.opt_level}: {len(self.findings)} finding(s)"]
        return "\n".join([*lines, *map(str, self.findings)])

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain data."""
        found = [asdict(one) | {"severity": one.severity.value} for one in self.findings]
        return {"opt_level": self.opt_level, "findings": found}
