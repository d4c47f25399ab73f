"""Violations and notes of a verification, bounded in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

KEPT = 1000
"""Violations that are stored; a run of millions of units whose source is gone has one for each."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant: its stable name, the record, file or unit where it is broken, and how."""

    invariant: str
    where: str
    message: str


@dataclass(slots=True)
class Findings:
    """Collects violations and notes. `count` counts every violation, `violations` holds the first `KEPT`."""

    violations: list[Violation] = field(default_factory=list)
    count: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, invariant: str, where: str, message: str) -> None:
        """A violation."""
        self.count += 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(invariant, where, message))

    def note(self, message: str) -> None:
        """An observation that is not a violation."""
        self.notes.append(message)
