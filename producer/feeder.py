"""The resident feeder: keeps a high-water mark of hints in each queue, shared fairly between runs.

It decides nothing that could be lost: which units wait is in the ledger, and the ledger is rebuilt from the output
folder. A second feeder is harmless, only wasteful.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from core import hints
from core.broker import ServerInfo, now_ms, reach
from core.errors import EmbqError
from core.hints import Hint
from core.layout import Layout
from core.ledger import Ledger, load_scripts
from core.log import Events
from core.manifest import Manifest
from core.registry import RunRecord, live_workers, register_again, registered

TICK_S = 0.2
MIN_HINTS, MAX_HINTS = 256, 5_000
"""Bounds of the high-water mark: the floor feeds two workers with units of a few milliseconds for a tick; the ceiling
keeps RQ's jobs at about 5 MB."""
HINTS_PER_WORKER = 12
SWEEP_S = 60.0
OUTAGE_S = 2.0
"""An answer that took this long was an outage: holders of overdue leases may be alive, and must get to beat first."""


class Feeder:
    """Feeds every registered run, or only `only`.

    Args:
        client: a patient client of its own.
        lease_s: length of a lease; no lease is taken away until one server has been heard for that long, without an
            outage, and without a jump of its clock.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        lease_s: float,
        only: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.lease_s = lease_s
        self.only = only
        self.log = Events("producer")
        self._clock = clock
        self._scripts = load_scripts(client)
        self._manifests: dict[str, Manifest] = {}
        self._unreadable: set[str] = set()
        self._unfinished: dict[str, RunRecord] = {}
        self._steady_since = clock()
        self._last_sweep = clock()
        self._ticked = clock()
        self._server = ""
        self._offset_s = 0.0

    def tick(self) -> int:
        """One round over all runs; gives the number of hints pushed."""
        self._listen()
        records = [record for record in self._records() if self.only in ("", record.run)]
        queues: dict[str, list[RunRecord]] = defaultdict(list)
        for record in records:
            queues[record.model.queue_key].append(record)
        pushed = sum(self._feed_queue(key, runs) for key, runs in queues.items())
        if self._clock() - self._last_sweep > SWEEP_S:
            self._last_sweep = self._clock()
            for key in queues:
                with self._answered():
                    hints.sweep(self.client, hints.hint_queue(self.client, key))
        self._ticked = self._clock()
        return pushed

    def _records(self) -> list[RunRecord]:
        """The runs that were announced.

        One that was being fed and is gone was lost with all that the broker held: it is announced again, so that its
        writer makes its queue anew.
        """
        with self._answered():
            known = registered(self.client)
        for run, record in self._unfinished.items():
            if run not in known and register_again(self.client, record):
                self.log.warning("run_announced_again", run=run)
                known[run] = record
        return list(known.values())

    def _listen(self) -> None:
        """Notes another server, or a jump of its clock, as an outage."""
        paused = self._clock() - self._ticked > OUTAGE_S + TICK_S
        with self._answered():
            server_ms = now_ms(self.client)
            server = reach(self.client, "").incarnation
        now = self._clock()
        offset_s = server_ms / 1000 - now
        if paused or server != self._server or abs(offset_s - self._offset_s) > OUTAGE_S:
            self._steady_since = now
        self._server, self._offset_s = server, offset_s

    def _reap_at(self) -> int:
        """The broker's time where leases may be taken away now, 0 where their holders must get to beat first."""
        now = self._clock()
        return int((now + self._offset_s) * 1000) if now - self._steady_since >= self.lease_s else 0

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Notes an outage where what is asked in it takes that long."""
        asked = self._clock()
        yield
        if self._clock() - asked > OUTAGE_S:
            self._steady_since = self._clock()

    def _feed_queue(self, queue_key: str, runs: list[RunRecord]) -> int:
        queue = hints.hint_queue(self.client, queue_key)
        with self._answered():
            waiting = self.client.llen(queue.key)
            workers = [worker for worker in live_workers(self.client) if worker.get("model") == runs[0].model.spec]
        idle = sum(worker.get("held") == 0 for worker in workers)
        high_water = min(MAX_HINTS, max(MIN_HINTS, HINTS_PER_WORKER * len(workers)))
        room = max(0, high_water - waiting)
        fed: list[tuple[RunRecord, Manifest, Ledger, str]] = []
        for record in runs:
            ledger = Ledger(self.client, record.run, scripts=self._scripts)
            with self._answered():
                meta = ledger.meta()
            if meta.get("state") == "running":
                self._unfinished[record.run] = record
            elif meta.get("state") == "done":
                self._unfinished.pop(record.run, None)
            # Without a generation the writer has not set the run up yet, or is about to rebuild it.
            if not meta.get("gen") or meta.get("state") != "running":
                continue
            if (manifest := self._manifest(record, int(meta["total"]))) is not None:
                fed.append((record, manifest, ledger, meta["gen"]))
        pushed = 0
        for record, manifest, ledger, gen in fed:
            share = -(-room // len(fed))
            with self._answered():
                urgent, normal = ledger.next_units(
                    gen, share, queue_empty=waiting == 0, reap_at=self._reap_at(), idle=idle
                )
            for units, at_front in ((urgent, True), (normal, False)):
                batch = [Hint(run=record.run, gen=gen, u=u, unit=manifest.unit(u)) for u in units]
                with self._answered():
                    hints.push(queue, batch, at_front=at_front)
                pushed += len(batch)
        return pushed

    def _manifest(self, record: RunRecord, total: int) -> Manifest | None:
        """The manifest of a run whose queue has `total` units; None where this machine cannot see them all."""
        known = self._manifests.get(record.run)
        if known is None or len(known) < total:
            try:
                self._manifests[record.run] = Manifest(Layout(Path(record.output)))
            except EmbqError as error:
                self._complain(record, error.message)
                return None
        manifest = self._manifests[record.run]
        if len(manifest) < total:
            del self._manifests[record.run]
            self._complain(record, f"manifest in {record.output} has {len(manifest)} of {total} units here")
            return None
        return manifest

    def _complain(self, record: RunRecord, why: str) -> None:
        if record.run not in self._unreadable:
            self._unreadable.add(record.run)
            self.log.error("run_not_fed", run=record.run, why=why)


def serve(client: redis.Redis, *, lease_s: float, only: str, stopped: Callable[[], bool]) -> None:
    """Feed until `stopped()` says so."""
    feeder = Feeder(client, lease_s=lease_s, only=only)
    feeder.log.info("started", server=_name(reach(client, "")), run=only or "all")
    while not stopped():
        started = time.monotonic()
        feeder.tick()
        time.sleep(max(0.01, TICK_S - (time.monotonic() - started)))
    feeder.log.info("stopped")


def _name(server: ServerInfo) -> str:
    return str(server).replace(" ", "-")
