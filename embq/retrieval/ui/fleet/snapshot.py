"""Samples the fleet once a second for all viewers: runs, machines, rates and the room on the disk."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import redis
from redis.exceptions import RedisError

from embq.app.status.bottleneck import Bottleneck, bottleneck_now
from embq.app.status.eta import SILENT_S
from embq.core.errors import EmbqError
from embq.core.queue.runs import RunRecord
from embq.core.queue.uploads import UploadProgress
from embq.core.service.log import Events
from embq.core.service.progress_line import moment
from embq.retrieval.ui.fleet.machines import MachineMemory, MachineView
from embq.retrieval.ui.fleet.sources import RunView, Seen, SeenBuild, Source

LOOK_S = 1.0
"""Between two samples while somebody looks."""
REST_S = 10.0
"""Between two samples when nobody looks, so that rates have no gap and devices that go are noticed."""
LOOKED_S = 5.0
"""Time after which the last look of a viewer is over."""
RATE_S = 600.0

_log = Events("ui")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskView:
    """Room on a disk for the runs that are not over.

    Attributes:
        needed_bytes: by the bytes of a committed row; None if no run has committed rows.
    """

    free_bytes: int
    needed_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """The fleet at one moment.

    Attributes:
        number: increases with each sample.
        at_s: seconds since the epoch.
        limit: bottleneck of all workers now.
        troubles: sources that do not answer, a sentence each; what they showed last is still here.
    """

    number: int
    at_s: float
    runs: tuple[RunView, ...] = ()
    uploads: tuple[UploadProgress, ...] = ()
    builds: tuple[SeenBuild, ...] = ()
    machines: tuple[MachineView, ...] = ()
    disks: tuple[DiskView, ...] = ()
    limit: Bottleneck = field(default_factory=Bottleneck)
    warnings: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    def run(self, run: str) -> RunView | None:
        """A run by its id."""
        return next((view for view in self.runs if view.progress.run == run), None)


@dataclass(slots=True)
class _Last:
    """What a source showed last, and since when it does not answer."""

    state: Seen = field(default_factory=Seen)
    trouble: str = ""
    since_s: float = 0.0


class Sampler:
    """Samples sources in a thread of its own, which starts with the first look.

    Args:
        sources: earlier ones come first if two have the same run.
        clock: seconds since the epoch.
    """

    def __init__(self, sources: Sequence[Source], *, clock: Callable[[], float] = time.time) -> None:
        self.sources = sources
        self._clock = clock
        self._last = [_Last() for _ in sources]
        self._memory = MachineMemory()
        self._rates: dict[str, deque[tuple[float, float]]] = {}
        self._snapshot: FleetSnapshot | None = None
        self._listeners: list[Callable[[], None]] = []
        self._news, self._wake, self._stopped = threading.Condition(), threading.Event(), threading.Event()
        self._looked_at = float("-inf")
        self._thread: threading.Thread | None = None

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each sample, in the thread of the sampler."""
        self._listeners.append(listener)

    def latest(self) -> FleetSnapshot | None:
        """The last sample; None before the first. Samples follow each second as long as somebody looks."""
        rested = time.monotonic() - self._looked_at > LOOKED_S
        self._looked_at = time.monotonic()
        if self._thread is None and not self._stopped.is_set():
            with self._news:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._loop, name="fleet", daemon=True)
                    self._thread.start()
        elif rested:
            self._wake.set()
        return self._snapshot

    def first(self, timeout_s: float) -> FleetSnapshot | None:
        """`latest`, waiting for the first sample; None if there is none in time."""
        self.latest()
        with self._news:
            self._news.wait_for(lambda: self._snapshot is not None or self._stopped.is_set(), timeout_s)
        return self._snapshot

    def rates(self, run: str) -> list[tuple[float, float]]:
        """(seconds since the epoch, rows per second of all workers) of a run in the last ten minutes."""
        return list(self._rates.get(run, ()))

    def registered(self, run: str) -> tuple[RunRecord, redis.Redis] | None:
        """The record of a run, and the broker if it is at work; None if no source knows it."""
        return next((entry for source in self.sources if (entry := source.registered(run)) is not None), None)

    def stop(self) -> None:
        """End the thread, and close the sources."""
        self._stopped.set()
        self._wake.set()
        with self._news:
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()
        for source in self.sources:
            source.close()

    def _loop(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            self.sample()
            pause_s = LOOK_S if began - self._looked_at < LOOKED_S else REST_S
            took_s = time.monotonic() - began
            # At most half of the time, however large the fleet is.
            self._wake.wait(max(0.05, took_s, pause_s - took_s))
            self._wake.clear()

    def sample(self) -> FleetSnapshot:
        """Take a sample now; for the sampler's own thread, and for tests."""
        try:
            snapshot = self._sampled()
        except Exception:  # noqa: BLE001 - the boundary of the thread
            _log.bug("bug", route="fleet")
            previous = self._snapshot or FleetSnapshot(number=0, at_s=self._clock())
            trouble = "embq has a bug; its log holds the details"
            snapshot = replace(previous, number=previous.number + 1, troubles=(trouble,))
        with self._news:
            self._snapshot = snapshot
            self._news.notify_all()
        for listener in self._listeners:
            listener()
        return snapshot

    def _sampled(self) -> FleetSnapshot:
        now_s = self._clock()
        for source, last in zip(self.sources, self._last, strict=True):
            self._poll(source, last, now_s)
        runs: dict[str, RunView] = {}
        for last in self._last:
            for view in last.state.runs:
                runs.setdefault(view.progress.run, view)
        views = tuple(runs.values())
        self._keep_rates(views, now_s)
        previous = self._snapshot
        answering = [fleet for last in self._last if not last.trouble for fleet in last.state.fleets]
        silent = any(last.trouble for last in self._last)
        workers = [worker for fleet in answering for worker in fleet.workers.values() if worker["silent_s"] <= SILENT_S]
        return FleetSnapshot(
            number=1 if previous is None else previous.number + 1,
            at_s=now_s,
            runs=views,
            uploads=tuple(upload for last in self._last for upload in last.state.uploads),
            builds=tuple({build.index: build for last in self._last[::-1] for build in last.state.builds}.values()),
            # Nobody knows whether a device is gone while its broker is.
            machines=previous.machines if silent and previous is not None else self._memory.update(answering, now_s),
            disks=_disks(views),
            limit=bottleneck_now(workers),
            warnings=tuple(dict.fromkeys(line for fleet in answering for line in fleet.warnings())),
            troubles=tuple(last.trouble for last in self._last if last.trouble),
        )

    def _poll(self, source: Source, last: _Last, now_s: float) -> None:
        try:
            last.state, last.trouble, last.since_s = source.poll(now_s), "", now_s
        except (RedisError, EmbqError) as error:
            why = f": {error.message}" if isinstance(error, EmbqError) else ""
            how_long = f"since {moment(last.since_s)}" if last.since_s else "yet"
            last.trouble = f"{source.name} does not answer {how_long}{why}; it is asked again"

    def _keep_rates(self, views: Sequence[RunView], now_s: float) -> None:
        for view in views:
            if view.active:
                points = self._rates.setdefault(view.progress.run, deque())
                points.append((now_s, view.progress.embedding_per_s))
                while points[0][0] < now_s - RATE_S:
                    points.popleft()
        current = {view.progress.run for view in views}
        self._rates = {run: points for run, points in self._rates.items() if run in current}


def _disks(views: Sequence[RunView]) -> tuple[DiskView, ...]:
    """The disks below the folders of runs that are not over, that with least room behind its need first."""
    by_device: dict[int, tuple[int, list[float | None]]] = {}
    for view in views:
        if view.progress.state.ended or not isinstance(view.root, Path):
            continue
        try:
            device = os.stat(view.root).st_dev
            if device not in by_device:
                by_device[device] = (shutil.disk_usage(view.root).free, [])
        except OSError:
            continue
        by_device[device][1].append(view.needs_bytes)
    disks = [
        DiskView(
            free_bytes=free,
            needed_bytes=None if all(need is None for need in needs) else sum(need or 0.0 for need in needs),
        )
        for free, needs in by_device.values()
    ]
    return tuple(sorted(disks, key=lambda disk: disk.free_bytes - (disk.needed_bytes or 0.0)))
