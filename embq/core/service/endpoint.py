"""HTTP endpoint of a service: `/metrics` for Prometheus, `/healthz` for health checks.

It answers from its own threads, also while the service waits for its broker. It requires no password, and its answers
hold no secret.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from embq.core.errors import UnwellError
from embq.core.networks import Address, HostNames, bound
from embq.core.service.log import Events
from embq.core.service.metrics import CONTENT_TYPE

CLIENT_S = 10.0
"""Time-out of a client that sends or takes nothing."""
MOST_CLIENTS = 32
"""Most clients at a time, each with a thread. Prometheus and a health check are two."""


class Endpoint(ThreadingHTTPServer):
    """Listens from its construction on; answers from `start` on.

    Raises as `embq.core.networks.bound` does, so that a port in use is reported before anything else happens.

    Args:
        exposition: the answer of `/metrics`; UnwellError if there is none.
        complaint: the problem in one line; "" for a healthy service.
        allow_hosts: names by which clients may ask, beside those of `HostNames`.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CLIENTS

    def __init__(
        self,
        address: Address,
        *,
        exposition: Callable[[], bytes],
        complaint: Callable[[], str],
        allow_hosts: Sequence[str] = (),
    ) -> None:
        listener = bound(
            address,
            taken="stop that program, or take another port with --metrics or EMBQ_METRICS; 0 finds a free one",
            example="--metrics 9101 is for this machine alone, --metrics 0.0.0.0:9101 for all who reach it",
        )
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_activate()
        self.address = Address(host=address.host, port=listener.getsockname()[1])
        self.hosts = HostNames(allow_hosts, listens_on=address.host)
        self.exposition = exposition
        self.complaint = complaint
        self._clients = threading.BoundedSemaphore(MOST_CLIENTS)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="endpoint", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more, and close the port."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def verify_request(self, request: object, client_address: object) -> bool:
        """False for a client beyond `MOST_CLIENTS`, which is then disconnected."""
        return self._clients.acquire(blocking=False)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """As the base class, then admit another client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log everything but disconnected clients as a bug."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            Events("endpoint").bug("bug")


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    timeout = CLIENT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status, content_type = 200, "text/plain; charset=utf-8"
        match self.path.partition("?")[0]:
            case _ if not self.server.hosts.accept(self.headers.get("Host", "")):
                status, body = 421, b"this service does not have that name: EMBQ_ALLOW_HOSTS adds names\n"
            case "/metrics":
                try:
                    body, content_type = self.server.exposition(), CONTENT_TYPE
                except UnwellError as error:
                    status, body = 503, f"{error.message}\n".encode()
            case "/healthz":
                complaint = self.server.complaint()
                status, body = 503 if complaint else 200, f"{complaint or 'ok'}\n".encode()
            case _:
                status, body = 404, b"there are /metrics and /healthz\n"
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """No line for each scrape."""
