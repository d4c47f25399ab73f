"""The lock on a run: it tells a second writer that one is at work. The commit log does not depend on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from core.errors import BrokerError
from core.ledger import Ledger

LOCK_TTL_S = 5.0
"""A writer that was killed leaves its lock behind for this long, and the next one must be at work within 10 s."""
RENEW_S = 1.5
WEDGED_S = 60.0
"""A lock says that work moves, not that a thread lives: a writer that is stuck for this long loses its locks."""


class LockKeeper:
    """Renews the locks of one process from a thread of its own, because one step may take longer than a lock lasts.

    Without it a commit to a slow disk would be fenced out by a second writer that waits its turn, and that one's by
    the first, so that nothing was ever committed.

    Args:
        clock: monotonic seconds.
        beat: called too, whenever work moves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, beat: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._beat = beat
        self._moved = clock()
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
        """Renew no more; when this returns, no renewal is under way that could take the lock once more."""
        with self._mutex:
            self._held.pop(writer, None)

    def moved(self) -> None:
        """The writer has got a step done."""
        self._moved = self._clock()
        self._beat()

    def renew(self) -> None:
        """Renew every lock that is still ours."""
        if self._clock() - self._moved > WEDGED_S:
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
