"""Enqueueing at scale: seconds, memory, bytes per unit in the folder and in the broker, and making a lost queue anew.

    python -m bench.enqueue [SHARDS [TEXTS [UNITS]]]

Real commands against a private server: `embq enqueue` of a brace expression of SHARDS small files (231,350) and of a
file of TEXTS lines by reference (20,648,877 in units of 1,000), each first with `--dry-run`, and then while
`embq producer` and `embq writer` are at work and no worker is; and what it takes those two to have a run of UNITS units
(1,000,000) queued again after FLUSHALL.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import redis

from bench.report import table, write
from bench.runs import until
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.ledger import Ledger
from embq.core.run.run_info import load_run

MODEL = "stub:384"
QUIET_S = 2.0
"""The queue is full when it has not grown for so long."""


def main() -> None:
    """Measure, print and write."""
    shards, texts, units = [
        int(text) for text in (*sys.argv[1:], *("231350", "20648877", "1000000")[len(sys.argv) - 1 :])
    ]
    rows = []
    with tempfile.TemporaryDirectory(prefix="embq-b") as folder, EmbeddedServer(Path(folder) / "s") as server:
        root = Path(folder)
        client = connect(server.url)
        make_shards(root / "shards", shards)
        rows.append(enqueue(root, server, client, f"{shards:,} shards", shard_names(root / "shards", shards)))
        make_texts(root / "texts.txt", texts)
        rows.append(enqueue(root, server, client, f"{texts:,} texts", str(root / "texts.txt")))
        (root / "texts.txt").unlink()
        make_texts(root / "few.txt", units)
        rows.append(
            enqueue(root, server, client, f"{units:,} units of one text", str(root / "few.txt"), "--unit-size", "1")
        )
    table(list(rows[0]), [list(row.values()) for row in rows])
    print("wrote", write("enqueue", {"rows": rows}))


def make_shards(folder: Path, count: int) -> None:
    """Empty tar shards: the end marker alone."""
    folder.mkdir()
    width = len(str(count))
    for number in range(count):
        with open(folder / f"{number:0{width}d}.tar", "wb") as file:
            file.truncate(10_240)


def shard_names(folder: Path, count: int) -> str:
    """The brace expression for all shards."""
    width = len(str(count))
    return f"{folder}/{{{0:0{width}d}..{count - 1:0{width}d}}}.tar"


def make_texts(path: Path, count: int) -> None:
    """Lines of about a hundred bytes."""
    with path.open("w") as file:
        for start in range(0, count, 10_000):
            file.writelines(
                f"line number {i} of a text that is about as long as one sentence of a page, or a caption is\n"
                for i in range(start, min(count, start + 10_000))
            )


def enqueue(
    root: Path, server: EmbeddedServer, client: redis.Redis, what: str, inputs: str, *options: str
) -> dict[str, Any]:
    """One run from the command to a full queue, and again after the broker has lost everything."""
    output = Path(tempfile.mkdtemp(prefix="out", dir=root))
    client.flushall()
    with services(server):
        time.sleep(QUIET_S)
        empty = used_bytes(client)
        command = ("enqueue", inputs, "-o", str(output), "-m", MODEL, *options)
        dry_seconds, dry_mb = call(server, *command, "--dry-run")
        seconds, peak_mb = call(server, *command)
        info = load_run(output)
        ledger = Ledger(client, info.run)
        until(lambda: int(ledger.meta().get("cursor", 0)) > 0)
        window = until_steady(lambda: int(ledger.meta().get("cursor", 0)))
        queued = used_bytes(client) - empty
        client.flushall()
        lost = time.monotonic()
        until(lambda: int(ledger.meta().get("cursor", 0)) >= window)
        rebuilt = time.monotonic() - lost
        if int(ledger.meta()["total"]) != info.units:
            raise SystemExit(f"{ledger.meta()['total']} units are queued, {info.units} are planned")
    size = sum(path.stat().st_size for path in (output / "manifest").iterdir())
    return {
        "run": what,
        "units": info.units,
        "dry_run_s": dry_seconds,
        "dry_run_peak_rss_mb": dry_mb,
        "seconds": seconds,
        "peak_rss_mb": peak_mb,
        "manifest_bytes_per_unit": round(size / info.units, 1),
        "broker_bytes_per_unit": round(queued / info.units, 2),
        "broker_bytes": queued,
        "hints": window,
        "rebuild_s": round(rebuilt, 1),
    }


def call(server: EmbeddedServer, *arguments: str) -> tuple[float, int]:
    """Run an embq command; gives its seconds and its peak memory in MB."""
    began = time.monotonic()
    command = (sys.executable, "-m", "embq", *arguments)
    process = subprocess.Popen(command, env=environment(server), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"embq {' '.join(arguments)} ended with {process.returncode}")
    return round(seconds, 1), usage.ru_maxrss // 1024


def environment(server: EmbeddedServer) -> dict[str, str]:
    """The environment of a command that uses the server."""
    return {**os.environ, "EMBQ_BROKER_URL": server.url}


@contextmanager
def services(server: EmbeddedServer) -> Iterator[None]:
    """A producer and a writer at work."""
    started = [
        subprocess.Popen((sys.executable, "-m", "embq", verb), env=environment(server), stderr=subprocess.DEVNULL)
        for verb in ("producer", "writer")
    ]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


def used_bytes(client: redis.Redis) -> int:
    """Memory of the data in the server, without its buffers for clients."""
    return int(cast("dict[str, Any]", client.info("memory"))["used_memory_dataset"])


def until_steady(look: Callable[[], int]) -> int:
    """The number, once it has not changed for `QUIET_S`."""
    last, since = look(), time.monotonic()
    while time.monotonic() - since < QUIET_S:
        time.sleep(0.1)
        if (now := look()) != last:
            last, since = now, time.monotonic()
    return last


if __name__ == "__main__":
    main()
