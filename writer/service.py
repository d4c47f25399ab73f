"""The writer of one run: results in, committed parts out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import redis

from core import checkpoint, generations
from core.commits import CommitLog
from core.control import load_control, save_control
from core.durable import drop, output_error
from core.errors import TryLaterError
from core.layout import Layout
from core.ledger import Entry, Ledger
from core.log import Events
from core.manifest import Manifest
from core.objects import place
from core.registry import RunRecord, live_workers, register
from core.run_info import load_run
from core.scripts import load_scripts
from writer.accept import Acceptor, Rejected, staged_path
from writer.buffer import Buffer
from writer.commit import Committer
from writer.counts import Counts
from writer.lock import LOCK_TTL_S, RENEW_S, LockKeeper
from writer.workload import Workload

LOCK_PATIENCE_S = 2 * LOCK_TTL_S
"""A writer that was killed leaves its lock behind for one term; one that renews it is alive."""
RECONCILE_S = 2.0
ASKED_S = 0.5
"""A user who pauses a run waits until that is noted in the output folder."""
READ_BYTES = 64 * 1024 * 1024
"""Payload aimed at per read of the stream; bounds what the writer holds beside its buffer."""


class RunWriter:
    """The writer of one run.

    Args:
        client: a patient client.
        record: the run, as the broker knows it.
        takeover: fence out a writer whose lock is alive.
        rebuild: make the queue anew even where the broker knows the run, because no worker of before is alive.
        patience_s: how long to wait for the lock of a writer that may be dead.
        keeper: renews the lock where one step takes long; without it only `step` does.
        counts: where what is done is counted.

    Raises TryLaterError where another writer holds the run.
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
        self._keeper = keeper
        self.counts = counts or Counts()
        self._take_lock(takeover=takeover, patience_s=patience_s)
        try:
            self._open(version=version, rebuild=rebuild)
        except BaseException:
            self.release()
            raise

    def _open(self, *, version: str, rebuild: bool) -> None:
        self.layout.make()
        self.manifest = Manifest(self.layout)
        log = CommitLog(self.layout)
        kept = checkpoint.load(self.layout, self.info.units)
        swept = kept.n
        state = log.replay(self.info.units, start=kept)
        self.committer = Committer(
            self.layout,
            self.info,
            log,
            state,
            writer=self.id,
            version=version,
            swept=swept,
            moved=self._keeper.moved if self._keeper is not None else lambda: None,
        )
        # Units may have been added between the two looks at the folder.
        state.grow(len(self.manifest))
        self.finished = state.closed
        if self.finished:
            self.committer.sweep()
            self.committer.join()
        else:
            self.committer.take_epoch()
        self.acceptor = Acceptor(
            self.layout, self.manifest, self.info, fingerprint=state.fingerprint, widths=state.widths
        )
        self.buffer = Buffer(part_rows=self.info.part_rows, clock=self._clock)
        self.workload = Workload()
        if not self.finished:
            self.workload.count(self.manifest, state)
            self.workload.remember(self.manifest, log, state)
        self._rebuilds = 0
        self._renewed = self._reconciled = self._asked = self._clock()
        self._read_count = 16
        self._pending_after: str | None = "0"
        if rebuild:
            self._sweep_staging(unfinished=True)
        self._leave_nonce()
        self.control = load_control(self.layout)
        self._note_wishes()
        if rebuild or not self._adopt():
            self._rebuild()
        self.ledger.grow(self.committer.generation, len(self.manifest))
        self.ledger.restore(self.control)
        self.log.info(
            "run_opened", run=self.record.run, epoch=self.committer.epoch, units=len(self.manifest), done=state.count
        )

    def _take_lock(self, *, takeover: bool, patience_s: float) -> None:
        deadline = self._clock() + patience_s
        while holder := self.ledger.lock_writer(self.id, ttl_s=LOCK_TTL_S, takeover=takeover):
            if self._clock() >= deadline:
                raise TryLaterError(
                    f"another writer ({holder}) is at work on {self.layout.root}",
                    next_step="let it work, or give --takeover if you know that it is stuck",
                )
            time.sleep(0.2)
        if self._keeper is not None:
            self._keeper.hold(self.ledger, self.id)

    def _leave_nonce(self) -> None:
        """Workers that can read this file share storage with us and may hand over large results by name."""
        nonce = self.layout.staging / ".shared"
        try:
            nonce.write_text(self.id)
        except OSError as error:
            raise output_error(error, nonce) from error
        self._nonce = self.id

    # --- what users ask for ---

    @property
    def cancelled(self) -> bool:
        """Whether nothing more is to be done until somebody asks for it."""
        return self.control.state == "cancelled" and not self.finished

    def _note_wishes(self) -> None:
        """Write what was asked for to the output folder, and tell the broker that it is there."""
        if not (wishes := self.ledger.asked()):
            return
        control = self.control.with_wishes(wishes)
        if control != self.control:
            save_control(self.layout, control)
            self.log.info("control_noted", run=self.record.run, **control.fields())
        self.control = control
        self.ledger.restore(control)

    # --- the queue and the log agree ---

    def _adopt(self) -> bool:
        """Go on with the queue that the broker has; False where it does not fit the commit log."""
        gen = self.ledger.gen()
        state = self.committer.state
        if not gen:
            return False
        there = self.ledger.done_bits().ljust(len(state.done), b"\0")
        if len(there) > len(state.done) or any(a & ~b for a, b in zip(there, state.done, strict=True)):
            return False
        self.committer.generation = gen
        missing = [
            8 * i + bit
            for i, (a, b) in enumerate(zip(there, state.done, strict=True))
            if a != b
            for bit in range(8)
            if (b & ~a) & (0x80 >> bit)
        ]
        self._mark([("", u) for u in missing])
        self.ledger.client.hset(self.ledger.keys[0], "nonce", self._nonce)
        self.ledger.make_group()
        self._pending_after = "0"
        return True

    def _rebuild(self) -> None:
        state = self.committer.state
        gen = f"{self.committer.epoch or state.epoch}-{self._rebuilds}"
        self._rebuilds += 1
        self.buffer.take()
        self.acceptor.fingerprint, self.acceptor.widths = state.fingerprint, state.widths
        register(self.ledger.client, self.record)
        self.ledger.rebuild(
            gen=gen,
            total=len(self.manifest),
            done=bytes(state.done),
            counters={**self._counters(), "fingerprint": state.fingerprint, "nonce": self._nonce},
            control=self.control,
        )
        self.committer.generation = gen
        self._pending_after = None
        self.log.info("queue_built", run=self.record.run, gen=gen, done=state.count)

    def _counters(self) -> dict[str, int]:
        state = self.committer.state
        names = ("rows", "failures", "quarantined", "truncated", "tokens", "n")
        left = self.workload.tokens_left
        return {name: getattr(state, name) for name in names} | ({} if left is None else {"tokens_left": left})

    def _mark(self, pairs: list[tuple[str, int | None]]) -> int:
        state = self.committer.state
        return self.ledger.commit(
            pairs,
            rows=state.rows,
            failures=state.failures,
            quarantined=state.quarantined,
            truncated=state.truncated,
            tokens=state.tokens,
            tokens_left=self.workload.tokens_left,
            number=state.n,
        )

    def _housekeep(self) -> None:
        now = self._clock()
        if now - self._renewed > RENEW_S:
            self._renewed = now
            if holder := self.ledger.lock_writer(self.id, ttl_s=LOCK_TTL_S):
                raise TryLaterError(f"writer {holder} has taken over {self.layout.root}; this one stops")
        if now - self._asked > ASKED_S:
            self._asked = now
            self._note_wishes()
        if now - self._reconciled > RECONCILE_S:
            self._reconciled = now
            self._grow()
            self.ledger.restore(self.control)
            if self.ledger.gen() != self.committer.generation:
                self.log.warning("queue_lost", run=self.record.run)
                self._rebuild()
            elif not self.buffer.results and self._bits_differ() and not self._adopt():
                self._rebuild()
            elif self._pending_after is None and self.ledger.unacknowledged() > len(self.buffer.results):
                self._pending_after = "0"  # the reply that held the others was lost

    def _grow(self) -> None:
        """Take up the units of a generation that was added since we looked, also where the log was closed before."""
        if not generations.exists(self.layout.manifest, len(self.manifest.generations) + 1):
            return
        self.manifest = self.acceptor.manifest = Manifest(self.layout)
        self.info = load_run(self.layout.root)
        self.committer.state.grow(len(self.manifest))
        if not self.committer.epoch:
            self.committer.take_epoch()
        self.finished = False
        self.workload.count(self.manifest, self.committer.state)
        self.ledger.grow(self.committer.generation, len(self.manifest))
        self.log.info("run_grew", run=self.record.run, units=len(self.manifest), done=self.committer.state.count)

    def _bits_differ(self) -> bool:
        return int(self.ledger.meta().get("done", 0)) != self.committer.state.count

    # --- results ---

    def step(self) -> int:
        """Read and take what is there, commit what is due; gives the number of results read."""
        self._housekeep()
        entries = self._read()
        for entry in entries:
            self._take(entry)
        if self.buffer.is_due() or self._nothing_else_outstanding():
            self.flush()
        return len(entries)

    def _read(self) -> list[Entry]:
        if self._pending_after is not None:
            # What was delivered to us before a restart comes first, to its end.
            entries = self.ledger.read_results(self._pending_after, count=self._read_count, block_ms=None)
            self._pending_after = entries[-1].id if entries else None
            if entries:
                return entries
        entries = self.ledger.read_results(">", count=self._read_count, block_ms=None)
        size = sum(len(entry.fields.get("data", b"")) for entry in entries)
        if size > READ_BYTES:
            self._read_count = max(1, self._read_count // 2)
        elif size < READ_BYTES // 8 and len(entries) == self._read_count:
            self._read_count = min(512, self._read_count * 2)
        return entries

    def _take(self, entry: Entry) -> None:
        if not entry.fields:
            self._mark([(entry.id, None)])
            return
        u, token = int(entry.fields["u"]), entry.fields["token"].decode()
        if self.committer.state.is_done(u):
            self._mark([(entry.id, u)])
            self._drop_staged(entry)
            return
        if entry.id in self.buffer.entries:
            return
        if u in self.buffer.units:
            self._mark([(entry.id, None)])
            self._drop_staged(entry)
            return
        try:
            result = self.acceptor.accept(entry)
        except Rejected as error:
            self.counts.rejected[error.code] += 1
            self.log.warning("result_rejected", run=self.record.run, u=u, code=error.code, why=error)
            self.ledger.reject(entry.id, u, token, error.code, str(error))
            self._drop_staged(entry)
            return
        if not self.buffer.fits(result):
            self.flush()
        self.buffer.add(result)

    def _drop_staged(self, entry: Entry) -> None:
        ref = entry.fields.get("ref", b"").decode("utf-8", "replace")
        if path := staged_path(self.layout, ref):
            drop(path)

    def _nothing_else_outstanding(self) -> bool:
        return not self.finished and self.committer.state.count + len(self.buffer.units) == len(self.manifest)

    def _sweep_staging(self, *, unfinished: bool) -> None:
        """Remove results that nobody will take any more, such as those of workers that died before they published.

        A worker that has been overtaken may still be writing its file, and removes it itself; it is in the way only
        where no worker is alive.
        """
        for path in self.layout.staging.iterdir():
            if unfinished or not path.name.startswith("."):
                drop(path)

    def flush(self) -> None:
        """Commit what is buffered, then close the log where nothing is left."""
        results = self.buffer.take()
        if results:
            self.committer.fingerprint = self.acceptor.fingerprint
            began = time.monotonic()
            commit = self.committer.commit(results)
            self.counts.committed(commit, time.monotonic() - began)
            for result in results:
                self.workload.committed(self.manifest.extent(result.u), result.tokens)
            self._mark([(result.entry, result.u) for result in results])
            for result in results:
                if result.staged:
                    drop(self.layout.staging / result.staged)
            self.log.info("committed", run=self.record.run, n=commit.n, taken=len(results), **commit.totals)
        self._grow()
        state = self.committer.state
        if state.count == len(self.manifest) and not self.finished:
            self.committer.close(self._timing())
            self.finished = True
            self._sweep_staging(unfinished=False)
            self.log.info("run_closed", run=self.record.run, **state.totals())

    def _timing(self) -> dict[str, float]:
        """What the run took, by the broker's clock; information for `embq status` once the broker is gone."""
        meta = self.ledger.meta()
        opened, first, last = (int(meta.get(name, 0)) for name in ("opened_ms", "began_ms", "last_commit_ms"))
        embed_s = (last - first) / 1000 if first else 0.0
        rows = self.committer.state.rows - int(meta.get("rows_before", 0))
        return {
            "load_s": max((float(w.get("load_s", 0)) for w in live_workers(self.ledger.client)), default=0.0),
            "embed_s": round(embed_s, 3),
            "wall_s": round((last - opened) / 1000, 3) if opened else 0.0,
            "rows_per_s": round(rows / embed_s, 2) if embed_s else 0.0,
        }

    def drain(self) -> None:
        """Take and commit everything that is published now, and note what was asked for until now."""
        self._note_wishes()
        while self.step():
            pass
        self.flush()

    def release(self) -> None:
        """Let the next writer start at once."""
        if self._keeper is not None:
            self._keeper.let_go(self.id)
        self.ledger.unlock_writer(self.id)
