"""Outages of the broker as a client sees them: no lease is taken away until one lease after the last outage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

from embq.core.broker.client import now_ms, reach

OUTAGE_S = 2.0
OUTAGE_SHARE = 0.25
"""An answer that took longer than both is an outage: holders of overdue leases may be alive, and must get to send a
heartbeat first. A shorter one has ended no lease: at least half of the lease was left (embq.core.settings)."""


class OutageDetector:
    """Detects outages, for a process that takes overdue leases away.

    Args:
        client: a patient client.
        lease_s: length of a lease, for which one server must have answered, without an outage or a jump of its clock.
        pause_s: between `rest` and the next `listen`.
        clock: monotonic seconds.
    """

    def __init__(
        self, client: redis.Redis, *, lease_s: float, pause_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.client = client
        self.lease_s = lease_s
        self.outage_s = max(OUTAGE_S, OUTAGE_SHARE * lease_s)
        self._pause_s = pause_s
        self._clock = clock
        self._since = self._rested = clock()
        self._server = ""
        self._offset_s = 0.0

    def listen(self) -> None:
        """Count another server, a jump of its clock, or a pause of this process as an outage."""
        paused = self._clock() - self._rested > self.outage_s + self._pause_s
        with self.answered():
            server_ms = now_ms(self.client)
            server = reach(self.client, "").incarnation
        now = self._clock()
        offset_s = server_ms / 1000 - now
        if paused or server != self._server or abs(offset_s - self._offset_s) > self.outage_s:
            self._since = now
        self._server, self._offset_s = server, offset_s

    def rest(self) -> None:
        """End a round; the next one begins with `listen`."""
        self._rested = self._clock()

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Count an outage if the block takes that long."""
        start = self._clock()
        yield
        if self._clock() - start > self.outage_s:
            self._since = self._clock()

    def reap_at(self) -> int:
        """The broker's time in ms where overdue leases may be taken away now; 0 if they may not."""
        now = self._clock()
        return int((now + self._offset_s) * 1000) if now - self._since >= self.lease_s else 0
