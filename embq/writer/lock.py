"""Lock on a run in the broker, which warns a second writer. The commit log does not depend on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from embq.core.errors import BrokerError, TryLaterError
from embq.core.queue.ledger import Ledger
from embq.core.storage.paths import Place

LOCK_TTL_S = 5.0
"""A writer that was killed leaves its lock behind for this long, and the next one must be at work within 10 s."""
LOCK_PATIENCE_S = 2 * LOCK_TTL_S
"""A writer that was killed leaves its lock behind for one term; one that renews it is alive."""
RENEW_S = 1.5
WEDGED_S = 60.0
"""A lock says that work moves, not that a thread lives: a writer that is stuck for this long loses its locks."""


class LockKeeper:
    """Renews the locks of one process in a thread, because one step may take longer than a lock lasts.

    Otherwise two writers would fence out each other's commits to a slow disk, and nothing would ever be committed.

    Args:
        clock: monotonic seconds.
        beat: called too, whenever work moves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, beat: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._beat = beat
        self._progress_at = clock()
        self._held: dict[str, Ledger] = {}
        self._mutex = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="locks", daemon=True)

    def start(self) -> None:
        """Start renewing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing; does not wait for a broker that is away."""
        self._stopped.set()
        self._thread.join(1.0)

    def hold(self, ledger: Ledger, writer: str) -> None:
        """Keep the lock that `writer` has on the ledger's run."""
        with self._mutex:
            self._held[writer] = ledger

    def let_go(self, writer: str) -> None:
        """Stop renewing; when this returns, no renewal is under way that could take the lock once more."""
        with self._mutex:
            self._held.pop(writer, None)

    def note_progress(self) -> None:
        """Note that the writer has completed a step."""
        self._progress_at = self._clock()
        self._beat()

    def renew(self) -> None:
        """Renew every lock that this process still holds."""
        if self._clock() - self._progress_at > WEDGED_S:
            return
        for writer in list(self._held):
            with self._mutex:
                ledger = self._held.get(writer)
                # Another's lock is not ours to keep; the writer sees it too, and stops.
                if ledger is not None and ledger.lock_writer(writer, ttl_s=LOCK_TTL_S):
                    del self._held[writer]

    def _run(self) -> None:
        while not self._stopped.wait(RENEW_S):
            with suppress(RedisError, BrokerError):  # the writer itself meets the same error, and ends with it
                self.renew()


class RunLock:
    """The lock of one writer on its run.

    Args:
        owner: id of the writer.
        output: the run's folder, for the message to a writer that has to wait.
        keeper: renews the lock where one step takes long; None leaves that to `renew`.
        clock: monotonic seconds.
    """

    def __init__(
        self, ledger: Ledger, owner: str, *, output: Place, keeper: LockKeeper | None, clock: Callable[[], float]
    ) -> None:
        self._ledger = ledger
        self._owner = owner
        self._output = output
        self._keeper = keeper
        self._clock = clock
        self._renewed = 0.0

    def acquire(self, *, takeover: bool, patience_s: float) -> None:
        """Take the lock, after a wait for a holder that may be dead; TryLaterError if that one is alive."""
        deadline = self._clock() + patience_s
        while holder := self._ledger.lock_writer(self._owner, ttl_s=LOCK_TTL_S, takeover=takeover):
            if self._clock() >= deadline:
                raise TryLaterError(
                    f"another writer ({holder}) is at work on {self._output}",
                    next_step="let it work, or give --takeover if you know that it is stuck",
                )
            time.sleep(0.2)
        if self._keeper is not None:
            self._keeper.hold(self._ledger, self._owner)
        self._renewed = self._clock()

    def renew(self) -> None:
        """Renew the lock if that is due; TryLaterError if another writer has taken the run over."""
        now = self._clock()
        if now - self._renewed > RENEW_S:
            self._renewed = now
            if holder := self._ledger.lock_writer(self._owner, ttl_s=LOCK_TTL_S):
                raise TryLaterError(f"writer {holder} has taken over {self._output}; this one stops")

    def release(self) -> None:
        """Drop the lock, so that the next writer can start at once."""
        if self._keeper is not None:
            self._keeper.let_go(self._owner)
        self._ledger.unlock_writer(self._owner)
