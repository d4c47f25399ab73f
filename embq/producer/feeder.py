"""Keeps a few seconds of hints in each queue, shared between the runs by weight.

The feeder has no state that could be lost: units that wait are in the ledger, which is rebuilt from the output folder.
A second feeder is harmless and wasteful.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import redis

from embq.core import wire
from embq.core.broker.client import now_ms, reach
from embq.core.errors import EmbqError
from embq.core.queue import hints
from embq.core.queue.heartbeats import BRIEF_REPORTS, WORKER_REPORTS, BriefReport, forget_rates
from embq.core.queue.hints import Hint
from embq.core.queue.ledger import Ledger
from embq.core.queue.other_work import forget_abandoned
from embq.core.queue.outage_detector import OutageDetector
from embq.core.queue.runs import RunRecord, active, register_again
from embq.core.queue.scripts import Loader, load_scripts
from embq.core.queue.worker_speeds import SUM_S, keep_sum
from embq.core.run.control import Control, RunState
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.service.log import Events
from embq.core.storage.paths import ANYWHERE, Outputs, place
from embq.producer.feed_policy import Claimant, Shares, Window

TICK_S = 0.2

SWEEP_S = 60.0

LOOKS = 20
"""A look at all workers is followed by this many times as long without one, up to `SUM_S`."""


@dataclass(frozen=True, slots=True)
class _Fed:
    """A run that gets hints, in one tick."""

    record: RunRecord
    manifest: Manifest
    ledger: Ledger
    meta: dict[str, str]

    @property
    def id(self) -> str:
        return self.record.run

    @property
    def gen(self) -> str:
        return self.meta["gen"]

    @property
    def weight(self) -> int:
        return Control().with_changes(self.meta).priority

    @property
    def unhinted(self) -> int:
        """Upper bound of the units that were never hinted; some of them may be done."""
        return max(0, int(self.meta.get("total", 0)) - int(self.meta.get("cursor", 0)))

    def samples(self) -> int:
        """Samples of the next unit; the average so far if only reading it tells, and 0 if nothing is known."""
        for hint in self.hints([int(self.meta.get("cursor", 0))]):
            if (planned := hint.unit.expected) is not None:
                return max(1, planned)
        done, rows, failures = (int(self.meta.get(name, 0)) for name in ("done", "rows", "failures"))
        return max(1, round((rows + failures) / done)) if done else 0

    def hints(self, units: Iterable[int]) -> list[Hint]:
        """Hints of units, without those that the manifest lacks or cannot give."""
        unit_hints = []
        for u in units:
            try:
                if u < len(self.manifest):
                    unit_hints.append(Hint(run=self.id, gen=self.gen, u=u, unit=self.manifest.unit(u)))
            except (EmbqError, OSError, pa.ArrowException) as error:
                wire.skipped("unit of a manifest", f"{self.id}:{u}", error)
        return unit_hints


class Feeder:
    """Feeds every registered run, or only `only`.

    Args:
        client: a patient client of its own.
        lease_s: length of a lease; no lease is taken away until one server has been heard for that long, without an
            outage, and without a jump of its clock.
        outputs: where runs may be; one that is elsewhere is not fed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        lease_s: float,
        only: str = "",
        outputs: Outputs = ANYWHERE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outputs = outputs
        self.client = client
        self.only = only
        self.outages = OutageDetector(client, lease_s=lease_s, pause_s=TICK_S, clock=clock)
        self.log = Events("producer")
        self._clock = clock
        self._scripts = load_scripts(client)
        self._loader = Loader(client, self._scripts)
        self._manifests: dict[str, Manifest] = {}
        self._unreadable: set[str] = set()
        self._unfinished: dict[str, RunRecord] = {}
        self._shares: dict[str, Shares] = defaultdict(Shares)
        self._windows: dict[str, Window] = defaultdict(Window)
        self._last_sweep = clock()
        self._workers: dict[str, list[tuple[BriefReport, float]]] = defaultdict(list)
        self._look_at = clock()

    def tick(self) -> int:
        """One round over all runs; returns the number of hints pushed."""
        self.outages.listen()
        self._loader.load_missing()
        records = [record for record in self._records() if self.only in ("", record.run)]
        queues: dict[str, list[RunRecord]] = defaultdict(list)
        for record in records:
            queues[record.model.queue_key].append(record)
        self._look_at_workers(queues)
        pushed = sum(self._feed_queue(key, runs) for key, runs in queues.items())
        if self._clock() - self._last_sweep > SWEEP_S:
            self._last_sweep = self._clock()
            with self.outages.answered():
                WORKER_REPORTS.forget_silent(self.client)
                forget_rates(self.client)
                forget_abandoned(self.client, scripts=self._scripts)
            for key in queues:
                with self.outages.answered():
                    hints.sweep(self.client, hints.hint_queue(self.client, key))
        self.outages.rest()
        return pushed

    def _look_at_workers(self, queues: Mapping[str, Sequence[RunRecord]]) -> None:
        """Read the workers' reports and keep the sum of their speeds, as often as takes a small part of the time."""
        if (began := self._clock()) < self._look_at:
            return
        with self.outages.answered():
            now = now_ms(self.client)
            self._workers.clear()
            for report, _, age_s in BRIEF_REPORTS.with_age(self.client):
                self._workers[report.model].append((report, age_s))
            for key, runs in queues.items():
                keep_sum(self.client, key, self._workers[runs[0].model.spec], now)
        self._look_at = began + min(SUM_S, LOOKS * (self._clock() - began))

    def _records(self) -> list[RunRecord]:
        """The runs that are not over.

        A run that was being fed and is not registered was lost with the broker's data: it is registered again, so that
        its writer rebuilds its queue.
        """
        with self.outages.answered():
            runs = active(self.client)
        for run, record in list(self._unfinished.items()):
            if run in runs:
                continue
            if register_again(self.client, record):
                self.log.warning("run_announced_again", run=run)
                runs[run] = record
            else:
                del self._unfinished[run]  # it is over
        return list(runs.values())

    def _feed_queue(self, queue_key: str, runs: list[RunRecord]) -> int:
        queue = hints.hint_queue(self.client, queue_key)
        shares, window = self._shares[queue_key], self._windows[queue_key]
        with self.outages.answered():
            waiting = self.client.llen(queue.key)
        workers = [worker for worker, _ in self._workers[runs[0].model.spec]]
        idle = [worker for worker in workers if worker.held == 0]
        unit_s = min((worker.unit_s for worker in idle if worker.unit_s is not None), default=0.0)
        most = window.size(waiting, workers=len(workers), now=self._clock())
        room = max(0, most - waiting)
        shares.observe(waiting)
        fed = self._fed(runs)
        shares.forget([run.id for run in fed])
        costs = _costs(fed)
        claimants = [Claimant(run=run.id, weight=run.weight, cost=costs[run.id], unhinted=run.unhinted) for run in fed]
        # A new run gets its share in front of the hints that wait, so that it does not wait for all of them.
        turns = shares.turns(claimants, room=room, ahead=min(most, max(0, 2 * most - waiting)))
        fresh = Counter(turns)
        urgent: list[Hint] = []
        normal: dict[str, deque[Hint]] = {}
        for run in fed:
            with self.outages.answered():
                again, units = run.ledger.next_units(
                    run.gen,
                    max(room, fresh[run.id]),
                    queue_empty=waiting == 0,
                    reap_at=self.outages.reap_at(),
                    idle=len(idle),
                    fresh=fresh[run.id],
                    unit_s=unit_s,
                )
            urgent += run.hints(again)
            normal[run.id] = deque(run.hints(units))
        batch = [normal[run].popleft() for run in turns if normal[run]]
        batch += [hint for rest in normal.values() for hint in rest]
        weights = {run.id: run.weight for run in fed}
        ahead = shares.give([(hint.run, (hint.unit.expected or costs[hint.run]) / weights[hint.run]) for hint in batch])
        # The first hint that is pushed to the front ends up behind the others.
        for part, at_front in (([*urgent, *batch[:ahead]][::-1], True), (batch[ahead:], False)):
            with self.outages.answered():
                hints.push(queue, part, at_front=at_front)
        window.pushed(len(urgent) + len(batch))
        return len(urgent) + len(batch)

    def _fed(self, runs: list[RunRecord]) -> list[_Fed]:
        """The runs that get hints: set up by their writer, and neither paused nor over."""
        fed = []
        for record in runs:
            ledger = Ledger(self.client, record.run, scripts=self._scripts)
            with self.outages.answered():
                meta = ledger.meta()
            state = RunState.read(meta.get("state"))
            if state in (RunState.RUNNING, RunState.PAUSED):
                self._unfinished[record.run] = record
            elif state.ended:
                self._unfinished.pop(record.run, None)
            # Without a generation the writer has not set the run up yet, or is about to rebuild it.
            if not meta.get("gen") or state != RunState.RUNNING:
                continue
            if (manifest := self._manifest(record, int(meta.get("total", 0)))) is not None:
                fed.append(_Fed(record, manifest, ledger, meta))
        return fed

    def _manifest(self, record: RunRecord, total: int) -> Manifest | None:
        """The manifest of a run whose queue has `total` units; None if this machine cannot see them all."""
        cached = self._manifests.get(record.run)
        if cached is None or len(cached) < total:
            try:
                self._outputs.check(record.output)
                self._manifests[record.run] = Manifest(Layout(place(record.output)))
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


def _costs(fed: list[_Fed]) -> dict[str, float]:
    """Samples of one unit of each run; of a run of which nothing is known, the average of the others."""
    by_run = {run.id: run.samples() for run in fed}
    counted = [samples for samples in by_run.values() if samples]
    usual = sum(counted) / len(counted) if counted else 1.0
    return {run: float(samples) if samples else usual for run, samples in by_run.items()}


def serve(
    client: redis.Redis,
    *,
    lease_s: float,
    only: str,
    stopped: Callable[[], bool],
    beat: Callable[[], None] = lambda: None,
    outputs: Outputs = ANYWHERE,
) -> None:
    """Feed until `stopped()`; `beat` is called in each round."""
    feeder = Feeder(client, lease_s=lease_s, only=only, outputs=outputs)
    feeder.log.info("started", server=str(reach(client, "")).replace(" ", "-"), run=only or "all")
    while not stopped():
        started = time.monotonic()
        beat()
        feeder.tick()
        time.sleep(max(0.01, TICK_S - (time.monotonic() - started)))
    feeder.log.info("stopped")
