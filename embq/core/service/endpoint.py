"""HTTP endpoint of a service: `/metrics` for Prometheus, `/healthz` for health checks.

It answers from its own threads, also while the service waits for its broker. It requires no password, and its answers
hold no secret.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from embq.core.errors import UnwellError
from embq.core.networks import Address, bound
from embq.core.service.log import Events

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATHS = ("/metrics", "/healthz")
CLIENT_S = 10.0
"""Time-out of a client that sends or takes nothing."""
MOST_CLIENTS = 32
"""Most clients at a time, each with a thread. Prometheus and a health check are two."""


class Endpoint:
    """Listens from its construction on; answers from `start` on.

    Raises as `embq.core.networks.bound` does, so that a port in use is reported before anything else happens.

    Args:
        exposition: the answer of `/metrics`; UnwellError where there is none.
        complaint: the problem in one line; "" for a healthy service.
    """

    def __init__(self, address: Address, *, exposition: Callable[[], bytes], complaint: Callable[[], str]) -> None:
        listener = bound(
            address,
            taken="stop that program, or take another port with --metrics or EMBQ_METRICS; 0 finds a free one",
            example="--metrics 9101 is for this machine alone, --metrics 0.0.0.0:9101 for all who reach it",
        )
        self._server = _Server(listener, exposition, complaint)
        self.address = Address(host=address.host, port=listener.getsockname()[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="endpoint", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more, and let go of the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CLIENTS

    def __init__(self, listener: socket.socket, exposition: Callable[[], bytes], complaint: Callable[[], str]) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_activate()
        self.exposition = exposition
        self.complaint = complaint
        self.log = Events("endpoint")
        self._places = threading.BoundedSemaphore(MOST_CLIENTS)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Answer in a thread; a client beyond `MOST_CLIENTS` is disconnected."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """As the base class, and free the thread's place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log everything but disconnected clients as a bug."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            self.log.bug("bug")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            try:
                self._answer(200, self.server.exposition(), CONTENT_TYPE)
            except UnwellError as error:
                self._answer(503, f"{error.message}\n".encode())
        elif path == "/healthz":
            complaint = self.server.complaint()
            self._answer(503 if complaint else 200, f"{complaint or 'ok'}\n".encode())
        else:
            self._answer(404, f"there are {' and '.join(PATHS)}\n".encode())

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle(self) -> None:
        """Close the connection of a client that has disconnected."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """No line for each scrape."""
