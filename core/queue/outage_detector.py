"""How long the broker has answered without an outage: before that is a whole lease, no lease is taken away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

from core.broker.client import now_ms, reach

OUTAGE_S = 2.0
OUTAGE_SHARE = 0.25
"""An answer that took longer than this, and than this share of a lease, was an outage: holders of overdue leases may be
alive, and must get to beat first. A shorter one has ended no lease: half of it at least was left (core.settings)."""


class OutageDetector:
    """Notes outages, for whoever takes leases away.

    Args:
        client: a patient client.
        lease_s: length of a lease; no lease is taken away until one server has been heard for that long, without an
            outage, and without a jump of its clock.
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
        """Note another server, a jump of its clock, or that we stood still ourselves, as an outage."""
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
        """A round is over; the next one begins with `listen`."""
        self._rested = self._clock()

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Note an outage where what is asked in it takes that long."""
        asked = self._clock()
        yield
        if self._clock() - asked > self.outage_s:
            self._since = self._clock()

    def reap_at(self) -> int:
        """The broker's time where leases may be taken away now, 0 where their holders must get to beat first."""
        now = self._clock()
        return int((now + self._offset_s) * 1000) if now - self._since >= self.lease_s else 0
