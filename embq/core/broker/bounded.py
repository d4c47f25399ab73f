"""Connections that hold a bounded part of an answer, whatever lies in the broker.

The protocol tells the length of a value before it: one that does not fit is read past, piece by piece. This must be
below the library, which has a whole answer in memory, twice, before any check of its content.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from redis._parsers import _RESP3Parser
from redis._parsers.socket import SERVER_CLOSED_CONNECTION_ERROR, SocketBuffer
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError, ResponseError
from redis.utils import SENTINEL

MOST_VALUE_BYTES = 16 << 20
"""Largest value that is kept: servers that we configure take no larger ones."""

MOST_ANSWER_BYTES = 64 << 20
"""Bytes of values that are kept of what one command, or pipeline, is answered."""

RESULT_BYTES = 256 << 20
"""The same of clients that read results: as many as the largest result that travels through the broker."""

_PIECE_BYTES = 1 << 16


class Oversized(bytes):
    """In place of a value that was not kept: it has the length of the value, and no content."""

    _length: int

    def __new__(cls, length: int) -> Oversized:
        """Of a value of `length` bytes."""
        oversized = super().__new__(cls)
        oversized._length = length
        return oversized

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True


class _Buffer(SocketBuffer):
    budget = 0

    def read(self, length: int, timeout: Any = SENTINEL) -> bytes:
        if length <= min(self.budget, MOST_VALUE_BYTES):
            self.budget -= length
            return super().read(length, timeout)
        missing = length + 2 - len(self._buffer.read(length + 2))
        if missing:
            self.purge()
        piece = memoryview(bytearray(_PIECE_BYTES))
        while missing:
            count = self._sock.recv_into(piece[:missing])
            if not count:
                raise ConnectionError(SERVER_CLOSED_CONNECTION_ERROR)
            missing -= count
        return Oversized(length)


class _Parser(_RESP3Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = _Buffer(connection._sock, self.socket_read_size, connection.socket_timeout)


class Bounded(AbstractConnection):
    """Counts anew with each command.

    Args:
        answer_bytes: as `MOST_ANSWER_BYTES`.
    """

    def __init__(self, *, answer_bytes: int = MOST_ANSWER_BYTES, **options: Any) -> None:
        self._answer_bytes = answer_bytes
        # No names of the library: users may not set any, see `embq.core.broker.users`.
        super().__init__(**{**options, "parser_class": _Parser, "driver_info": None})

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health)
        if self._answer_bytes > MOST_ANSWER_BYTES:
            # The server disconnects the largest client where all have too much together (maxmemory-clients). The writer
            # of results is not to be it, however much others leave unread.
            self.send_command("CLIENT", "NO-EVICT", "ON", check_health=False)  # type: ignore[no-untyped-call]
            with suppress(ResponseError):  # servers before Redis 7, and users with other rights
                self.read_response()

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]
        if isinstance(buffer := self._parser._buffer, _Buffer):
            buffer.budget = self._answer_bytes


class _BoundedConnection(Bounded, Connection):
    pass


class BoundedSSLConnection(Bounded, SSLConnection):
    """By TLS."""


class _BoundedUnixConnection(Bounded, UnixDomainSocketConnection):
    pass


CONNECTIONS = {"redis": _BoundedConnection, "rediss": BoundedSSLConnection, "unix": _BoundedUnixConnection}
"""Scheme of a broker's URL -> class of its connections."""
