"""A relay in front of the broker that loses, delays and redirects, counted in commands and replies, not in reads.

In a test: `with Proxy(broker.url) as proxy: connect(proxy.url)`. As a process of its own, for use inside a network
namespace: `python -m tests.faults.kit.proxy UPSTREAM HOST`, which prints the port.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from urllib.parse import unquote, urlsplit

READ_BYTES = 256 * 1024


def message_end(data: bytes | bytearray, start: int = 0) -> int:
    """End of the RESP message that begins at `start`; -1 if it is not complete."""
    line = data.find(b"\r\n", start)
    if line < 0:
        return -1
    kind, after = data[start : start + 1], line + 2
    if kind in (b"$", b"!", b"="):
        length = int(data[start + 1 : line])
        end = after if length < 0 else after + length + 2
        return end if end <= len(data) else -1
    if kind in (b"*", b"~", b">", b"%", b"|"):
        items = int(data[start + 1 : line]) * (2 if kind in (b"%", b"|") else 1)
        # An attribute is followed by the message that it belongs to.
        for _ in range(items + (kind == b"|")):
            after = message_end(data, after)
            if after < 0:
                return -1
    return after


class _Link:
    """One client's connection, and ours to the server for it."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.client = client
        self.server: asyncio.StreamWriter | None = None
        self.pending: deque[int] = deque()
        self.swallows = False
        self.deaf = False

    def cut(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.transport.abort()


class Proxy:
    """Relays to `upstream`, a unix:// or redis:// URL, and does what a bad network does.

    Attributes:
        delay_s: how much later everything arrives, in both directions; the throughput is not limited.
        rate: bytes per second from each client; 0 is no limit.
        quota: bytes that all clients together may still send, where something is to stand still half-way; None is no
            limit.
        loss: share of requests at which the connection breaks, half of them before and half after the server got them.
            A request is one command, or a pipeline: long ones would never get through otherwise.
        every: the same at each request whose number is a multiple of this, by turns; 0 is never.
        commands: how many commands have come so far, over all connections.
        lost: how many of them were lost, or their reply.
    """

    def __init__(self, upstream: str, *, host: str = "127.0.0.1", seed: int = 0) -> None:
        self.upstream = upstream
        self.host = host
        self.port = 0
        self.delay_s = 0.0
        self.rate = 0.0
        self.quota: int | None = None
        self.loss = 0.0
        self.every = 0
        self.commands = 0
        self.lost = 0
        self._requested = 0
        self._random = random.Random(seed)
        self._drop_request = self._drop_reply = 0
        self._swallow = False
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    # --- what a test says ---

    @property
    def url(self) -> str:
        """The URL for clients, with the user and the password of the server behind."""
        user, found, _ = urlsplit(self.upstream).netloc.rpartition("@")
        return f"redis://{user}{found}{self.host}:{self.port}"

    def drop_request(self, number: int) -> None:
        """The command with this number, counted from now and from 1, never reaches the server."""
        self._drop_request = self.commands + number

    def drop_reply(self, number: int) -> None:
        """The command with this number, counted from now and from 1, is carried out, and its reply is lost."""
        self._drop_reply = self.commands + number

    def blackhole(self) -> None:
        """Swallow everything from now on, also of new connections, without a word to anybody."""
        self._swallow = True
        self._later(self._swallow_all)

    def half_open(self) -> None:
        """Swallow everything on the connections that are there; new ones work."""
        self._later(self._swallow_all)

    def heal(self) -> None:
        """Relay again. Connections that have lost something stay dead, as a stream with a hole in it would be."""
        self._swallow = False
        self.quota = None
        self.delay_s = self.rate = self.loss = 0.0
        self.every = 0

    def cut(self) -> None:
        """Break every connection that is there."""
        self._later(lambda: [link.cut() for link in self._links])

    def switch(self, upstream: str) -> None:
        """Another server takes over: connections break, and new ones lead there."""
        self.upstream = upstream
        self.cut()

    # --- its life ---

    def start(self) -> Proxy:
        self._thread.start()
        assert self._ready.wait(10), "the proxy did not start"
        return self

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the proxy did not stop"

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, self.host, self.port, backlog=512))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        # A connection that was accepted a moment ago becomes a link; otherwise nobody would close its socket.
        self._loop.run_until_complete(asyncio.sleep(0.01))
        for link in list(self._links):
            link.cut()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _later(self, action: Callable[[], object]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (action(), done.set()))
        assert done.wait(10)

    def _swallow_all(self) -> None:
        for link in self._links:
            link.swallows = True

    # --- one connection ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer)
        self._links.add(link)
        tasks: list[asyncio.Task[None]] = []
        try:
            if self._swallow:
                link.swallows = True
                while await reader.read(READ_BYTES):
                    pass
                return
            from_server, link.server = await self._connect()
            to_server: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            to_client: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            tasks = [
                asyncio.create_task(work)
                for work in (
                    self._requests(link, reader, to_server),
                    self._replies(link, from_server, to_client),
                    self._deliver(link.server, to_server),
                    self._deliver(writer, to_client),
                )
            ]
            # The end of the requests ends it all; the end of the replies only where nothing is swallowed.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._links.discard(link)
            link.cut()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.upstream)
        if parts.scheme == "unix":
            return await asyncio.open_unix_connection(unquote(parts.path))
        return await asyncio.open_connection(parts.hostname, parts.port)

    async def _requests(
        self, link: _Link, reader: asyncio.StreamReader, out: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        buffer = bytearray()
        while data := await self._read(reader):
            buffer += data
            while (end := message_end(buffer)) >= 0:
                message = bytes(buffer[:end])
                del buffer[:end]
                if link.swallows:
                    continue
                self.commands += 1
                if not link.pending:
                    self._choose()
                if self.commands == self._drop_request:
                    self.lost += 1
                    return
                link.pending.append(self.commands)
                out.put_nowait((self._loop.time() + self.delay_s, message))

    def _choose(self) -> None:
        """True if the request that begins with the latest command is lost, or its reply."""
        self._requested += 1
        if self.every and self._requested % self.every == 0:
            before = self._requested // self.every % 2
        elif self.loss and self._random.random() < self.loss:
            before = self._random.getrandbits(1)
        else:
            return
        if before:
            self._drop_request = self.commands
        else:
            self._drop_reply = self.commands

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        while self.quota is not None and self.quota <= 0:
            await asyncio.sleep(0.02)
        if self.quota is not None:
            data = await reader.read(min(READ_BYTES, self.quota))
            if self.quota is not None:
                self.quota -= len(data)
            return data
        if not self.rate:
            return await reader.read(READ_BYTES)
        data = await reader.read(max(1, int(self.rate / 20)))
        await asyncio.sleep(len(data) / self.rate)
        return data

    async def _replies(
        self, link: _Link, reader: asyncio.StreamReader, out: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        buffer = bytearray()
        while data := await reader.read(READ_BYTES):
            buffer += data
            while (end := message_end(buffer)) >= 0:
                message = bytes(buffer[:end])
                del buffer[:end]
                number = 0 if message[:1] == b">" else link.pending.popleft()
                if link.swallows or link.deaf:
                    continue
                if number and number == self._drop_reply:
                    self.lost += 1
                    link.deaf = True
                    # What the client has sent besides is still carried out: it hears the end, and closes.
                    link.client.write_eof()
                    continue
                out.put_nowait((self._loop.time() + self.delay_s, message))
        while link.swallows:
            await asyncio.sleep(0.05)
        while not out.empty():
            await asyncio.sleep(0.005)

    async def _deliver(self, writer: asyncio.StreamWriter, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, message = await queue.get()
            if (pause := due - self._loop.time()) > 0:
                await asyncio.sleep(pause)
            writer.write(message)
            await writer.drain()


def main() -> None:
    """Relay to the URL that is the first argument, on the address that is the second, until stdin ends."""
    upstream, host = sys.argv[1:3]
    with Proxy(upstream, host=host) as proxy:
        print(proxy.port, flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
