"""MB/s of shards over a slow HTTP server: embq's parallel ranges beside one plain stream, in the same run.

python -m bench.remote_read [MEGABYTES] [LATENCY_MS] [MB_PER_S]

The server waits LATENCY_MS before each answer and sends at most MB_PER_S on each connection (0: as fast as it can), as
an object store far away does. It is a process of its own, on this machine.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

from bench.report import table, write
from embq.sources.access.files import load_unchanged
from embq.sources.access.read_ahead import ReadAhead
from embq.sources.interface import unwatched
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions

ROUNDS = 3
PIECE_BYTES = 256 * 1024


class Slow(SimpleHTTPRequestHandler):
    """Ranges of files, late and not too fast."""

    protocol_version = "HTTP/1.1"
    latency_s = 0.0
    bytes_per_s = 0.0

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer as to a GET, without the bytes."""
        self.do_GET()

    def do_GET(self) -> None:
        """The file, or the range that is asked for."""
        time.sleep(self.latency_s)
        path = self.translate_path(self.path)
        size = os.path.getsize(path)
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = wanted.partition("-")
        start, stop = (int(first), min(size, int(last) + 1)) if wanted else (0, size)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{size}"')
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        with open(path, "rb") as file:
            began, at = time.monotonic(), start
            while at < stop:
                count = os.sendfile(self.connection.fileno(), file.fileno(), at, min(PIECE_BYTES, stop - at))
                at += count
                if self.bytes_per_s:
                    time.sleep(max(0.0, began + (at - start) / self.bytes_per_s - time.monotonic()))


def serve(folder: str, latency_s: float, bytes_per_s: float, ready: Connection) -> None:
    """The server's process; tells its port."""
    Slow.latency_s, Slow.bytes_per_s = latency_s, bytes_per_s
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Slow, directory=folder))
    ready.send(server.server_address[1])
    server.serve_forever()


def mb_per_s(read: Callable[[str], int], urls: list[str]) -> float:
    """Rate of reading all files one after the other."""
    began = time.perf_counter()
    count = sum(read(url) for url in urls)
    return count / 1e6 / (time.perf_counter() - began)


def plain(url: str) -> int:
    """One stream, as a simple program reads it."""
    count = 0
    with urllib.request.urlopen(url) as answer:
        while piece := answer.read(1 << 20):
            count += len(piece)
    return count


def embq(url: str) -> int:
    """One shard as a worker reads it in its turn: status, ranges, status."""
    (unit,) = SOURCES["tar"].split(url, ReadOptions())
    return len(load_unchanged(unit, "shard_changed", unwatched))


def waited_s(urls: list[str], busy_s: float, *, fetch_ahead: bool) -> float:
    """Seconds that a device, busy for `busy_s` with each shard, waits for the shards behind the first."""
    units = [unit for url in urls for unit in SOURCES["tar"].split(url, ReadOptions())]
    ahead, waited = ReadAhead(), 0.0
    with ahead.in_use():
        for number, unit in enumerate(units):
            began = time.perf_counter()
            load_unchanged(unit, "shard_changed", unwatched)
            waited += time.perf_counter() - began if number else 0.0
            if fetch_ahead and number + 1 < len(units):
                ahead.begin(units[number + 1], lambda: True)
            time.sleep(busy_s)
    ahead.close()
    return waited


def main() -> None:
    """Measure, and write the figures."""
    given = [float(word) for word in sys.argv[1:]] + [256.0, 20.0, 40.0][len(sys.argv) - 1 :]
    size, latency_s, rate = int(given[0] * 1e6) // 512 * 512, given[1] / 1000, given[2] * 1e6
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{number}.tar" for number in range(3)]
        for name in names:
            with open(os.path.join(folder, name), "wb") as file:
                file.write(os.urandom(1 << 20) * (size >> 20) + bytes(size % (1 << 20)))
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder, latency_s, rate, theirs), daemon=True
        )
        server.start()
        port = ours.recv()
        urls = [f"http://127.0.0.1:{port}/{name}" for name in names]
        embq(urls[0])  # connections and modules
        rounds = [(mb_per_s(embq, urls), mb_per_s(plain, urls)) for _ in range(ROUNDS)]
        rates = {"embq": max(one for one, _ in rounds), "one stream": max(one for _, one in rounds)}
        busy_s = 1.5 * size / 1e6 / rates["embq"]
        waits = {
            "in turn": waited_s(urls, busy_s, fetch_ahead=False),
            "ahead": waited_s(urls, busy_s, fetch_ahead=True),
        }
        server.terminate()
        server.join()
    table(["who", "MB_per_s"], [[who, f"{rate:,.1f}"] for who, rate in rates.items()])
    table(["next shards", "device_waits_s"], [[how, f"{seconds:.3f}"] for how, seconds in waits.items()])
    figures = {
        "mb_per_s": {who: round(value, 1) for who, value in rates.items()},
        "device_waits_s": {how: round(seconds, 3) for how, seconds in waits.items()},
        "device_busy_s_per_shard": round(busy_s, 3),
        "shard_mb": given[0],
        "latency_ms": given[1],
        "connection_mb_per_s": given[2],
    }
    print("wrote", write("remote_read", figures))


if __name__ == "__main__":
    main()
