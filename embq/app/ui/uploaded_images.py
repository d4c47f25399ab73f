"""Images that a page has uploaded for a query: kept in memory for a while, found by a token in the address."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from embq.app.serving.http_errors import HttpError

MOST_IMAGE = 10 * 2**20
"""Bytes of one image, as for `/search`."""

MOST_HELD = 64 * 2**20
"""Bytes of all images that are held; the one that was used longest ago goes first."""


class UploadedImages:
    """Bytes by token, for one event loop. The token is a hash of the bytes, so the same image has the same address."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def hold(self, data: bytes) -> str:
        """Keep an image; returns its token."""
        token = hashlib.sha256(data).hexdigest()[:32]
        self._bytes += 0 if token in self._held else len(data)
        self._held[token] = data
        self._held.move_to_end(token)
        while self._bytes > MOST_HELD:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= len(oldest)
        return token

    def find(self, token: str) -> bytes:
        """The image of a token; HttpError `image_gone` if it is not held any more."""
        if token not in self._held:
            raise HttpError(
                "the server does not hold this image any more",
                code="image_gone",
                next_step="drop, paste or choose it again",
                status=404,
            )
        self._held.move_to_end(token)
        return self._held[token]
