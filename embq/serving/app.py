"""The routes, and what a request and an answer look like on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from core.errors import EmbqError
from core.service.log import Events
from embq.serving.http_errors import Refusal, status_of, told
from embq.serving.index_discovery import Following, Watcher
from embq.serving.indices import Indices
from embq.serving.metrics import CONTENT_TYPE, Metrics
from embq.serving.middleware import Door, DoorRules
from embq.serving.query_models import Models
from embq.serving.requests import knn_request, rows_request, search_request
from embq.serving.search import SCHEMA, Answer, Knn, Searches
from embq.serving.served_index import ServedIndex

MOST_BODY = 14 * 2**20
"""An image of 10 MB in base64, and what stands around it."""

BODY_S = 30.0
"""A body that takes longer than this to arrive holds a place for nothing."""

_log = Events("serve")

Endpoint = Callable[[Request], Awaitable[Response]]


class Service:
    """What the routes do.

    Args:
        following: what is followed; None where nothing is.
        embq: version of embq, for /health.
    """

    def __init__(
        self,
        *,
        knn: Knn,
        searches: Searches,
        indices: Indices,
        models: Models,
        metrics: Metrics,
        following: Following | None,
        embq: str,
    ) -> None:
        self._knn, self._searches, self._indices = knn, searches, indices
        self._models, self._metrics, self._following = models, metrics, following
        self._embq = embq

    def routes(self) -> list[Route]:
        """Each path with its method."""
        get: dict[str, Endpoint] = {
            "/indices-list": self.indices_list,
            "/health": self.health,
            "/metrics": self.exposition,
            "/metrics-summary": self.summary,
        }
        post: dict[str, Endpoint] = {
            "/knn-service": self.knn_service,
            "/metadata": self.metadata,
            "/search": self.search,
        }
        return [
            *(Route(path, answering(endpoint), methods=["POST"]) for path, endpoint in post.items()),
            *(Route(path, answering(endpoint), methods=["GET"]) for path, endpoint in get.items()),
        ]

    async def knn_service(self, request: Request) -> Response:
        """The nearest rows to a query."""
        asked = knn_request(await _body(request))
        return await _answered(await self._knn.nearest(asked))

    async def search(self, request: Request) -> Response:
        """What `embq search` asks."""
        answer = await self._searches.answer(search_request(await _body(request)))
        return await anyio.to_thread.run_sync(_json, answer)

    async def metadata(self, request: Request) -> Response:
        """The columns of rows."""
        return await _answered(await self._knn.rows(rows_request(await _body(request))))

    async def indices_list(self, request: Request) -> Response:
        """The names of the indices."""
        return _json(self._indices.names)

    async def health(self, request: Request) -> Response:
        """What is served, and whether queries can be embedded yet."""
        said: dict[str, Any] = {"status": "ok", "embq": self._embq, "search": SCHEMA}
        said["indices"] = [self._state(index) for index in self._indices.all]
        if self._following is not None:
            failed = self._following.failed.values()
            said["not_taken_up"] = [{"name": name, "why": why} for name, why in failed]
        return _json(said)

    async def exposition(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    async def summary(self, request: Request) -> Response:
        """For a person."""
        return PlainTextResponse(self._metrics.summary())

    def _state(self, index: ServedIndex) -> dict[str, Any]:
        version = index.version
        return {
            "name": index.name,
            "modality": index.modality,
            "output": version.output,
            "version": version.name,
            "rows": version.rows,
            "ids": version.ids,
            "source_rows": index.source_rows,
            "coverage": round(version.rows / index.source_rows, 6) if index.source_rows else None,
            "dim": version.dim,
            "similarity": "cosine" if version.cosine else "as the index gives it",
            "model": version.model,
            "fingerprint": version.fingerprint,
            "model_state": self._models.state(version),
            "reload_failed": index.failed,
        }


def application(
    *, service: Service, models: Models, indices: Indices, watcher: Watcher, metrics: Metrics, rules: DoorRules
) -> Starlette:
    """The ASGI application; it begins to load models when it starts, and closes models and indices when it ends."""
    routes = service.routes()
    middleware = [
        Middleware(Door, rules=rules, metrics=metrics, routes=frozenset(route.path for route in routes)),
    ]
    if rules.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=sorted(rules.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Content-Type"],
            expose_headers=["X-Embq-Not-Applied", "X-Embq-Index-Version", "Server-Timing"],
        )
        middleware.append(cors)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        for index in indices.all:
            models.want(index.version)
        watcher.start()
        yield
        # In threads: a model may be in the middle of its loading.
        await anyio.to_thread.run_sync(watcher.stop)
        await anyio.to_thread.run_sync(models.close)
        for index in indices.all:
            index.close()

    return Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={HTTPException: _no_such_route}
    )


def answering(endpoint: Endpoint) -> Endpoint:
    """An endpoint whose every error is an answer."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        except EmbqError as error:
            retry_after_s = error.retry_after_s if isinstance(error, Refusal) else 0
            headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
            return _json(told(error), status_of(error), headers)
        except Exception:  # noqa: BLE001 - the boundary to who asks
            _log.bug("bug", route=request.url.path)
            return _json(
                {
                    "code": "bug",
                    "message": "embq has a bug; its log holds the details",
                    "next": "report it with those lines of the log",
                },
                500,
            )

    return answer


async def _no_such_route(request: Request, error: Exception) -> Response:
    refusal = Refusal(
        f"there is no {request.method} {request.url.path[:100]} here",
        code="no_such_route",
        next_step="POST /search, /knn-service or /metadata; GET /indices-list, /health, /metrics or /metrics-summary",
        status=error.status_code if isinstance(error, HTTPException) else 404,
    )
    return _json(told(refusal), refusal.status, dict(getattr(error, "headers", None) or {}))


async def _body(request: Request) -> object:
    """The JSON of a body, whatever its type is said to be: clip-retrieval's client and page do not say."""
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                found += chunk
                if len(found) > MOST_BODY:
                    raise Refusal(
                        f"the body has more than {MOST_BODY:,} bytes",
                        code="too_large",
                        next_step="make the image smaller: models look at a few hundred pixels of it",
                        status=413,
                    )
    except TimeoutError as error:
        raise Refusal(
            f"the body did not arrive within {BODY_S:g} s", code="too_slow", next_step="send it again", status=408
        ) from error
    try:
        return await anyio.to_thread.run_sync(partial(json.loads, bytes(found), parse_constant=_no_constant))
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"the body is not JSON: {error}", code="bad_json", next_step='send an object, such as {"text": "a red car"}'
        ) from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


async def _answered(answer: Answer) -> Response:
    headers = {"X-Embq-Index-Version": answer.version}
    if answer.not_applied:
        headers["X-Embq-Not-Applied"] = ", ".join(answer.not_applied)
    if answer.server_timing:
        headers["Server-Timing"] = answer.server_timing
    # In a thread: thousands of rows take as long as a search.
    return await anyio.to_thread.run_sync(_json, answer.results, 200, headers)


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, media_type="application/json")
