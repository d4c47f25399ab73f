"""Images of queries, prepared beside the model: an image that takes long to decode holds up no other query."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from embq.core.errors import InputError
from embq.retrieval.serving.query_models import QueryModels
from embq.retrieval.serving.served_index import VersionInfo

if TYPE_CHECKING:
    from embq.retrieval.searching.embedding import QueryEmbedder

CHEAP_PIXELS = 16_000_000
"""Pixels times scans of an image that is decoded at once, in some 200 ms: most photographs."""

MAX_SCANNED_PIXELS = 128_000_000
"""Pixels times scans of an image: 64 MP in two scans, 12 MP in ten, as telephones write. They take a core a second."""

AT_ONCE = 2
"""Images that are prepared at the same time: of cheap ones, and of others."""


class QueryImages:
    """Prepares images of queries for their model.

    Args:
        try_decoding: decodes an image in a process of its own, under limits of time and memory; raises SampleError for
            one that cannot be decoded within them.
    """

    def __init__(self, models: QueryModels, try_decoding: Callable[[bytes], object]) -> None:
        self._models, self._try_decoding = models, try_decoding
        self._cheap, self._costly = anyio.CapacityLimiter(AT_ONCE), anyio.CapacityLimiter(AT_ONCE)

    async def prepare(self, version: VersionInfo, data: bytes) -> Any:
        """An image as `QueryEmbedder.prepared_image` takes it.

        Raises as `QueryModels.embed`; SampleError if the image cannot be decoded; InputError `too_large` if that takes
        too long.
        """
        is_cheap = await anyio.to_thread.run_sync(_is_cheap, data)
        limiter = self._cheap if is_cheap else self._costly
        return await self._models.prepare(version, partial(self._prepared, data, is_cheap), limiter)

    def _prepared(self, data: bytes, is_cheap: bool, model: QueryEmbedder) -> Any:
        if not is_cheap:
            self._try_decoding(data)
        return model.prepare_image(data)


def _is_cheap(data: bytes) -> bool:
    """False for an image that is tried in a process of its own; InputError `too_large` for one that is not decoded."""
    from embq.worker.embedders.image.headers import scanned_pixels

    pixels = scanned_pixels(data)
    if pixels is not None and pixels > MAX_SCANNED_PIXELS:
        raise InputError(
            f"the image has {pixels:,} pixels to decode, counted once for each of its scans",
            next_step="send a smaller one: models look at a few hundred pixels on a side",
            code="too_large",
        )
    return pixels is not None and pixels <= CHEAP_PIXELS
