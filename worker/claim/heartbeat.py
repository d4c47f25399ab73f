"""The heartbeat: keeps leases alive while work moves, and says what this worker does."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import redis

from core.errors import EmbqError
from core.queue.heartbeats import WORKER_REPORTS
from core.queue.ledger import Ledger
from core.queue.scripts import load_scripts
from core.service.log import Events
from worker.claim.lease import LeasedUnit, Leases
from worker.meter.bottleneck import Bottleneck
from worker.meter.meter import Meter
from worker.meter.progress_board import ProgressBoard

REPORT_S = 1.0
RATE_WINDOW_S = 20.0
REST_S = 5.0
"""Without units in hand for so long, a device rests; for a shorter time, the queue is too slow for it."""
REPORTED_UNITS = 64
"""Of the units that are begun so many are reported one by one, for who estimates what is left of the run."""
MEASURE_S, MEASURE_LEAST_S = 10.0, 2.0
"""A speed is kept for so long a time with units in hand, or for the last of them if it is not shorter than that."""


class Heartbeat(threading.Thread):
    """Beats from a thread with a client of its own, from before the first claim until the last unit is published.

    A beat says that work moves, not that a thread lives: while a step of any stage has not advanced for `stall_s`, no
    lease is extended. The supervisor sees the same and replaces the process; without one, the leases lapse.

    Args:
        client: a patient client used by nobody else.
        describe: fields about the process for `embq status`, and for other workers.
        tail: whether nothing of the run is left to claim; then it beats as often as it reports, so that what others
            have done meanwhile is not done here as well.
        measured: told rows per second, whenever units were in hand for a while.
        attribution: says what limits this worker.
    """

    def __init__(
        self,
        client: redis.Redis,
        leases: Leases,
        stats: Meter,
        board: ProgressBoard,
        *,
        name: str,
        lease_s: float,
        beat_s: float,
        stall_s: float,
        describe: Callable[[], dict[str, Any]],
        tail: Callable[[], bool] = lambda: False,
        measured: Callable[[redis.Redis, float], None] = lambda _client, _rate: None,
        attribution: Bottleneck | None = None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.client = client
        self.leases = leases
        self.stats = stats
        self.board = board
        self.worker = name
        self.lease_s = lease_s
        self.beat_s = beat_s
        self.stall_s = stall_s
        self.describe = describe
        self.tail = tail
        self.measured = measured
        self._busy_from: tuple[float, int] | None = None
        self.log = Events("worker")
        self._scripts = load_scripts(client)
        self._ledgers: dict[str, Ledger] = {}
        self._stop_requested = threading.Event()
        self._rates: list[tuple[float, int]] = []
        self._attribution = attribution or Bottleneck(stats)
        self._held_at = time.monotonic()
        self.failed: redis.exceptions.RedisError | EmbqError | None = None

    def stop(self) -> None:
        """Beat no more and sign off."""
        self._stop_requested.set()
        self.join(5)
        self._measure(time.monotonic(), busy=False)
        WORKER_REPORTS.sign_off(self.client, self.worker)

    def run(self) -> None:
        """Report every second, or as often as it beats where that is more often; beat every `beat_s` seconds."""
        beat_at = 0.0
        while not self._stop_requested.wait(min(REPORT_S, self.beat_s)):
            now = time.monotonic()
            held = self.leases.snapshot()
            try:
                if (self.tail() or now - beat_at >= self.beat_s) and not self.board.stuck(self.stall_s):
                    self._beat(held)
                    beat_at = now
                self._report(held, now)
                self._measure(now, busy=bool(held))
            except (redis.exceptions.RedisError, EmbqError) as error:
                # The client waits out every outage; what is left is a refusal that waiting does not mend, or a stop.
                self.failed = error
                self.log.error("heartbeat_refused", why=error)
                return

    def _beat(self, held: list[LeasedUnit]) -> None:
        by_gen: dict[tuple[str, str], list[LeasedUnit]] = defaultdict(list)
        for work in held:
            by_gen[work.run, work.gen].append(work)
        for (run, gen), works in by_gen.items():
            if run not in self._ledgers:
                self._ledgers[run] = Ledger(self.client, run, scripts=self._scripts)
            pairs = [(work.u, work.token) for work in works]
            _, lost = self._ledgers[run].beat(gen, pairs, lease_s=self.lease_s)
            for work in works:
                # A unit that was published since the snapshot is no longer ours either, and that is no loss.
                if work.token in lost and work.stage != "publish" and not work.lost:
                    work.lost = True
                    self.log.warning("lease_lost", run=run, u=work.u)

    def _measure(self, now: float, *, busy: bool) -> None:
        """Tell the speed of a time in which units were in hand; waiting for work says nothing about a device."""
        if self._busy_from is None:
            self._busy_from = (now, self.stats.rows) if busy else None
            return
        began, before = self._busy_from
        seconds, rows = now - began, self.stats.rows - before
        if busy and seconds < MEASURE_S:
            return
        if rows and seconds >= MEASURE_LEAST_S:
            self.measured(self.client, round(rows / seconds, 2))
        self._busy_from = (now, self.stats.rows) if busy else None

    def _report(self, held: list[LeasedUnit], now: float) -> None:
        self._rates = [(at, rows) for at, rows in self._rates if now - at <= RATE_WINDOW_S]
        self._rates.append((now, self.stats.rows))
        rate_from, rows_from = self._rates[0]
        if held:
            self._held_at = now
        elif now - self._held_at > REST_S:
            self.stats.rested()
        oldest = min(held, key=lambda work: work.claimed_at, default=None)
        fields = {
            **self.describe(),
            "rows": self.stats.rows,
            "units": self.stats.units,
            "rows_per_s": round((self.stats.rows - rows_from) / (now - rate_from), 2) if now > rate_from else 0.0,
            **self._attribution.look(),
            "padding": round(1 - self.stats.tokens / self.stats.processed, 3) if self.stats.processed else 0.0,
            "memory_full": self.stats.memory_full,
            "recomputed": self.stats.recomputed,
            "held": len(held),
            "runs": self._runs(held),
            "unit": oldest.unit_id if oldest else "",
            "run": oldest.run if oldest else "",
            "stage": oldest.stage if oldest else "idle",
            "age_s": round(now - oldest.claimed_at, 1) if oldest else 0.0,
        }
        if self.stats.first_batch_at is not None and self.stats.last_batch_at is not None:
            fields["embed_s"] = round(self.stats.last_batch_at - self.stats.first_batch_at, 2)
        WORKER_REPORTS.report(self.client, fields, life_s=self.lease_s * 3, scripts=self._scripts)

    def _runs(self, held: list[LeasedUnit]) -> dict[str, dict[str, Any]]:
        """For each run: its tokens per second, the units in hand and their size, and what is done of them in tokens."""
        speeds, in_batch = self.stats.tokens_per_s()
        runs = {}
        for run in {*speeds, *(work.run for work in held)}:
            units = [work for work in held if work.run == run]
            begun = [(work.u, work.token, work.tokens) for work in units if work.tokens][:REPORTED_UNITS]
            runs[run] = {
                "tokens_per_s": round(speeds.get(run, 0.0), 2),
                "units": len(units),
                "size": sum(work.extent.bytes or work.extent.samples for work in units),
                "begun": begun,
                "in_batch": round(in_batch.get(run, 0.0)) if units else 0,
            }
        return runs
