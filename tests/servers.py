"""Storage servers for tests: an HTTP server that can misbehave, and moto's S3 server. Both on loopback."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

FAULTS = ("busy", "error", "cut", "short", "reset", "denied", "altered")


@dataclass
class HttpServer:
    """A folder over HTTP, with ranges and ETags.

    Attributes:
        url: of the folder, without a slash at its end.
        fault: what each further GET suffers while `left` lasts: "busy" (503), "error" (500), "cut" (the connection
            ends in the middle of the body), "short" (a valid answer with too few bytes), "reset" (no answer at all),
            "denied" (403).
        left: how many times.
        ranges: whether the server knows ranges, as Python's own does not.
        asked: number of requests by method and status.
    """

    url: str
    folder: Path
    fault: str = ""
    left: int = 0
    ranges: bool = True
    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def suffer(self, fault: str, times: int) -> None:
        """Let the next GETs go wrong."""
        with self.lock:
            self.fault, self.left = fault, times

    def take(self) -> str:
        """The fault of this request, or ""."""
        with self.lock:
            if self.left <= 0:
                return ""
            self.left -= 1
            return self.fault


@contextmanager
def http_server(folder: Path) -> Iterator[HttpServer]:
    """Serve a folder until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            fault = state.take() if body else ""
            path = state.folder / unquote(self.path.partition("?")[0]).lstrip("/")
            if fault == "reset":
                self.close_connection = True
                self.connection.close()
                return
            if fault in ("busy", "error", "denied") or not path.exists():
                status = {"busy": 503, "error": 500, "denied": 403}.get(fault, 404)
                self.begin(status, 0)
                return
            if path.is_dir():
                links = "".join(
                    f'<a href="{name.name}{"/" if name.is_dir() else ""}">x</a>' for name in sorted(path.iterdir())
                )
                self.begin(200, len(links), {"Content-Type": "text/html"})
                self.wfile.write(links.encode() if body else b"")
                return
            data = path.read_bytes()
            headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}
            status = 200
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked and state.ranges:
                start, stop = int(asked[1]), min(len(data), int(asked[2]) + 1 if asked[2] else len(data))
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
                data, status = data[start:stop], 206
            if fault == "short":
                data = data[: len(data) // 2]
            self.begin(status, len(data), headers)
            if fault == "cut":
                self.close_connection = True
                data = data[: len(data) // 2]
            if body:
                self.wfile.write(data)

        def begin(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
            with state.lock:
                state.asked[f"{self.command} {status}"] += 1
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = HttpServer(url=f"http://127.0.0.1:{server.server_address[1]}", folder=folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server; gives the environment with which this and other processes find it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield environment
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        server.stop()


def upload(folder: Path, bucket: str) -> str:
    """Put all files of a folder into a new bucket; gives its URL."""
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=str(path.relative_to(folder)), Body=path.read_bytes())
    return f"s3://{bucket}"
