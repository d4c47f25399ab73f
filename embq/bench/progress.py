"""How far an experiment is: a line for each run that was measured, on stderr, with what is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.status import Status

from core.process.limits import cores
from core.service.progress_line import duration

BETWEEN_S = 1.5
"""From the end of one run to the beginning of the next, before that was seen."""


class Course:
    """Tells what is done and what is left.

    What is left is said once the first crew is loaded, and is reckoned from what loads and runs took so far.

    Args:
        crews: worker processes of each crew that will be loaded.
        runs: that will be measured.
        seconds: that a run takes, about, before any was seen.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        crews: list[int],
        runs: int,
        seconds: float,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runs = runs
        self.done = 0
        self._crews = list(crews)
        self._seconds = seconds
        self._clock = clock
        self._console = console or Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._now = ""
        self._at = clock()
        self._load_s: list[float] = []
        self._run_s: list[float] = []

    def __enter__(self) -> Course:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def loading(self, processes: int) -> None:
        """The model is being loaded into so many worker processes."""
        self._next(f"loading the model into {processes} worker process{'es' if processes > 1 else ''}")

    def loaded(self, processes: int) -> None:
        """It is; they are warmed up next."""
        self._crews.remove(processes)
        self._load_s.append((self._clock() - self._at) / _rounds(processes))
        self._next("warming up")

    def begins(self, condition: str) -> None:
        """A run of a condition begins."""
        self._next(f"{condition}, run {self.done + 1} of {self.runs}")

    def ended(self, rate: float) -> None:
        """It is over."""
        self.done += 1
        self._run_s.append(self._clock() - self._at)
        left = f"; about {duration(self.left_s() or 0.0)} left" if self.done < self.runs else ""
        self._console.print(f"{self._now}: {rate:,.1f} records/s{left}", markup=False)

    def left_s(self) -> float | None:
        """Seconds until the end; None where nothing tells yet."""
        if not self._load_s:
            return None
        load = sum(self._load_s) / len(self._load_s)
        run = sum(self._run_s) / len(self._run_s) if self._run_s else self._seconds + BETWEEN_S
        # A crew is loaded, and warmed up for about half a run.
        return sum(load * _rounds(size) + run / 2 for size in self._crews) + (self.runs - self.done) * run

    def look(self) -> None:
        """Show that time goes by."""
        if self._status is not None:
            left = self.left_s()
            about = f"; about {duration(left)} left" if left is not None else ""
            self._status.update(f"{self._now}, {self._clock() - self._at:.0f} s{about}")

    def _next(self, what: str) -> None:
        self._now, self._at = what, self._clock()
        self.look()


def _rounds(processes: int) -> int:
    """How often as long as one process so many take to load: they share the cores."""
    return math.ceil(processes / cores())
