"""History of a run from its commit log: rows and failures over time, and its units by state.

All of it is read from the log again after a restart; times are those of the records, by their writer's clock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from embq.app.status.run_monitor import written_at
from embq.core.queue.ledger import Ledger
from embq.core.run import generations
from embq.core.run.commit_log import CommitLog, LogState
from embq.core.run.control import RunState
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import load_run
from embq.core.storage.paths import Place
from embq.retrieval.ui.fleet.sources import RunView
from embq.retrieval.ui.fleet.unit_map import UnitMap

MOST_POINTS = 1_000
"""Of a history: when there are more, every second one is dropped."""
RECORDS_AT_ONCE = 1_000
"""Read in one step; about a quarter of a second."""
KEPT = 16
"""Histories in memory."""
MOST_KEYS = 20_000
"""Units in flight, or published, above which they are not shown one by one."""
MOST_BITS = 4_000_000
"""Units of a run whose bitmap is read from the broker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A map of units.

    Attributes:
        states: of each cell, an index of `embq.retrieval.ui.fleet.unit_map.STATES`.
        bin: units of a cell.
        units: of the run.
    """

    states: np.ndarray
    bin: int
    units: int


class RunHistory:
    """Rows, failures and states of units of a run, as far as its log was read. Thread-safe.

    Args:
        root: output folder.
    """

    def __init__(self, root: Place) -> None:
        self._lock = threading.Lock()
        self._layout = Layout(root)
        info = load_run(root)
        self._generations = len(info.added)
        self._log, self._state = CommitLog(self._layout), LogState(units=info.units)
        self._retried: dict[int, int] = {}
        self._points: list[tuple[float, int, int]] = []
        self._every, self._since = 1, 0
        self._units = UnitMap(info.units)

    def advance(self) -> bool:
        """Read the next records; False if more are left. Raises OutputError if the log is damaged."""
        with self._lock:
            if generations.exists(self._layout.manifest, self._generations + 1):
                info = load_run(self._layout.root)
                self._generations = len(info.added)
                self._state.grow(info.units)
                self._units.grow(info.units)
            for count, commit in enumerate(self._log.read(after=self._state.n), start=1):
                self._log.advance(self._state, commit)
                self._units.grow(self._state.units)
                self._units.commit(commit.units, self._failed)
                if (at_s := written_at(commit.created_at)) is not None:
                    self._add(at_s)
                if count == RECORDS_AT_ONCE:
                    return False
            return True

    def points(self) -> list[tuple[float, int, int]]:
        """(seconds since the epoch, committed rows, standing failures) after records, at most about `MOST_POINTS`."""
        with self._lock:
            return list(self._points)

    def cells(self, received: Iterable[int], in_flight: Iterable[int]) -> Cells:
        """The map of the units; see `UnitMap.cells`."""
        with self._lock:
            return Cells(states=self._units.cells(received, in_flight), bin=self._units.bin, units=self._units.units)

    def _add(self, at_s: float) -> None:
        point = (max(at_s, self._points[-1][0]) if self._points else at_s, self._state.rows, self._state.failures)
        if self._since and self._points:
            self._points[-1] = point  # the last record always is the last point
        else:
            self._points.append(point)
        self._since = (self._since + 1) % self._every
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::-1][::2][::-1]
            self._every, self._since = 2 * self._every, 0

    def _failed(self, u: int) -> int | None:
        if u not in self._retried:
            listed = Manifest(self._layout).retries()
            self._retried |= {number: unit.retry.failed for number, unit in listed if unit.retry is not None}
        return self._retried.get(u)


class Histories:
    """The histories of the runs that were looked at last. Thread-safe.

    Attributes:
        of: the history of a run by its id and folder, made if there is none yet.
    """

    def __init__(self) -> None:
        self.of = lru_cache(KEPT)(lambda _run, root: RunHistory(root))  # a folder may get another run


def charts(view: RunView, histories: Histories, rates: list[tuple[float, float]]) -> dict[str, Any]:
    """JSON-ready columns for the charts of a run; `complete` is False if the log was not read to its end yet.

    Args:
        rates: rows per second in the last ten minutes, see `Sampler.rates`.
    """
    points: list[tuple[float, int, int]] = []
    complete = True
    if view.root is not None:
        history = histories.of(view.progress.run, view.root)
        complete = history.advance()
        points = history.points()
    return {
        "schema": 1,
        "run": view.progress.run,
        "complete": complete,
        "commits": {
            "at": [round(at, 3) for at, _, _ in points],
            "rows": [rows for _, rows, _ in points],
            "failures": [failures for _, _, failures in points],
        },
        "rate": {"at": [round(at, 3) for at, _ in rates], "rows_per_s": [round(rate, 2) for _, rate in rates]},
    }


def cells_of(view: RunView, histories: Histories) -> Cells:
    """The map of a run's units now, with those in flight.

    Raises redis.exceptions.RedisError if the broker is away, OutputError if the log is damaged.
    """
    progress, received, in_flight = view.progress, [], []
    ledger = Ledger(view.client, progress.run, scripts={}) if view.client is not None else None
    if ledger is not None and progress.state != RunState.DONE:
        received = ledger.published() if progress.received <= MOST_KEYS else []
        in_flight = ledger.leased() if progress.in_flight <= MOST_KEYS else []
    if view.root is not None:
        history = histories.of(progress.run, view.root)
        history.advance()
        return history.cells(received, in_flight)
    unit_map = UnitMap(progress.units_total)
    if ledger is not None and unit_map.units <= MOST_BITS:
        unit_map.done_bits(ledger.done_bits())
    return Cells(states=unit_map.cells(received, in_flight), bin=unit_map.bin, units=unit_map.units)
