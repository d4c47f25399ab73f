"""What a writer process has done since it was started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from core.run.commits import Commit
from core.service.metrics import Spread

COMMIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds for the seconds of a commit: from a small part on a local disk to a large one on a slow store."""


@dataclass(slots=True)
class Counts:
    """Counted by the thread that writes; others read.

    Attributes:
        commits: records with rows or failures.
        parts, bytes: files that they name, and their size.
        rows, failures: in these.
        rejected: code -> results that were refused.
        seconds: of each commit.
    """

    commits: int = 0
    parts: int = 0
    bytes: int = 0
    rows: int = 0
    failures: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    seconds: Spread = field(default_factory=lambda: Spread(COMMIT_S))

    def committed(self, commit: Commit, took_s: float) -> None:
        """Count a record that took so many seconds."""
        self.commits += 1
        self.parts += len(commit.files)
        self.bytes += sum(file.bytes for file in commit.files)
        self.rows += sum(unit.rows for unit in commit.units)
        self.failures += sum(unit.failures for unit in commit.units)
        self.seconds.observe(took_s)
