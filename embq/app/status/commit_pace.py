"""Speed of commits over ten minutes, and bytes of a committed row, from the records as they are read."""

from __future__ import annotations

from collections import deque
from datetime import datetime

from embq.core.run.commits import Commit

WINDOW_S = 600.0
LEAST_S = 5.0
"""Time before which a speed is not believed."""


def written_at(moment: str) -> float | None:
    """Seconds since the epoch of a time that a record holds, by its writer's clock; None if that is malformed."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


class CommitPace:
    """Committed rows over the last ten minutes.

    Attributes:
        bytes_per_row: of the files of the records that were read; None if none had rows.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self._bytes = self._rows = 0

    @property
    def bytes_per_row(self) -> float | None:
        return self._bytes / self._rows if self._rows else None

    def commit(self, commit: Commit, rows: int) -> None:
        """Take a record into account.

        Args:
            rows: committed rows after it.
        """
        self._bytes += sum(file.bytes for file in commit.files)
        self._rows += sum(file.rows for file in commit.files if file.kind == "rows")
        if commit.kind == "fence":  # the time before belongs to another session
            self._points.clear()
        if (at_s := written_at(commit.created_at)) is not None:
            self.note(at_s, rows)

    def note(self, at_s: float, rows: int) -> None:
        """Take the number of committed rows at a time into account; times never go back."""
        if self._points:
            at_s = max(at_s, self._points[-1][0])
        self._points.append((at_s, rows))
        self._forget(at_s - WINDOW_S)

    def recent(self, now_s: float) -> tuple[int, float] | None:
        """(rows, seconds) committed in the last ten minutes, or since the session began; None before `LEAST_S`."""
        from_s = now_s - WINDOW_S
        self._forget(from_s)
        if not self._points:
            return None
        first_s, first_rows = self._points[0]
        elapsed_s = now_s - max(from_s, first_s)
        return (self._points[-1][1] - first_rows, elapsed_s) if elapsed_s >= LEAST_S else None

    def _forget(self, before_s: float) -> None:
        """Drop all points before a time but the last."""
        while len(self._points) > 1 and self._points[1][0] <= before_s:
            self._points.popleft()
