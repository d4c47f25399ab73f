"""Answers with many bytes, bounded by what clients have not read yet: a slow reader keeps its answer in memory."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.serving.middleware import client_of

MOST_UNREAD, _PIECE = 512 * 2**20, 64 * 2**10
"""Bytes of answers that clients have not read yet, above which no more are made; and of a write."""


class CountedResponse(Response):
    """An answer in pieces, so that the server knows when it is read; `unread` are the bytes that are not, by client."""

    unread: ClassVar[Counter[str]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""
        size, client = len(self.body), client_of(scope)
        self.unread[client] += size
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for end in range(_PIECE, size + _PIECE, _PIECE):
                piece = self.body[end - _PIECE : end]
                await send({"type": "http.response.body", "body": piece, "more_body": end < size})
        finally:
            self.unread[client] -= size
            if not self.unread[client]:
                del self.unread[client]


def require_read(request: Request) -> None:
    """HttpError `overloaded` if this client, or all of them, have too much to read before another answer."""
    unread = CountedResponse.unread
    if unread[client_of(request.scope)] > MOST_UNREAD * 3 // 4 or unread.total() > MOST_UNREAD:
        raise HttpError(
            "clients read their answers too slowly",
            code="overloaded",
            next_step="ask later",
            status=503,
            retry_after_s=1,
        )
