"""The models that embed queries: loaded in the background, one after the other, each once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import anyio

from embq.core.errors import EmbqError
from embq.core.service.log import Events
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.serving.served_index import VersionInfo

if TYPE_CHECKING:
    import numpy as np

    from embq.retrieval.searching.embedding import QueryEmbedder

WAIT_S = 300.0
"""Time limit of a query's wait for its model: longer than loading takes on a busy machine. clip-retrieval's client
waits for an hour, and takes any response for results."""

_log = Events("serve")

T = TypeVar("T")


class QueryModels:
    """The models of all indices, by recipe.

    Args:
        load: loads the model of a version; None for a server that embeds nothing.
        on_ready: called with a model's name when it is loaded.
    """

    def __init__(self, load: Callable[[VersionInfo], QueryEmbedder] | None, on_ready: Callable[[str], None]) -> None:
        self._load, self._on_ready = load, on_ready
        self._futures: dict[str, Future[QueryEmbedder]] = {}
        # One: models are loaded one after the other, and libraries are imported by one thread.
        self._thread = ThreadPoolExecutor(1, "models")
        self._lock = threading.Lock()
        self._turns: dict[str, anyio.CapacityLimiter] = {}

    def want(self, version: VersionInfo) -> None:
        """Start to load the model of a version, unless that has started."""
        if self._load is None or version.recipe is None:
            return
        with self._lock:
            if version.recipe.key not in self._futures:
                self._futures[version.recipe.key] = self._thread.submit(self._loaded, version)

    def state(self, version: VersionInfo) -> str:
        """ "off", "none" if the index does not say which model, "loading", "ready" or "failed"."""
        if self._load is None:
            return "off"
        if version.recipe is None:
            return "none"
        future = self._futures.get(version.recipe.key)
        if future is None or not future.done():
            return "loading"
        return "failed" if future.exception() else "ready"

    async def prepare(
        self, version: VersionInfo, preparing: Callable[[QueryEmbedder], T], limiter: anyio.CapacityLimiter
    ) -> T:
        """Call `preparing` with the model of a version, beside whatever else uses it; waits and raises as `embed`."""
        return await anyio.to_thread.run_sync(preparing, await self._ready(version), limiter=limiter)

    async def embed(self, version: VersionInfo, embedding: Callable[[QueryEmbedder], np.ndarray]) -> np.ndarray:
        """Call `embedding` with the model of a version, alone with it; waits until the model is loaded.

        Raises:
            HttpError: `no_model`, or `model_loading` after WAIT_S.
            EmbqError: the model cannot be loaded, or the query not be embedded.
        """
        model = await self._ready(version)
        assert version.recipe is not None
        limiter = self._turns.setdefault(version.recipe.key, anyio.CapacityLimiter(1))
        return await anyio.to_thread.run_sync(embedding, model, limiter=limiter)

    def close(self) -> None:
        """Load nothing more."""
        self._thread.shutdown(cancel_futures=True)

    async def _ready(self, version: VersionInfo) -> QueryEmbedder:
        if self._load is None:
            raise HttpError(
                "this server embeds no queries: it was started with --no-model",
                code="no_model",
                next_step="send a vector as embedding_input, or start the server without --no-model",
                status=501,
            )
        if version.recipe is None:
            raise HttpError(
                "the index does not say which model made its vectors",
                code="no_model",
                next_step="send a vector as embedding_input",
                status=501,
            )
        self.want(version)
        future = self._futures[version.recipe.key]
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), WAIT_S)
        except TimeoutError as error:
            raise HttpError(
                "the model is being loaded",
                code="model_loading",
                next_step="ask again in a while; GET /health says when it is ready",
                status=503,
                retry_after_s=10,
            ) from error

    def _loaded(self, version: VersionInfo) -> QueryEmbedder:
        assert self._load is not None
        try:
            model = self._load(version)
        except EmbqError as error:
            _log.error("query_model_refused", model=version.model, why=error.message, next=error.next_step)
            raise
        except Exception:
            _log.bug("bug", model=version.model)
            raise
        _log.info("query_model_loaded", model=version.model)
        self._on_ready(version.model)
        return model
