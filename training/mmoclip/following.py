"""How far a training is, from the log that it writes, with an honest guess of when it ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from embq.display import PLAIN_EVERY_S, duration
from training.openclip import log

LOOK_S = 0.5


class Following:
    """Shows progress on stderr while a training writes its log.

    One line that is written over on a terminal, a line every 30 s elsewhere.

    Args:
        path: the log; it need not be there yet.
        iterations: that the training will have.
    """

    def __init__(self, path: Path, iterations: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._iterations = iterations
        self._clock = clock
        self._began = clock()
        self._times: list[float] = []
        self._rate = 0.0
        self._read = 0
        self._rest = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="following", daemon=True)

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def line(self) -> str:
        """How far it is now."""
        done, took = len(self._times), self._clock() - self._began
        if not done:
            return f"starting: {duration(took)}; the first iteration takes longest, and is not counted"
        left = "the rest cannot be told before the second iteration"
        if counted := self._times[1:]:
            mean = sum(counted) / len(counted)
            left = f"{mean:.3g} s each, about {duration(mean * (self._iterations - done))} left"
        return f"iteration {done:,} of {self._iterations:,}, {self._rate:,.4g} samples/s, {left}"

    def look(self) -> None:
        """Read what was added to the log."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        self._read += len(data)
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if (found := log.iteration(line, 0)) is not None:
                self._times.append(found.batch_s)
                self._rate = found.per_s

    def _watch(self) -> None:
        terminal = sys.stderr.isatty()
        shown_at = self._clock()
        while not self._over.wait(LOOK_S):
            self.look()
            if terminal:
                sys.stderr.write(f"\r\x1b[K{self.line()}")
                sys.stderr.flush()
            elif self._clock() - shown_at >= PLAIN_EVERY_S:
                shown_at = self._clock()
                sys.stderr.write(self.line() + "\n")
                sys.stderr.flush()
        if terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
