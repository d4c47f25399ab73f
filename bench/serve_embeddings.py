"""`embq serve --embeddings`: texts per second for 64 clients at once, beside the same texts in one `embq.embed`.

    python -m bench.serve_embeddings [TEXTS]

TEXTS (10,000) are lines of docstrings. Clients send 16 texts, or one, and then the next; they run on the same cores as
the server. Both contenders compute with minilm in fp32 on the CPU, in turns.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bench.embed import written
from bench.report import table, write
from bench.text_peers import texts_of

TEXTS, CLIENTS, ROUNDS = 10_000, 64, 2
TOGETHER = (16, 1)
"""Texts of a request."""
BAR = 0.85
"""Of the rate of `embq.embed`, with the larger requests."""


def main() -> int:
    """Measure, print a table and write the figures."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else TEXTS
    rates: dict[str, list[float]] = {"embq.embed": [], **{f"requests of {size}": [] for size in TOGETHER}}
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as name:
        source = written(Path(name) / "texts.jsonl", count)
        texts = texts_of(source)
        for _ in range(ROUNDS):
            command = [sys.executable, "-m", "bench.embed", "one", "embed", str(source), str(Path(name) / "v.npy")]
            rates["embq.embed"].append(count / json.loads(subprocess.check_output(command))["seconds"])
            with served() as url:
                asyncio.run(asked(url, texts[:512], 16))
                for size in TOGETHER:
                    some = texts if size > 1 else texts[: count // 4]
                    rates[f"requests of {size}"].append(len(some) / asyncio.run(asked(url, some, size)))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    offline = medians["embq.embed"]
    rows = [
        (name, f"{rate:,.0f}", f"{rate / offline:.3f}", f">= {BAR}" if name.endswith("16") else "")
        for name, rate in medians.items()
    ]
    table(("", "texts/s", "of embq.embed", "bar"), rows)
    write("serve_embeddings", {"texts": count, "clients": CLIENTS, "rates": rates})
    return 0


@contextmanager
def served() -> Iterator[str]:
    """The address of a server, until the block ends."""
    command = [sys.executable, "-m", "embq", "serve", "--embeddings", "minilm", "--device", "cpu", "--port", "0"]
    with subprocess.Popen([*command, "--precision", "fp32"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


async def asked(url: str, texts: list[str], size: int) -> float:
    """Seconds until all texts are answered."""
    pieces = [texts[start : start + size] for start in range(0, len(texts), size)]
    waiting = iter(pieces)
    began = time.perf_counter()
    await asyncio.gather(*(client(url, waiting) for _ in range(CLIENTS)))
    return time.perf_counter() - began


async def client(url: str, waiting: object) -> None:
    """One connection, which sends what waits, a request after the other."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    for texts in waiting:  # type: ignore[attr-defined]
        body = json.dumps({"model": "minilm", "input": texts, "encoding_format": "base64"}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await reader.readline()
        assert b" 200 " in status, status
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        await reader.readexactly(length)
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
