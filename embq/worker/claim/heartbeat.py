"""The heartbeat of a worker process: extends its leases while work advances, and reports what it does."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import redis

from embq.core.errors import EmbqError
from embq.core.queue.heartbeats import WORKER_REPORTS
from embq.core.queue.ledger import Ledger
from embq.core.queue.scripts import load_scripts
from embq.core.service.log import Events
from embq.core.settings import Settings
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.meter.bottleneck import Bottleneck
from embq.worker.meter.meter import Meter

REPORT_S = 1.0
REST_S = 5.0
"""Without units in hand for so long, a device rests; for a shorter time, the queue is too slow for it."""
REPORTED_UNITS = 64
"""Most begun units that are reported one by one, for the ETA of their run."""


class Heartbeat(threading.Thread):
    """Beats from a thread with a client of its own, from before the first claim until the last unit is published.

    A beat says that work advances, not that a thread lives: while a step of any stage has not advanced for `stall_s`,
    no lease is extended. The supervisor sees the same and replaces the process; without one, the leases lapse.

    Args:
        client: a patient client that no other thread uses.
        describe: fields about the process for `embq status`, and for the producer.
        tail: whether nothing of the run is left to claim; then it beats as often as it reports, so that what others
            have done meanwhile is not done here as well.
        measured: takes the client and rows per second, whenever units were in hand for a while.
        bottleneck: identifies what limits this worker.

    Attributes:
        failed: the refusal or stop that ended the heartbeat.
    """

    def __init__(
        self,
        client: redis.Redis,
        leases: Leases,
        meter: Meter,
        settings: Settings,
        *,
        name: str,
        describe: Callable[[], dict[str, Any]],
        tail: Callable[[], bool] = lambda: False,
        measured: Callable[[redis.Redis, float], None] = lambda _client, _rate: None,
        bottleneck: Bottleneck | None = None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.client = client
        self.leases = leases
        self.meter = meter
        self.settings = settings
        self.worker = name
        self.describe = describe
        self.tail = tail
        self.measured = measured
        self.log = Events("worker")
        self.failed: redis.exceptions.RedisError | EmbqError | None = None
        self._bottleneck = bottleneck or Bottleneck(meter)
        self._scripts = load_scripts(client)
        self._stop_requested = threading.Event()
        self._held_at = time.monotonic()

    def stop(self) -> None:
        """Beat no more and sign off."""
        self._stop_requested.set()
        self.join(5)
        self._measure(time.monotonic(), busy=False)
        WORKER_REPORTS.sign_off(self.client, self.worker)

    def run(self) -> None:
        """Report every second, or as often as it beats if that is more often; beat every `beat_s` seconds."""
        beat_s, beat_at = self.settings.beat_s, 0.0
        while not self._stop_requested.wait(min(REPORT_S, beat_s)):
            now = time.monotonic()
            held = self.leases.snapshot()
            try:
                if (self.tail() or now - beat_at >= beat_s) and not self.meter.board.stuck(self.settings.stall_s):
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
        outlook = self.meter.throughput.outlook(held)
        for unit in held:
            by_gen[unit.run, unit.gen].append(unit)
        for (run, gen), units in by_gen.items():
            ledger = Ledger(self.client, run, scripts=self._scripts)
            pairs = [(unit.u, unit.token) for unit in units]
            _, lost = ledger.beat(gen, pairs, lease_s=self.settings.lease_s, outlook=outlook)
            for unit in units:
                # A unit that was published since the snapshot is no longer ours either, and that is no loss.
                if unit.token in lost and not unit.publishing and not unit.lost:
                    unit.lost = True
                    self.log.warning("lease_lost", run=run, u=unit.u)

    def _measure(self, now: float, *, busy: bool) -> None:
        if (rate := self.meter.measured(now, busy=busy)) is not None:
            self.measured(self.client, rate)

    def _report(self, held: list[LeasedUnit], now: float) -> None:
        if held:
            self._held_at = now
        elif now - self._held_at > REST_S:
            self.meter.rested()
        oldest = min(held, key=lambda unit: unit.claimed_at, default=None)
        fields = {
            **self.describe(),
            **self.meter.report(now),
            **self._bottleneck.report(),
            "held": len(held),
            "runs": self._runs(held),
            "unit": oldest.unit_id if oldest else "",
            "run": oldest.run if oldest else "",
            "stage": oldest.stage if oldest else "idle",
            "age_s": round(now - oldest.claimed_at, 1) if oldest else 0.0,
        }
        WORKER_REPORTS.report(self.client, fields, life_s=self.settings.lease_s * 3, scripts=self._scripts)

    def _runs(self, held: list[LeasedUnit]) -> dict[str, dict[str, Any]]:
        """For each run: its tokens per second, the units in hand, their size, and what is done of them."""
        speeds, in_batch = self.meter.tokens_per_s()
        runs = {}
        for run in {*speeds, *(unit.run for unit in held)}:
            units = [unit for unit in held if unit.run == run]
            begun = [(unit.u, unit.token, unit.tokens) for unit in units if unit.tokens][:REPORTED_UNITS]
            runs[run] = {
                "tokens_per_s": round(speeds.get(run, 0.0), 2),
                "units": len(units),
                "size": sum(unit.extent.bytes or unit.extent.samples for unit in units),
                "begun": begun,
                "in_batch": round(in_batch.get(run, 0.0)) if units else 0,
                "samples": sum(unit.planned or unit.extent.samples for unit in units),
                "handled": sum(unit.handled for unit in units),
            }
        return runs
