"""The ASGI application of `embq serve`: assembly, routes, request bodies and responses."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio
from anyio.lowlevel import RunVar
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from embq.core.errors import EmbqError, InputError, UsageError
from embq.core.service.log import Events
from embq.core.service.metrics import CONTENT_TYPE
from embq.core.storage.paths import is_url
from embq.retrieval.searching.query import EXAMPLE, SCHEMA, Query
from embq.retrieval.serving.http_errors import ErrorPage, HttpError, error_response, json_response
from embq.retrieval.serving.index_discovery import IndexWatcher, Named, named_indices
from embq.retrieval.serving.indices import Indices
from embq.retrieval.serving.metrics import Metrics
from embq.retrieval.serving.middleware import AccessMiddleware, AccessRules
from embq.retrieval.serving.query_images import QueryImages
from embq.retrieval.serving.query_models import QueryModels
from embq.retrieval.serving.requests import KnnRequest, RowsRequest
from embq.retrieval.serving.search import KnnAnswer, Search
from embq.retrieval.serving.served_index import ServedIndex, VersionInfo, collection_rows, open_version

if TYPE_CHECKING:
    from embq.retrieval.searching.embedding import QueryEmbedder

MOST_BODY = 14 * 2**20
"""Bytes: an image of 10 MB in base64, and the JSON around it."""

BODY_S = 30.0
"""Time limit for a body to arrive; a slower one keeps others from being answered."""

PARSED_HERE = 64 * 1024
"""Bytes of a body that is parsed without a change of threads, which takes longer than that."""

MAX_VALUES = 200_000
"""Values in the JSON of a body: a vector has some thousand, a text of a query 10,000 characters."""

MAX_NESTED = 200_000
"""Lists, objects and their fields in it, of which each takes 60 to 200 bytes of memory."""

_log = Events("serve")

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts of a server that its web pages and further endpoints stand on."""

    indices: Indices
    models: QueryModels
    search: Search
    metrics: Metrics


class Site(Protocol):
    """Routes beside the endpoints of search: web pages, embeddings."""

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """The routes. They may not share a path and a method with an endpoint."""
        ...

    def start(self) -> None:
        """Start what runs beside the routes, before the first request."""
        ...

    def stop(self) -> None:
        """Stop it, after the last request."""
        ...


def application(
    folders: Sequence[str],
    names: Sequence[str],
    *,
    follow: bool,
    memory: str,
    threads: int,
    with_models: bool,
    image_urls: bool,
    rules: AccessRules,
    try_decoding: Callable[[bytes], object],
    site: Callable[[Serving], Site] | None = None,
    error_page: ErrorPage | None = None,
    embeddings: Callable[[Serving], Site] | None = None,
) -> Starlette:
    """The ASGI application over indexes, all of which are open; models are loaded once it runs.

    Args:
        folders: of indexes, or of runs with indexes; s3:// or gs:// URLs are fetched into the cache.
        names: NAME=FOLDER or NAME=URL.
        follow: whether `folders` hold indexes at any depth, and are watched for new ones.
        memory: "ram" or "mmap".
        threads: of one search.
        try_decoding: as of `QueryImages`.
        site: makes the web pages; None for none.
        error_page: makes the page of an error, for browsers; None for none.
        embeddings: makes the endpoints that embed; None for none. With them no index is needed.

    Raises what `named_indices` and opening an index raise; InputError if a folder to follow does not exist.
    """
    followed = [_existing(folder) for folder in folders] if follow else []
    needs_none = followed or (embeddings is not None and not folders)
    named = [] if needs_none and not names else named_indices(() if follow else folders, names)

    def opened(index: Named) -> ServedIndex:
        return ServedIndex(
            name=index.name,
            modality=index.modality,
            path=index.path,
            opener=partial(open_version, memory=memory, threads=threads),
            count_rows=collection_rows,
            source=index.source,
        )

    metrics = Metrics()
    models = QueryModels(
        _load_model if with_models else None,
        on_ready=lambda model: metrics.gauges["embq_model_ready"].labels(model).set(1),
    )
    indices = Indices([opened(index) for index in named])
    watcher = IndexWatcher(indices, followed, opened=opened, models=models, metrics=metrics)
    search = Search(indices, models, QueryImages(models, try_decoding), metrics, image_urls=image_urls)
    serving = Serving(indices=indices, models=models, search=search, metrics=metrics)
    sites = [make(serving) for make in (embeddings, site) if make is not None]
    routes: list[BaseRoute] = [
        *Routes(search, indices, models, watcher, metrics).all(),
        *(route for part in sites for route in part.routes),
    ]
    middleware = _middleware(rules, metrics, routes)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        for index in indices.all:
            models.want(index.version)
        watcher.start()
        for part in sites:
            part.start()
        yield
        for part in sites:
            await anyio.to_thread.run_sync(part.stop)
        # In threads: a model may still be loading.
        await anyio.to_thread.run_sync(watcher.stop)
        await anyio.to_thread.run_sync(models.close)
        for index in indices.all:
            index.close()

    both = ([EMBEDDINGS] if embeddings else []) + ([SEARCHES] if named or followed or not embeddings else [])
    paths = (f"{PAGES}; programs: " if site else "") + "; to search: ".join(both)
    # The second is for what is no endpoint: files, middleware.
    handlers: dict[Any, Any] = {HTTPException: partial(_no_such_route, paths=paths), Exception: _failed}
    app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)
    app.state.error_page = error_page
    return app


def _middleware(rules: AccessRules, metrics: Metrics, routes: Sequence[BaseRoute]) -> list[Middleware]:
    """Checks and measurements of each request; and, if there are origins, answers to what browsers ask for them."""
    access = Middleware(AccessMiddleware, rules=rules, metrics=metrics, routes=routes)
    if not rules.origins:
        return [access]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=sorted(rules.origins),
        allow_methods=["GET", "POST"],
        allow_headers=["Content-Type"],
        expose_headers=["X-Embq-Not-Applied", "X-Embq-Index-Version", "Server-Timing"],
    )
    return [access, cors]


def _existing(given: str) -> Path:
    if is_url(given):
        raise UsageError(
            f"--follow watches folders of this machine, and {given} is a URL",
            next_step="leave out --follow: embq serve looks every 30 s for new versions of the indexes that are named",
        )
    folder = Path(given).resolve()
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder} to follow",
            next_step="check the name, or make it; it may be empty",
            code="no_index",
        )
    return folder


def _load_model(version: VersionInfo) -> QueryEmbedder:
    """The model of a version, loaded for every kind of query that it embeds."""
    from embq.retrieval.searching.embedding import QueryEmbedder

    assert version.recipe is not None
    embedder = QueryEmbedder.open(version.recipe.model, version.recipe.rows, version.fingerprint)
    for modality in embedder.modalities:
        embedder.load(modality)
    return embedder


class Routes:
    """The endpoints."""

    def __init__(
        self, search: Search, indices: Indices, models: QueryModels, watcher: IndexWatcher, metrics: Metrics
    ) -> None:
        self._search, self._indices, self._models = search, indices, models
        self._watcher, self._metrics = watcher, metrics

    def all(self) -> list[Route]:
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
        """The rows nearest to a query, for clients of clip-retrieval."""
        return await _knn_response(await self._search.knn(KnnRequest.from_json(await json_body(request))))

    async def metadata(self, request: Request) -> Response:
        """The columns of rows."""
        return await _knn_response(await self._search.rows(RowsRequest.from_json(await json_body(request))))

    async def search(self, request: Request) -> Response:
        """The results of a query, for `embq search`."""
        answer = await self._search.search(Query.from_json(await json_body(request)))
        return await anyio.to_thread.run_sync(lambda: json_response(answer.describe()))

    async def indices_list(self, request: Request) -> Response:
        """The names of the indexes."""
        return json_response(self._indices.names)

    async def health(self, request: Request) -> Response:
        """Served indexes, and the state of their models."""
        health: dict[str, Any] = {"status": "ok", "embq": version_of("embq"), "search": SCHEMA}
        health["indices"] = [self._state(index) for index in self._indices.all]
        if self._watcher.follows:
            health["not_taken_up"] = [{"name": name, "why": why} for name, why in self._watcher.failed.values()]
        return json_response(health)

    async def exposition(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    async def summary(self, request: Request) -> Response:
        """Metrics as a table."""
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


def answering(endpoint: Endpoint) -> Endpoint:
    """An endpoint whose errors are answered as `error_response` does."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=400)  # not read by anyone
        except Exception as error:  # noqa: BLE001 - the boundary to the client
            return await _failed(request, error)

    return answer


async def _failed(request: Request, error: Exception) -> Response:
    """The answer to an exception that is being handled; one that is none of embq's is a bug, which is logged."""
    if isinstance(error, EmbqError):
        return error_response(request, error)
    number = secrets.token_hex(4)
    _log.bug("bug", id=number, route=request.url.path)
    what = f"embq has a bug; its log holds the details under id={number}"
    return error_response(request, EmbqError(what, next_step="report it with those lines of the log"))


SEARCHES = "POST /search, /knn-service or /metadata; GET /indices-list, /health, /metrics or /metrics-summary"
EMBEDDINGS = "POST /v1/embeddings or /embed; GET /v1/models, /info, /health or /metrics"
PAGES = "open /, /fleet or /map"
"""Paths of a server, for requests to others."""


async def _no_such_route(request: Request, error: HTTPException, *, paths: str) -> Response:
    refusal = HttpError(
        f"there is no {request.method} {request.url.path[:100]} here",
        code="no_such_route",
        next_step=paths,
        status=error.status_code,
    )
    return error_response(request, refusal, error.headers)


SMALLER = "send less in one request; of an image, models look at a few hundred pixels"


async def read_body(request: Request, most: int = MOST_BODY, *, smaller: str = SMALLER) -> bytes:
    """The bytes of a body. Raises HttpError `too_large` above `most` of them, `too_slow` after BODY_S.

    Args:
        smaller: next step if it is too large.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise HttpError(
                        f"the body has more than {most:,} bytes",
                        code="too_large",
                        next_step=smaller,
                        status=413,
                    )
    except TimeoutError as error:
        raise HttpError(
            f"the body did not arrive within {BODY_S:g} s", code="too_slow", next_step="send it again", status=408
        ) from error
    return bytes(body)


async def json_body(
    request: Request,
    most: int = MOST_BODY,
    *,
    example: str = EXAMPLE,
    smaller: str = SMALLER,
    max_values: int = MAX_VALUES,
) -> object:
    """The JSON of a body, whatever its content type: clip-retrieval's client and page send none.

    Args:
        example: of a body, for the errors.
        smaller: as of `read_body`.
        max_values: values that the JSON may have, counted before it is parsed: they take many times its bytes.

    Raises HttpError as `read_body`, and `bad_json`.
    """
    body = await read_body(request, most, smaller=smaller)
    parse = partial(_parsed, body, max_values, smaller)
    try:
        if len(body) <= PARSED_HERE:
            return parse()
        return await anyio.to_thread.run_sync(parse, limiter=_one_large_body())
    except (ValueError, RecursionError) as error:
        raise HttpError(
            f"the body is not JSON: {error}", code="bad_json", next_step=f"send an object, such as {example}"
        ) from error


_large_bodies: RunVar[anyio.CapacityLimiter] = RunVar("_large_bodies")


def _one_large_body() -> anyio.CapacityLimiter:
    """The limiter of this event loop that lets one large body be parsed at a time, which keeps others from Python."""
    try:
        return _large_bodies.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(1)
        _large_bodies.set(limiter)
        return limiter


def _parsed(body: bytes, max_values: int, smaller: str) -> object:
    """The JSON of a body. Raises HttpError `too_large` for more values than are allowed, ValueError, RecursionError."""
    # Texts hold these characters as well, so both are upper bounds.
    values = body.count(b",")
    nested = body.count(b"[") + body.count(b"{") + body.count(b":")
    if values > max_values or nested > MAX_NESTED:
        raise HttpError(
            f"the body has {values:,} commas and {nested:,} brackets and colons; {max_values:,} and {MAX_NESTED:,} are "
            "the most",
            code="too_large",
            next_step=smaller,
            status=413,
        )
    return json.loads(body, parse_constant=_no_constant)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


async def _knn_response(answer: KnnAnswer) -> Response:
    headers = {"X-Embq-Index-Version": answer.version}
    if answer.not_applied:
        headers["X-Embq-Not-Applied"] = ", ".join(answer.not_applied)
    if answer.server_timing:
        headers["Server-Timing"] = answer.server_timing
    # In a thread: encoding thousands of rows takes as long as a search.
    return await anyio.to_thread.run_sync(json_response, answer.results, 200, headers)
