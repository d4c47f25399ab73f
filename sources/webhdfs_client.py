"""The client of webhdfs://: fsspec's, with timeouts, and each range asked for as it is wanted."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.webhdfs import WebHDFS
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter

CONNECTIONS = 32
"""Kept open, so that the threads of all requests find one."""


class WebHdfsClient(WebHDFS):  # type: ignore[misc]
    """fsspec's own client, but for its waiting without end, and its reading far ahead of what is asked for.

    Args:
        connect_s, answer_s: seconds without a connection, and without an answer.
    """

    def __init__(self, *, connect_s: float, answer_s: float, **options: Any) -> None:
        self._timeouts = (connect_s, answer_s)
        super().__init__(**options)

    def _connect(self) -> None:
        super()._connect()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _Impatient(self._timeouts))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """The bytes of a file from `start` up to `end`, by one request to the name node and one to a data node."""
        wanted = {"offset": start or 0} | ({} if end is None else {"length": end - (start or 0)})
        content: bytes = self._call("OPEN", path=path, **wanted).content
        return content


class _Impatient(HTTPAdapter):
    def __init__(self, timeouts: tuple[float, float]) -> None:
        super().__init__(pool_connections=CONNECTIONS, pool_maxsize=CONNECTIONS)
        self._timeouts = timeouts

    def send(self, request: PreparedRequest, *args: Any, **options: Any) -> Response:
        return super().send(request, *args, **{**options, "timeout": self._timeouts})
