"""Storage servers for tests, on loopback: HTTP and GCS (an emulator) that can misbehave, and moto's for S3."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import re
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from embq.core.storage.objects import ObjectPath

FAULTS = ("busy", "error", "cut", "short", "reset", "denied", "altered")


@dataclass
class Server:
    """A server of files, with ranges and versions.

    Attributes:
        url: of what it serves, without a slash at its end.
        fault: what each further request for bytes suffers while `left` lasts: "busy" (503), "error" (500), "cut" (the
            connection ends in the middle of the body), "short" (a valid answer with too few bytes), "reset" (no answer
            at all), "denied" (403).
        left: how many times.
        deaf: conditions of writes are not heard: what exists is written again.
        asked: number of requests by what they are and their status.
    """

    url: str
    fault: str = ""
    left: int = 0
    deaf: bool = False
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

    def note(self, request: str) -> None:
        """Count a request."""
        with self.lock:
            self.asked[request] += 1


@dataclass
class HttpServer(Server):
    """A folder over HTTP.

    Attributes:
        folder: what it serves.
        denied: names that may not be read or listed; those of folders end with a slash.
        ranges: whether the server knows ranges, as Python's own does not.
        latency_s: before each answer begins.
        bytes_per_s: most of each connection; 0 for no bound.
        sent: (name, bytes) of each answer to a GET, in the order in which they were complete.
    """

    folder: Path = Path()
    denied: set[str] = field(default_factory=set)
    ranges: bool = True
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    sent: list[tuple[str, int]] = field(default_factory=list)

    def sent_of(self, name: str) -> int:
        """Bytes of a file that were sent."""
        with self.lock:
            return sum(count for one, count in self.sent if one == name)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # clients come by dozens

    def handle_error(self, *of: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | ssl.SSLError):  # a client may leave
            super().handle_error(*of)


@contextmanager
def serving(
    handler: Callable[..., BaseHTTPRequestHandler], address: str = "127.0.0.1", *, tls: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Serve until the block ends; gives the port."""
    server = _Server((address, 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
            time.sleep(state.latency_s)
            name = unquote(self.path.partition("?")[0]).lstrip("/")
            path = state.folder / name
            if name in state.denied:
                fault = "denied"
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
                time.sleep(len(data) / state.bytes_per_s if state.bytes_per_s else 0.0)
                with state.lock:  # noted first: who has the bytes finds them noted
                    state.sent.append((path.name, len(data)))
                self.wfile.write(data)

        def begin(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
            state.note(f"{self.command} {status}")
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()

    state = HttpServer(url="", folder=folder)
    with serving(Handler) as port:
        state.url = f"http://127.0.0.1:{port}"
        yield state


@contextmanager
def gcs_server() -> Iterator[Server]:
    """Google's JSON API from memory, with bucket `bucket`; sets the variable with which this and other processes find
    it. The emulator ignores `ifGenerationMatch`; this makes it keep to it, unless `deaf` is set."""
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    class Handler(RequestHandler):  # type: ignore[misc]
        def do_POST(self) -> None:
            with writing:  # the emulator is made for one request at a time
                asked = parse_qs(urlsplit(self.path).query)
                if not state.deaf and asked.get("ifGenerationMatch") == ["0"] and "upload_id" not in asked:
                    if self.is_there(body := self.rfile.read(int(self.headers["Content-Length"]))):
                        self.send_response(412)
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                    socket, self.rfile = self.rfile, io.BytesIO(body)
                    super().do_POST()
                    self.rfile = socket
                    return
                super().do_POST()

        def is_there(self, body: bytes) -> bool:
            described = json.loads(re.search(rb"\{.*?\}", body)[0])  # type: ignore[index]
            try:
                return bool(storage.get_file_obj("bucket", described["name"]))
            except NotFound:
                return False

        def do_GET(self) -> None:
            data = "/download/" in self.path
            fault = state.take() if data else ""
            state.note("data" if data else "object" if "/o/" in self.path else "listing")
            if fault == "reset":
                self.close_connection = True
                self.connection.close()
            elif fault in ("busy", "error", "denied"):
                status = {"busy": 503, "error": 500}.get(fault, 403)
                body = json.dumps({"error": {"code": status, "message": "as the test wants it"}}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            else:
                super().do_GET()

    writing = threading.Lock()
    storage = Storage(use_memory_fs=True)
    create_bucket("bucket", storage)
    state = Server(url="gs://bucket")
    with serving(partial(Handler, storage)) as port, environment({"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}):
        yield state


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables of this process and its children until the block ends.

    What was started with other variables is closed: the reader process, and the clients of object stores.
    """
    from embq.core.storage import object_clients
    from embq.sources.access import filesystems
    from embq.sources.reader_process import client

    def close() -> None:
        client.close()
        object_clients.connect.cache_clear()
        filesystems._connect.cache_clear()

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    close()
    try:
        yield
    finally:
        close()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _one_at_a_time(app: Callable[..., Any]) -> Callable[..., Any]:
    """A WSGI application that answers no request before the last one is answered."""
    lock = threading.Lock()

    def locked(*of: Any) -> list[bytes]:
        with lock:
            return list(app(*of))

    return locked


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server; gives the environment with which this and other processes find it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    # moto looks whether an object exists before it writes one, and another thread may write it in between: of two
    # conditional creates both would succeed.
    server._server.app = _one_at_a_time(server._server.app)
    _, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with environment(variables):
            yield variables
    finally:
        server.stop()


@contextmanager
def s3_proxy(upstream: str) -> Iterator[Server]:
    """A server in front of an S3 one, at whose writes things go wrong: "busy" (503), "denied" (403), "lost" (written,
    and no answer comes), or "lost end" (the same, at the end of an upload in pieces)."""
    host = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            end = self.command == "POST" and "uploadId" in self.path
            fault = state.take() if end or (self.command in ("PUT", "POST") and state.fault != "lost end") else ""
            state.note(f"{self.command} {fault}".strip())
            if fault == "busy":
                self.answer(503, {}, b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>")
                return
            if fault == "denied":
                self.answer(403, {}, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
                return
            left_out = {"expect", "connection", *(["if-none-match"] if state.deaf else [])}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
            connection = http.client.HTTPConnection(host)
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            if fault in ("lost", "lost end"):
                self.close_connection = True
                self.connection.close()
                return
            self.answer(answer.status, dict(answer.getheaders()), data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        def answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response_only(status)
            length = headers.pop("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
            for name, value in {**headers, "Content-Length": length}.items():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    state = Server(url="")
    with serving(Handler) as port:
        state.url = f"http://127.0.0.1:{port}"
        yield state


class Killed(BaseException):
    """Stands for SIGKILL: no handler of errors sees it."""


def killing(at: int, *, after: bool) -> Callable[..., Any]:
    """`ObjectPath.call` in a process that is killed at one request to the store, before it or when it was obeyed."""
    real, left = ObjectPath.call, [at]

    def ask(path: ObjectPath, request: Callable[[Any, str], Any]) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return real(path, request)
        with suppress(Exception):
            if left[0] == -1 and after:
                real(path, request)
        raise Killed

    return ask


def upload(folder: Path, bucket: str) -> str:
    """Put all files of a folder into a new bucket; gives its URL."""
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=str(path.relative_to(folder)), Body=path.read_bytes())
    return f"s3://{bucket}"
