"""The models that turn queries into vectors: loaded in the background, one after the other, each once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import anyio

from core.errors import EmbqError
from core.service.log import Events
from embq.serving.http_errors import Refusal
from embq.serving.served_index import Version

if TYPE_CHECKING:
    import numpy as np

WAIT_S = 300.0
"""How long a query waits for its model: longer than models take to load on a busy machine. clip-retrieval's client
waits for an hour, and takes whatever comes for results."""

_log = Events("serve")


class QueryModel(Protocol):
    """A model with the fingerprint of an index. One thread at a time."""

    def text(self, text: str) -> np.ndarray:
        """float32 (d,)."""
        ...

    def image(self, data: bytes) -> np.ndarray:
        """float32 (d,) of an image file."""
        ...


Loader = Callable[[Version], QueryModel]


class Models:
    """The models of all indices, by recipe.

    Args:
        load: loads the model of a version; None for a server that embeds nothing.
        tell: called with a model's name when it is ready.
    """

    def __init__(self, load: Loader | None, tell: Callable[[str], None]) -> None:
        self._load, self._tell = load, tell
        self._found: dict[str, Future[QueryModel]] = {}
        # One: models are loaded one after the other, and libraries are imported by one thread.
        self._thread = ThreadPoolExecutor(1, "models")
        self._lock = threading.Lock()
        self._turns: dict[str, anyio.CapacityLimiter] = {}

    def want(self, version: Version) -> None:
        """Begin to load the model of a version, unless that has begun."""
        if self._load is None or version.recipe is None:
            return
        with self._lock:
            if version.recipe.key not in self._found:
                self._found[version.recipe.key] = self._thread.submit(self._loaded, version)

    def state(self, version: Version) -> str:
        """ "off", "none" where the index does not say which model, "loading", "ready" or "failed"."""
        if self._load is None:
            return "off"
        if version.recipe is None:
            return "none"
        future = self._found.get(version.recipe.key)
        if future is None or not future.done():
            return "loading"
        return "failed" if future.exception() else "ready"

    async def embed(self, version: Version, embedding: Callable[[QueryModel], np.ndarray]) -> np.ndarray:
        """What `embedding` makes of the model of a version, which it has for itself; waits until it is loaded.

        Raises:
            Refusal: `no_model`, or `model_loading` after WAIT_S.
            EmbqError: why the model cannot be loaded, or the query not be embedded.
        """
        model = await self._ready(version)
        assert version.recipe is not None
        limiter = self._turns.setdefault(version.recipe.key, anyio.CapacityLimiter(1))
        return await anyio.to_thread.run_sync(embedding, model, limiter=limiter)

    def close(self) -> None:
        """Load nothing more."""
        self._thread.shutdown(cancel_futures=True)

    async def _ready(self, version: Version) -> QueryModel:
        if self._load is None:
            raise Refusal(
                "this server embeds no queries: it was started with --no-model",
                code="no_model",
                next_step="send a vector as embedding_input, or start the server without --no-model",
                status=501,
            )
        if version.recipe is None:
            raise Refusal(
                "the index does not say which model made its vectors",
                code="no_model",
                next_step="send a vector as embedding_input",
                status=501,
            )
        self.want(version)
        future = self._found[version.recipe.key]
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), WAIT_S)
        except TimeoutError as error:
            raise Refusal(
                "the model is being loaded",
                code="model_loading",
                next_step="ask again in a while; GET /health says when it is ready",
                status=503,
                retry_after_s=10,
            ) from error

    def _loaded(self, version: Version) -> QueryModel:
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
        self._tell(version.model)
        return model
