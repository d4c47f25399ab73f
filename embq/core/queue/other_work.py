"""Work of other kinds than runs that workers do as well, such as building an index.

Each kind is a satellite's: the core names its module here and imports it only while a broker has such work. In the
broker a stage of such work is a run, so its leases, heartbeats and lost workers are handled as those of every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, Protocol, cast

import redis

from embq.core.queue.keys import INDEXING
from embq.core.queue.scripts import Script

KINDS: Mapping[str, str] = {INDEXING: "embq.index.workers.kind"}
"""Hash of the broker with the announced work of a kind -> module with the functions of `Kind`."""


class OtherWork(Protocol):
    """Work that a worker process can serve in place of a model. Hashable.

    Attributes:
        kind: key in `KINDS`.
    """

    kind: ClassVar[str]

    @property
    def queue_key(self) -> str:
        """Name of its queue of hints, and of its share of the workers' time."""

    @property
    def name(self) -> str:
        """Name for people."""


class Kind(Protocol):
    """The functions of the module of a kind."""

    def announced(self, client: redis.Redis) -> list[tuple[str, OtherWork]]:
        """(run of the stage in progress, work) of all work that somebody waits for."""

    def forget_abandoned(self, client: redis.Redis, *, scripts: Mapping[str, Script]) -> None:
        """Remove the records, runs and hints of work that nobody waits for any more."""

    def access(self, roots: tuple[str, ...]) -> Callable[[OtherWork], bool]:
        """Return a function that tells whether this process can do some work.

        Args:
            roots: folders and URLs that workers may read from or below; empty allows all.
        """

    def serve(self, context: Any, turn: Any) -> Any:
        """Serve a turn of a worker process, `embq.worker.claim.scheduler.Turn`; return the turn after it, or None."""


def kind_of(work: OtherWork) -> Kind:
    """The module of the kind of some work."""
    return cast("Kind", import_module(KINDS[work.kind]))


def announced(client: redis.Redis) -> list[tuple[str, OtherWork]]:
    """(run of the stage in progress, work) of all work that somebody waits for."""
    return [it for kind in _present(client) for it in kind.announced(client)]


def forget_abandoned(client: redis.Redis, *, scripts: Mapping[str, Script]) -> None:
    """Remove the records, runs and hints of work that nobody waits for any more."""
    for kind in _present(client):
        kind.forget_abandoned(client, scripts=scripts)


def _present(client: redis.Redis) -> Iterator[Kind]:
    for key, module in KINDS.items():
        if client.hlen(key):
            yield cast("Kind", import_module(module))


class Access:
    """Decides which work of other kinds this process may serve.

    Args:
        roots: folders and URLs that workers may read from or below; empty allows all.
    """

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = roots
        self._able: dict[str, Callable[[OtherWork], bool]] = {}

    def able(self, work: OtherWork) -> bool:
        """Whether the work can be done here."""
        if work.kind not in self._able:
            self._able[work.kind] = kind_of(work).access(self._roots)
        return self._able[work.kind](work)
