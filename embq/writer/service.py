"""Writer process: serves all runs of the broker, or one, in a single thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

from embq.core.errors import EmbqError, InputError, TryLaterError
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, active, restore_active
from embq.core.queue.scripts import Loader, load_scripts
from embq.core.service.log import Events
from embq.core.storage.durable import output_error
from embq.core.storage.paths import ANYWHERE, Outputs, Place, place
from embq.writer.lock import LOCK_PATIENCE_S, LockKeeper
from embq.writer.run_writer import Counts, RunWriter
from embq.writer.uploads import Add, Receiver

IDLE_S = 0.02
LOOK_S = 1.0
RETRY_S = 10.0
"""A run that could not be written (its folder is not mounted, its disk is full) is tried again after this long."""
RESTORE_S = 60.0
"""A run that the broker has lost from those that are not over, or that was announced before these were noted, is found
after this long."""
HELD_S = 15.0
"""A run that another writer holds for longer than a dead one could is worth a line in the log."""


class WriterService:
    """Serves every registered run, or only `only`; without `only` and with `add` it takes uploads as well.

    With `only`, an error of the run ends `serve`. Without, it is logged, and the other runs go on.

    Args:
        beat: called as work moves; nothing of it may take WEDGED_S.
        outputs: where runs may be written. A run elsewhere is logged and not written.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        version: str,
        add: Add | None = None,
        only: str = "",
        takeover: bool = False,
        rebuild: bool = False,
        beat: Callable[[], None] = lambda: None,
        outputs: Outputs = ANYWHERE,
    ) -> None:
        self.client = client
        self.version = version
        self.only = only
        self.takeover = takeover
        self.rebuild = rebuild
        self.log = Events("writer")
        self.runs: dict[str, RunWriter] = {}
        self.counts = Counts()
        self._keeper = LockKeeper(beat=beat)
        self._outputs = outputs
        self._outside: set[str] = set()
        self._active: frozenset[str] = frozenset()
        self._receiver: Receiver | None = None
        if add is not None and not only:
            self._receiver = Receiver(client, add, self._keeper.note_progress, outputs)
        self._restore_at = float("-inf")
        self._opened: set[str] = set()
        self._cancelled: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._held_since: dict[str, float] = {}

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Work until `stopped()`, then drain, commit and let go."""
        self.log.info("started", run=self.only or "all")
        loader = Loader(self.client, load_scripts(self.client))
        looked = float("-inf")
        receiving = 0
        self._keeper.start()
        try:
            while not stopped():
                self._keeper.note_progress()
                if time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    loader.load_missing()
                    self._open_new_runs()
                    receiving += self._receiver is not None
                if receiving and self._receiver is not None:
                    # As long as pieces come, more are looked for at once.
                    receiving = self._receiver.step()
                for run, writer in list(self.runs.items()):
                    self._attend(run, writer, writer.step)
                # Also after results were read: a step costs as much for eight of them as for one.
                if not receiving and not any(writer.inbox.has_more for writer in self.runs.values()):
                    time.sleep(IDLE_S)
            for run, writer in list(self.runs.items()):
                self._attend(run, writer, writer.drain)
        finally:
            for writer in self.runs.values():
                writer.release()
            self._keeper.stop()
        self.log.info("stopped")

    def refused(self) -> int:
        """Runs that the broker knows, that could not be written when they were last tried, or may not be."""
        return len(({*list(self._retry_at), *list(self._outside)} & self._active) - {*list(self.runs)})

    def _attend(self, run: str, writer: RunWriter, action: Callable[[], object]) -> None:
        """Do something for one run; a run that fails, is finished or was cancelled is let go."""
        self._keeper.note_progress()
        try:
            action()
            if writer.cancelled:
                writer.drain()  # what was published before is kept
        except (EmbqError, OSError) as error:
            self._give_up(run, error, writer.layout.root)
            return
        except Exception as error:  # noqa: BLE001 - boundary of one run: the others go on
            self._isolate(run, error)
            return
        if self.only:
            return
        if writer.cancelled:
            self._cancelled.add(run)
        elif not writer.finished or writer.inbox.has_more:  # a broker that came back older has results of its middle
            return
        self.runs.pop(run).release()

    def _open_new_runs(self) -> None:
        now = time.monotonic()
        if not self.only and now >= self._restore_at:
            self._restore_at = now + RESTORE_S
            restore_active(self.client)
        records = active(self.client)
        self._active = frozenset(records)
        for record in records.values():
            is_due = self.only in ("", record.run)
            if record.run in self._cancelled:
                is_due = is_due and bool(Ledger(self.client, record.run, scripts={}).requested())
            is_due = is_due and record.run not in self.runs and self._retry_at.get(record.run, now) <= now
            if is_due and self._may_write(record):
                self._open(record)

    def _may_write(self, record: RunRecord) -> bool:
        try:
            self._outputs.check(record.output)
        except InputError as error:
            if self.only:
                raise
            if record.run not in self._outside:
                self._outside.add(record.run)
                self.log.error("output_refused", run=record.run, why=error.message, next=error.next_step)
            return False
        return True

    def _open(self, record: RunRecord) -> None:
        # Both concern earlier writers. A later one that takes the run over may keep it.
        first = record.run not in self._opened
        self._keeper.note_progress()
        try:
            self.runs[record.run] = RunWriter(
                self.client,
                record,
                version=self.version,
                takeover=self.takeover and first,
                rebuild=self.rebuild and first,
                # Waiting for one run's lock would hold up every other run.
                patience_s=LOCK_PATIENCE_S if self.only else 0.0,
                keeper=self._keeper,
                counts=self.counts,
            )
        except (EmbqError, OSError) as error:
            self._give_up(record.run, error, place(record.output))
        except Exception as error:  # noqa: BLE001 - boundary of one run: the others go on
            self._isolate(record.run, error)
        else:
            self._opened.add(record.run)
            self._retry_at.pop(record.run, None)
            self._cancelled.discard(record.run)
            self._held_since.pop(record.run, None)

    def _give_up(self, run: str, error: EmbqError | OSError, root: Place) -> None:
        if isinstance(error, OSError):
            error = output_error(error, place(error.filename or str(root)))
        if self.only:
            raise error
        writer = self.runs.pop(run, None)
        if writer is not None:
            writer.release()
        if isinstance(error, TryLaterError):
            # Looked at again at every round, so that it goes on as soon as the other one lets go.
            self._tell_of_holder(run, error, at_once=writer is not None)
        else:
            self._retry_at[run] = time.monotonic() + RETRY_S
            self.log.error("run_not_written", run=run, why=error.message, next=error.next_step, retry_s=RETRY_S)

    def _isolate(self, run: str, error: Exception) -> None:
        """Leave a run alone for a while that meets a bug; errors of the broker concern all of them, and end `serve`."""
        if self.only or isinstance(error, redis.RedisError):
            raise error
        self.log.bug("bug", run=run, retry_s=RETRY_S)
        self._retry_at[run] = time.monotonic() + RETRY_S
        if (writer := self.runs.pop(run, None)) is not None:
            writer.release()

    def _tell_of_holder(self, run: str, error: TryLaterError, *, at_once: bool) -> None:
        now = time.monotonic()
        since = self._held_since.setdefault(run, now)
        if at_once or now - since > HELD_S:
            self._held_since[run] = float("inf")  # once is enough
            self.log.warning("run_held", run=run, why=error.message, next=error.next_step)
