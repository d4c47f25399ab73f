"""Accepted results that wait to become one part, and the rule for when they do."""

from __future__ import annotations

import time
from collections.abc import Callable

from core.queue.result_stream import LIMIT_BYTES
from writer.accept import Accepted

MAX_BYTES = LIMIT_BYTES // 2
"""Workers stop at LIMIT_BYTES of waiting results; a part above half of it could wait for rows that cannot come."""

MIN_AGE_S, MAX_AGE_S = 2.0, 30.0


class Buffer:
    """Results of one run, in order of arrival.

    Args:
        part_rows: most rows of a part.
        clock: monotonic seconds.
    """

    def __init__(self, *, part_rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.part_rows = part_rows
        self._clock = clock
        self._began = clock()
        self._oldest = 0.0
        self.results: list[Accepted] = []
        self.units: set[int] = set()
        self.entries: set[str] = set()
        self.rows = 0
        self.bytes = 0

    def fits(self, result: Accepted) -> bool:
        """Whether the result still belongs into the part that is being gathered."""
        if not self.results:
            return True
        return self.rows + result.rows.num_rows <= self.part_rows and self.bytes + result.bytes <= MAX_BYTES

    def add(self, result: Accepted) -> None:
        """Keep a result; the caller has checked `fits` and that its unit is new."""
        if not self.results:
            self._oldest = self._clock()
        self.results.append(result)
        self.units.add(result.u)
        self.entries.add(result.entry)
        self.rows += result.rows.num_rows
        self.bytes += result.bytes

    def is_due(self) -> bool:
        """Whether the oldest result has waited long enough.

        Early parts come soon, so that a user sees committed rows; later ones are larger.
        """
        if not self.results:
            return False
        now = self._clock()
        age_limit = min(MAX_AGE_S, max(MIN_AGE_S, (now - self._began) * 0.1))
        return self.rows >= self.part_rows or self.bytes >= MAX_BYTES or now - self._oldest >= age_limit

    def take(self) -> list[Accepted]:
        """All results, leaving the buffer empty."""
        results, self.results = self.results, []
        self.units, self.entries, self.rows, self.bytes = set(), set(), 0, 0
        return results
