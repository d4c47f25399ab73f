"""fsspec client of webhdfs://, with time-outs and without reading ahead."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fsspec.implementations.webhdfs import WebHDFS
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from embq.core.answers import BYTES_PER_S, GRACE_S, Deadline
from embq.core.errors import SourceError
from embq.sources.access import allowed_hosts

CONNECTIONS = 32
"""Connections that are kept open, so that the threads of all requests find one."""

CHUNK = 256 * 1024

MOST_BYTES = 64 * 2**20
"""Longest answer: above the longest range that is asked for, and a listing of some 100,000 files."""


class WebHdfsClient(WebHDFS):  # type: ignore[misc]
    """fsspec's own client with time-outs, and exact ranges instead of reading far ahead.

    Args:
        connect_s, answer_s: seconds without a connection, and without an answer.
    """

    def __init__(self, *, connect_s: float, answer_s: float, **options: Any) -> None:
        self._timeouts = (connect_s, answer_s)
        super().__init__(**options)

    def _connect(self) -> None:
        super()._connect()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _Impatient(self._timeouts, self.url))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """The bytes of a file from `start` up to `end`, by one request to the name node and one to a data node."""
        params = {"offset": start or 0} | ({} if end is None else {"length": end - (start or 0)})
        content: bytes = self._call("OPEN", path=path, **params).content
        return content


class _Impatient(HTTPAdapter):
    """Connects to what `embq.sources.access.allowed_hosts` allows, and reads bounded bodies.

    A name node that an operator has named may send to its data nodes, wherever they are; another one to public ones.
    """

    def __init__(self, timeouts: tuple[float, float], url: str) -> None:
        super().__init__(pool_connections=CONNECTIONS, pool_maxsize=CONNECTIONS)
        self._timeouts = timeouts
        named = allowed_hosts.current().names(*allowed_hosts.endpoint(url))
        pools = {"http": _Pool, "https": _TlsPool} if named else {"http": _CheckedPool, "https": _CheckedTlsPool}
        self.poolmanager.pool_classes_by_scheme = pools

    def send(self, request: PreparedRequest, *args: Any, **options: Any) -> Response:
        answer = super().send(request, *args, **{**options, "timeout": self._timeouts, "stream": True})
        body = bytearray()
        for chunk in answer.iter_content(CHUNK):
            body += chunk
            if len(body) > MOST_BYTES:
                answer.close()
                raise SourceError(f"{request.url}: more than {MOST_BYTES:,} bytes came", code="source_unreadable")
        answer._content, answer._content_consumed = bytes(body), True
        return answer


class _Timed:
    """A connection of urllib3 whose answers do not come too slowly."""

    def getresponse(self) -> Any:
        Deadline(GRACE_S, BYTES_PER_S).keep(self)  # type: ignore[arg-type]
        return super().getresponse()  # type: ignore[misc]


class _TimedConnection(_Timed, HTTPConnection):
    pass


class _TimedTlsConnection(_Timed, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _TimedConnection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TimedTlsConnection


class _Checked:
    """A connection of urllib3 to one of the addresses that were checked."""

    _dns_host: str
    port: int

    def _new_conn(self) -> Any:
        name = self._dns_host
        *earlier, last = allowed_hosts.current().resolve(name, self.port)
        try:
            for address in earlier:
                self._dns_host = address
                with suppress(HTTPError):
                    return super()._new_conn()  # type: ignore[misc]
            self._dns_host = last
            return super()._new_conn()  # type: ignore[misc]
        finally:
            self._dns_host = name


class _CheckedConnection(_Checked, _TimedConnection):
    pass


class _CheckedTlsConnection(_Checked, _TimedTlsConnection):
    pass


class _CheckedPool(HTTPConnectionPool):
    ConnectionCls = _CheckedConnection


class _CheckedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _CheckedTlsConnection
