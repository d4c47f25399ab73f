"""Server-sent events of the fleet page: its parts as HTML, once a second, those that have changed.

Parts are made once of each sample, whatever the number of viewers. A slow reader gets the newest only. A stream ends
before the server's deadline for an answer, and the browser opens the next one.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import anyio

from embq.retrieval.ui.fleet.fragments import Fragments, Parts
from embq.retrieval.ui.fleet.run_list import ALL_RUNS, RunQuery
from embq.retrieval.ui.fleet.snapshot import FleetSnapshot, Sampler

MOST_STREAMS = 400
"""Below the limit of connections of one client, see `embq.app.services.http_server`. Of one client at most three
quarters of it, so that none keeps out the others by itself."""
STREAM_S = 90.0
"""Less than `embq.app.services.http_server.ANSWER_S`."""
QUIET_S = 15.0
"""Time without an event after which a comment shows that the connection stands."""
RETRY_MS = 2_000
MOST_VIEWS = 64
"""Pages of which the parts are kept."""

_Page = tuple[str, RunQuery, bool]
"""Run, "" for all; which of all; and whether the viewer may act."""
_LINE_ENDS = re.compile(r"[\r\n]\s*")


@dataclass(slots=True)
class _View:
    """The parts of a page, of the last sample that was asked for."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    number: int = -1
    frames: dict[str, bytes] | None = None


class Live:
    """Streams of a server. All but the listener runs in its event loop.

    Attributes:
        streams: number of open ones.
    """

    def __init__(self, sampler: Sampler, fragments: Fragments) -> None:
        self.streams = 0
        self._of_client: Counter[bytes] = Counter()
        self._sampler, self._fragments = sampler, fragments
        self._views: dict[_Page, _View] = {}
        self._news: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        sampler.listen(self._sampled)

    def is_full(self, client: bytes) -> bool:
        """True if no further stream is opened for a client, see `client_network`."""
        return self.streams >= MOST_STREAMS or self._of_client[client] >= MOST_STREAMS * 3 // 4

    def leave(self) -> None:
        """End all streams, and open no more."""
        self._closed = True
        self._wake()

    async def stream(
        self, run: str, query: RunQuery = ALL_RUNS, *, may_act: bool, client: bytes = b""
    ) -> AsyncIterator[bytes]:
        """The events of a page: `/fleet` with the runs that a query names, or that of a run.

        Args:
            client: who reads them, as `client_network` has it; a client for whom it `is_full` gets none.
        """
        if self.is_full(client):
            return
        loop = self._loop = asyncio.get_running_loop()
        self.streams += 1
        self._of_client[client] += 1
        try:
            yield b"retry: %d\n\n" % RETRY_MS
            sent: dict[str, bytes] = {}
            end, quiet_at = loop.time() + STREAM_S, loop.time() + QUIET_S
            while not self._closed and loop.time() < end:
                news = self._news = self._news or asyncio.Event()
                snapshot = self._sampler.latest()
                if snapshot is not None:
                    frames = await self._frames(snapshot, (run, query, may_act))
                    if frames is None:
                        return
                    changed = [frame for name, frame in frames.items() if sent.get(name) != frame]
                    sent = frames
                    if changed:
                        yield b"".join(changed)
                        quiet_at = loop.time() + QUIET_S
                # By the time, not by the wait below: each sample ends that, also one that changes nothing.
                if loop.time() >= quiet_at:
                    yield b":\n\n"
                    quiet_at = loop.time() + QUIET_S
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(quiet_at, end)):
                        await news.wait()
        finally:
            self.streams -= 1
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]

    async def _frames(self, snapshot: FleetSnapshot, page: _Page) -> dict[str, bytes] | None:
        view = self._views.get(page)
        if view is None:
            while len(self._views) >= MOST_VIEWS:
                self._views.pop(next(iter(self._views)))
            view = self._views[page] = _View()
        async with view.lock:
            if view.number < snapshot.number:
                view.frames = await anyio.to_thread.run_sync(self._rendered, snapshot, page)
                view.number = snapshot.number
            return view.frames

    def _rendered(self, snapshot: FleetSnapshot, page: _Page) -> dict[str, bytes] | None:
        parts = parts_of(self._fragments, snapshot, *page)
        return None if parts is None else {name: frame(name, html) for name, html in parts.items()}

    def _sampled(self) -> None:
        """Wake the streams; called by the sampler's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


def parts_of(fragments: Fragments, snapshot: FleetSnapshot, run: str, query: RunQuery, may_act: bool) -> Parts | None:
    """The parts of `/fleet`, or of the page of a run; None if there is no such run."""
    return fragments.run(snapshot, run, may_act=may_act) if run else fragments.fleet(snapshot, query, may_act=may_act)


def frame(name: str, html: str) -> bytes:
    """An event; a line end in its data would end the event's field."""
    return f"event: {name}\ndata: {_LINE_ENDS.sub(' ', html).strip()}\n\n".encode("utf-8", "replace")
