"""Deadlines of whole answers over HTTP: a server that sends a byte now and then passes every time-out of one read."""

from __future__ import annotations

import io
import math
import socket
import time
import urllib.request
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any

BYTES_PER_S = 1024
"""Least rate of a long answer: sixteen requests at once over the slowest of lines have more each."""


GRACE_S = 60.0
"""Seconds for a long answer beyond those that it takes at that rate."""


class Deadline:
    """When an answer must be complete: some seconds after the start, and later for each byte if it has a rate.

    Args:
        limit_s: seconds for connection, headers and a short body.
        bytes_per_s: rate that a body must have beyond that; infinite for an answer that is small.
    """

    def __init__(self, limit_s: float, bytes_per_s: float = math.inf) -> None:
        self._end, self._bytes_per_s, self._received = time.monotonic() + limit_s, bytes_per_s, 0

    def receive(self, count: int) -> None:
        """Count bytes of a body."""
        self._received += count

    def remaining_s(self) -> float:
        """Seconds left, at least what makes a socket wait; TimeoutError if none are."""
        remaining_s = self._end + self._received / self._bytes_per_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the answer comes too slowly")
        return max(remaining_s, 0.01)

    def keep(self, connection: HTTPConnection) -> None:
        """Have all that a connection receives within this time."""
        connection.response_class = partial(_response, self)  # type: ignore[assignment]


def opener(limit_s: float, *handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """An opener whose answers are complete within some seconds, all redirects together."""
    deadline = Deadline(limit_s)
    return urllib.request.build_opener(_Http(deadline), _Https(deadline), *handlers)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_connection, HTTPConnection, self._deadline), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_connection, HTTPSConnection, self._deadline), request)


def _connection(kind: type[HTTPConnection], deadline: Deadline, host: str, **options: Any) -> HTTPConnection:
    connection = kind(host, **{**options, "timeout": deadline.remaining_s()})
    deadline.keep(connection)
    return connection


def _response(deadline: Deadline, open_socket: socket.socket, *args: Any, **options: Any) -> HTTPResponse:
    response = HTTPResponse(open_socket, *args, **options)
    response.fp = io.BufferedReader(_Timed(response.fp.detach(), open_socket, deadline))
    return response


class _Timed(io.RawIOBase):
    """A file of a socket, each of whose reads waits for the time that is left."""

    def __init__(self, file: Any, open_socket: socket.socket, deadline: Deadline) -> None:
        self._file, self._socket, self._deadline = file, open_socket, deadline
        self._read_s = open_socket.gettimeout() or math.inf

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(min(self._read_s, self._deadline.remaining_s()))
        count: int | None = self._file.readinto(buffer)
        self._deadline.receive(count or 0)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
