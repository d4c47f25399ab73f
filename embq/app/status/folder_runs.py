"""The runs in and below a folder of this machine, with the private servers of `embq run` if some work on them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.exceptions import RedisError

from embq.app.status.broker_snapshot import BrokerSnapshot, Reports, take_snapshots
from embq.app.status.fleet import FleetStatus, fleet_of
from embq.app.status.run_monitor import RunMonitor
from embq.app.status.run_progress import RunProgress
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import EmbqError
from embq.core.queue.heartbeats import live_workers, services
from embq.core.queue.runs import RunRecord, registered
from embq.core.run.layout import Layout

DEPTH = 5
"""Folders between a folder that a user names and a run in it."""
MOST_FOLDERS, MOST_RUNS = 20_000, 1_000
"""Limits of one search for runs."""
SEARCH_S = 10.0
"""Between two searches for new runs."""
SEARCH_REST = 20
"""The same, in times of a search: of a large tree it takes seconds."""
SERVER_S = 2.0
"""Between two looks for the server of an `embq run`."""


@dataclass(frozen=True, slots=True)
class FolderRunState:
    """A run at one moment.

    Attributes:
        client: the server of the `embq run` that works on it; None if none does.
        fleet: its workers and services; None without a server.
    """

    monitor: RunMonitor
    progress: RunProgress
    client: redis.Redis | None
    fleet: FleetStatus | None


class FolderRuns:
    """The runs in and below a folder.

    Args:
        folder: of a run, or above runs.
        index_file: name of a file that each folder of an index has; "" looks for no indexes.

    Attributes:
        indexes: folders of indexes, as of the last search.
        unreadable: output folder -> why it cannot be read.
    """

    def __init__(self, folder: Path, index_file: str = "") -> None:
        self.indexes: list[Path] = []
        self.unreadable: dict[Path, str] = {}
        self._folder = folder
        self._index_file = index_file
        self._runs: dict[Path, _FolderRun] = {}
        self._search_at = 0.0

    def poll(self) -> list[FolderRunState]:
        """The runs now; one whose folder cannot be read is left out until the next search."""
        if time.monotonic() >= self._search_at:
            began = time.monotonic()
            listed = dict(_runs_and_indexes(self._folder, self._index_file))
            self._runs = {root: self._runs.get(root) or _FolderRun(root) for root, is_run in listed.items() if is_run}
            self.indexes = [index for index, is_run in listed.items() if not is_run]
            self.unreadable.clear()
            took_s = time.monotonic() - began
            self._search_at = time.monotonic() + max(SEARCH_S, SEARCH_REST * took_s)
        states = []
        for root, item in self._runs.items():
            if root in self.unreadable:
                continue
            try:
                states.append(item.poll())
            except EmbqError as error:  # no run of embq, or a damaged one: `embq status` says why
                self.unreadable[root] = error.message
        return states

    def registered(self, run: str) -> tuple[RunRecord, redis.Redis] | None:
        """The record of a run that an `embq run` works on, and its server; None if there is no such run."""
        for item in self._runs.values():
            if item.client is not None and item.run == run and (record := registered(item.client).get(run)) is not None:
                return record, item.client
        return None

    def close(self) -> None:
        """Close the connections."""
        for item in self._runs.values():
            item.leave()


class _FolderRun:
    """A run in a folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = ""
        self.client: redis.Redis | None = None
        self._monitor: RunMonitor | None = None
        self._server_at = 0.0

    def poll(self) -> FolderRunState:
        if self.client is None and time.monotonic() >= self._server_at:
            self._server_at = time.monotonic() + SERVER_S
            if url := EmbeddedServer.find(Layout(self.root).broker):
                self.client, self._monitor = connect(url), None
        try:
            return self._poll()
        except RedisError:  # the `embq run` has ended
            self.leave()
            return self._poll()

    def _poll(self) -> FolderRunState:
        if self._monitor is None:
            self._monitor = RunMonitor(self.root, self.client)
            self.run = self._monitor.info.run
        ledger = self._monitor.ledger()
        if ledger is None or self.client is None:
            return FolderRunState(self._monitor, self._monitor.progress(BrokerSnapshot()), None, None)
        workers, reports = live_workers(self.client), services(self.client)
        progress = self._monitor.progress(take_snapshots([ledger], Reports(workers), reports)[0])
        fleet = fleet_of(self.client, registered(self.client), workers, reports)
        return FolderRunState(self._monitor, progress, self.client, fleet)

    def leave(self) -> None:
        if self.client is not None:
            self.client.close()
        self.client, self._monitor = None, None


def _runs_and_indexes(folder: Path, index_file: str) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of a run) of each run and index in and below a folder, at most `MOST_RUNS`; of what is
    below a run, its indexes."""
    count = 0
    for looked, (path, names, files) in enumerate(os.walk(folder, followlinks=False), start=1):
        is_run = "run.json" in files
        if is_run or index_file in files:
            names[:] = [name for name in names if is_run and name == "index"]
            count += 1
            yield Path(path), is_run
        if count >= MOST_RUNS or looked >= MOST_FOLDERS:
            return
        if len(Path(path).relative_to(folder).parts) >= DEPTH:
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith(("_", ".")))
