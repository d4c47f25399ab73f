"""Writer of one run: reads results, validates and commits them."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from embq.core.queue.ledger import Ledger
from embq.core.queue.result_stream import Entry, ResultStream, Sender
from embq.core.queue.runs import RunRecord
from embq.core.queue.scripts import load_scripts
from embq.core.run import checkpoint, generations
from embq.core.run.commit_log import CommitLog
from embq.core.run.commits import Commit
from embq.core.run.control import RunState, load_control, save_control
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import load_run
from embq.core.service.log import Events
from embq.core.service.metrics import Histogram
from embq.core.storage.paths import place
from embq.writer import staging
from embq.writer.accept import Accepted, Acceptor, Rejected
from embq.writer.commit import Buffer, Committer, LostPartError
from embq.writer.lock import LOCK_PATIENCE_S, LockKeeper, RunLock
from embq.writer.queue import RunQueue
from embq.writer.token_estimate import TokenEstimate

READ_BYTES = 8 * 1024 * 1024
"""Payload aimed at per read of the stream; bounds what the writer holds beside its buffer. The client copies what it
reads together several times, which costs least if it is little and its memory is used again."""

COMMIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds for the seconds of a commit: from a small part on a local disk to a large one on a slow store."""

OVERFULL_S = 0.05
"""Time for which a look at the size of the stream holds, which a read may exceed by what arrives in it. A look walks
through all entries, and one before each read was a tenth of the writer's time with small units."""

RECONCILE_S = 2.0

LATE_S, LATE_LOOK_S = 10.0, 0.5
"""A staging file that is not there is looked for so long and so often: a network's file system may show a name late."""

ASKED_S = 0.5
"""A user who pauses a run waits until that is noted in the output folder."""


class RunWriter:
    """The writer of one run.

    Args:
        client: a patient client.
        record: the run, as the broker knows it.
        takeover: fence out a writer whose lock is alive.
        rebuild: rebuild the queue even if the broker knows the run, because no earlier worker is alive.
        patience_s: longest wait for the lock of a writer that may be dead.
        keeper: renews the lock where one step takes long; None leaves that to `step`.
        counts: counters to add to.

    Raises TryLaterError if another writer holds the run.
    """

    def __init__(
        self,
        client: redis.Redis,
        record: RunRecord,
        *,
        version: str,
        takeover: bool = False,
        rebuild: bool = False,
        patience_s: float = LOCK_PATIENCE_S,
        keeper: LockKeeper | None = None,
        counts: Counts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = record
        self.log = Events("writer")
        self.layout = Layout(place(record.output))
        self.info = load_run(self.layout.root)
        self.ledger = Ledger(client, record.run, scripts=load_scripts(client))
        self.id = secrets.token_hex(8)
        self._clock = clock
        self._late: dict[str, tuple[float, Entry]] = {}
        self._late_at = clock()
        self._keeper = keeper
        self.counts = counts or Counts()
        self._lock = RunLock(self.ledger, self.id, output=self.layout.root, keeper=keeper, clock=clock)
        self._lock.acquire(takeover=takeover, patience_s=patience_s)
        try:
            self._open(version=version, rebuild=rebuild)
        except BaseException:
            self.release()
            raise

    def _open(self, *, version: str, rebuild: bool) -> None:
        self.layout.make()
        self.manifest = Manifest(self.layout)
        log = CommitLog(self.layout)
        saved = checkpoint.load(self.layout, self.info.units)
        swept = saved.n
        state = log.replay(self.info.units, start=saved)
        self.committer = Committer(
            self.layout,
            self.info,
            log,
            state,
            writer=self.id,
            version=version,
            swept=swept,
            on_progress=self._keeper.note_progress if self._keeper is not None else lambda: None,
        )
        # Units may have been added between the two looks at the folder.
        state.grow(len(self.manifest))
        self.finished = state.closed
        if self.finished:
            self.committer.sweep()
            self.committer.join()
            staging.sweep(self.layout, unfinished=False)  # of a writer that was killed while it did that
        else:
            self.committer.take_epoch()
        self.acceptor = Acceptor(
            self.layout, self.manifest, self.info, fingerprint=state.fingerprint, widths=state.widths
        )
        self.buffer = Buffer(part_rows=self.info.part_rows, clock=self._clock)
        self.workload = TokenEstimate()
        if not self.finished:
            self.workload.count(self.manifest, state)
            self.workload.remember(self.manifest, log, state)
        self.queue = RunQueue(self.ledger, self.record, self.committer, self.workload, nonce=self.id)
        self.inbox = Inbox(self.ledger.results, self._clock)
        self._reconciled = self._requests_at = self._clock()
        if rebuild:
            staging.sweep(self.layout, unfinished=True)
        staging.leave_nonce(self.layout, self.id)
        self.control = load_control(self.layout)
        self._note_requests()
        if rebuild or not self._adopt():
            self._rebuild()
        self.queue.grow(len(self.manifest))
        self.ledger.restore(self.control)
        # The last writer may have been killed before it said so, and the broker may come from before that.
        self.queue.set_over(is_over=self.finished)
        self.log.info(
            "run_opened", run=self.record.run, epoch=self.committer.epoch, units=len(self.manifest), done=state.count
        )

    # --- what users ask for ---

    @property
    def cancelled(self) -> bool:
        """True if the run is cancelled and unfinished, so that nothing is done until a user resumes it."""
        return self.control.state == RunState.CANCELLED and not self.finished

    def _note_requests(self) -> None:
        """Write requested changes to the output folder, and confirm them to the broker."""
        if not (requests := self.ledger.requested()):
            return
        control = self.control.with_changes(requests)
        if control != self.control:
            save_control(self.layout, control)
            self.log.info("control_noted", run=self.record.run, **control.fields())
        self.control = control
        self.ledger.restore(control)

    # --- the queue and the log agree ---

    def _adopt(self) -> bool:
        """Continue with the queue in the broker; False if it does not fit the commit log."""
        if not self.queue.adopt():
            return False
        self.inbox.read_again()
        return True

    def _rebuild(self) -> None:
        state = self.committer.state
        self.buffer.drain()
        self.acceptor.fingerprint, self.acceptor.widths = state.fingerprint, state.widths
        self.queue.rebuild(len(self.manifest), self.control)
        self._late.clear()
        self.inbox.start_empty()

    def _housekeep(self) -> None:
        self._lock.renew()
        now = self._clock()
        if now - self._requests_at > ASKED_S:
            self._requests_at = now
            self._note_requests()
        if now - self._reconciled > RECONCILE_S:
            self._reconciled = now
            self._grow()
            self.ledger.restore(self.control)
            if self.queue.is_lost():
                self.log.warning("queue_lost", run=self.record.run)
                self._rebuild()
            elif not self.buffer.results and self.queue.differs() and not self._adopt():
                self._rebuild()
            elif self.inbox.has_lost(held=len(self.buffer.results) + len(self._late)):
                self.inbox.read_again()
            else:
                self.queue.repair(len(self.manifest), self.acceptor.fingerprint, self.control)

    def _grow(self) -> None:
        """Take up the units of a generation that was added since the last look, also if the log was closed."""
        if not generations.exists(self.layout.manifest, len(self.manifest.generations) + 1):
            return
        self.manifest = self.acceptor.manifest = Manifest(self.layout)
        self.info = load_run(self.layout.root)
        self.committer.state.grow(len(self.manifest))
        if not self.committer.epoch:
            self.committer.take_epoch()
        self.finished = False
        self.workload.count(self.manifest, self.committer.state)
        self.queue.grow(len(self.manifest))
        self.queue.set_over(is_over=False)
        self.log.info("run_grew", run=self.record.run, units=len(self.manifest), done=self.committer.state.count)

    # --- results ---

    def step(self) -> int:
        """Read and take what is there, commit what is due; returns the number of results read."""
        self._housekeep()
        entries = [*self._late_entries(), *self.inbox.read()]
        sent, invalid = self.ledger.sent(entries, len(self.manifest))
        if invalid:
            self.queue.mark([(entry.receipt, None) for entry in invalid])
        for entry, sender, published in sent:
            self._accept(entry, sender, published=published)
        if self.buffer.is_due() or self._nothing_else_outstanding():
            self.flush()
        return len(entries)

    def _accept(self, entry: Entry, sender: Sender, *, published: bool) -> None:
        u, unit_id = sender.u, self.manifest.unit_id(sender.u)
        until, _ = self._late.pop(entry.id, (self._clock() + LATE_S, entry))
        if self.committer.state.is_done(u):
            self.queue.mark([(entry.receipt, u)])
            staging.drop_staged(self.layout, entry, unit_id)
            return
        if entry.receipt in self.buffer.entries:
            return
        if not published:
            # Its file stays: it may be that of the worker that holds the lease.
            self.ledger.note_unleased(sender)
            self.queue.mark([(entry.receipt, None)])
            return
        if u in self.buffer.units:
            self.queue.mark([(entry.receipt, None)])
            staging.drop_staged(self.layout, entry, unit_id)
            return
        try:
            result = self.acceptor.accept(entry)
        except Rejected as error:
            if error.may_come and self._clock() < until:
                self._late[entry.id] = until, entry
                return
            self._refuse(entry.receipt, sender, error)
            staging.drop_staged(self.layout, entry, unit_id)
            return
        if not self.buffer.fits(result):
            self.flush()
        self.buffer.add(result)

    def _refuse(self, receipt: str, sender: Sender, error: Rejected) -> None:
        """Have the unit of a result run again, charged."""
        self.counts.rejected[error.code] += 1
        worker = sender.worker
        self.log.warning("result_rejected", run=self.record.run, u=sender.u, worker=worker, code=error.code, why=error)
        self.ledger.reject(receipt, sender.u, sender.token, error.code, f"{error} (said by worker {worker})")

    def _late_entries(self) -> list[Entry]:
        """Results whose files were not there yet, to be looked at again now."""
        if not self._late or self._clock() < self._late_at:
            return []
        self._late_at = self._clock() + LATE_LOOK_S
        return [entry for _, entry in self._late.values()]

    def _nothing_else_outstanding(self) -> bool:
        return not self.finished and self.committer.state.count + len(self.buffer.units) == len(self.manifest)

    def flush(self) -> None:
        """Commit what is buffered, then close the log if nothing is left."""
        if results := self.buffer.drain():
            self.committer.fingerprint = self.acceptor.fingerprint
            began = time.monotonic()
            commit, results = self._committed(results)
            if commit is not None:
                self.counts.committed(commit, time.monotonic() - began)
                for result in results:
                    self.workload.committed(self.manifest.unit_size(result.u), result.tokens)
                self.queue.mark([(result.entry, result.u) for result in results])
                for result in results:
                    if result.staged:
                        staging.drop_ref(self.layout, result.staged)
                self.log.info("committed", run=self.record.run, n=commit.n, taken=len(results), **commit.totals)
        self._grow()
        state = self.committer.state
        if state.count == len(self.manifest) and not self.finished:
            if self.queue.differs():
                self.queue.adopt()  # bits were lost, and a finished run is not checked again
            self.committer.close(self.queue.timing())
            self.finished = True
            staging.sweep(self.layout, unfinished=False)
            self.queue.set_over(is_over=True)
            self.log.info("run_closed", run=self.record.run, **state.totals())

    def _committed(self, results: list[Accepted]) -> tuple[Commit | None, list[Accepted]]:
        """The record of results, and those that it has: without those whose part has been lost since they were
        accepted. Their units run again, and no other result waits for them."""
        while results:
            try:
                return self.committer.commit(results), results
            except LostPartError as lost:
                self._refuse(lost.result.entry, Sender(u=lost.result.u, token=lost.result.token), lost.why)
                staging.drop_ref(self.layout, lost.result.staged)
                results = [result for result in results if result is not lost.result]
        return None, results

    def drain(self) -> None:
        """Commit everything that is published now, and note the changes requested until now."""
        self._note_requests()
        while self.step():
            pass
        self.flush()

    def release(self) -> None:
        """Drop the lock, so that the next writer can start at once."""
        self._lock.release()


class Inbox:
    """Results of one run in order of delivery; those delivered before and not acknowledged come first.

    Attributes:
        has_more: whether more results may wait: the last read returned as many as it asked for.
    """

    def __init__(self, stream: ResultStream, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._looked = float("-inf")
        self._is_overfull = False
        self.has_more = True
        self._count = 16
        self._delivered_after: str | None = "0"

    def read(self) -> list[Entry]:
        """The next results; empty if there are none now."""
        # Nobody but a hostile worker makes the stream so large that what is read at once could be too much to hold.
        if (now := self._clock()) - self._looked > OVERFULL_S:
            self._looked, self._is_overfull = now, self._stream.is_overfull()
        count = 1 if self._is_overfull else self._count
        if self._delivered_after is not None:
            # What was delivered to us before a restart comes first, to its end.
            delivered = self._stream.read(self._delivered_after, count=count, block_ms=None)
            if delivered:
                entries = self._readable(delivered)
                self._delivered_after = entries[-1].id if entries else self._delivered_after
                self.has_more = True
                return entries
            self._delivered_after = None
        entries = self._stream.read(">", count=count, block_ms=None)
        self.has_more = len(entries) == count
        if len(readable := self._readable(entries)) < len(entries):
            self._delivered_after, self.has_more = "0", True
            return readable
        size = sum(len(value) for entry in entries for value in entry.fields.values())
        if size > READ_BYTES:
            self._count = max(1, READ_BYTES * len(entries) // size)
        elif size < READ_BYTES // 8 and len(entries) == self._count:
            self._count = min(512, self._count * 2)
        return entries

    def _readable(self, entries: list[Entry]) -> list[Entry]:
        """The entries up to the first of several that was too large beside the others: from there on each is read by
        itself."""
        if len(entries) == 1 or all(entry.is_whole for entry in entries):
            return entries
        self._count = 1
        return list(itertools.takewhile(lambda entry: entry.is_whole, entries))

    def read_again(self) -> None:
        """Start again with the entries that were delivered and are not acknowledged."""
        self._delivered_after = "0"

    def start_empty(self) -> None:
        """Note that the stream is new: nothing of it was delivered."""
        self._delivered_after = None

    def has_lost(self, held: int) -> bool:
        """True if more was delivered than the `held` results that wait for a commit: a reply was lost on its way."""
        return self._delivered_after is None and self._stream.unacknowledged() > held


@dataclass(slots=True)
class Counts:
    """Counters of the writing thread; other threads read them.

    Attributes:
        commits: records with rows or failures.
        parts, bytes: files that they name, and their size.
        rows, failures: in these.
        rejected: code -> number of refused results.
        seconds: of each commit.
    """

    commits: int = 0
    parts: int = 0
    bytes: int = 0
    rows: int = 0
    failures: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    seconds: Histogram = field(default_factory=lambda: Histogram(COMMIT_S))

    def committed(self, commit: Commit, took_s: float) -> None:
        """Count a record that took `took_s` seconds."""
        self.commits += 1
        self.parts += len(commit.files)
        self.bytes += sum(file.bytes for file in commit.files)
        self.rows += sum(unit.rows for unit in commit.units)
        self.failures += sum(unit.failures for unit in commit.units)
        self.seconds.observe(took_s)
