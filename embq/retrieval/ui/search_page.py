"""The search page: a query in the address, results with thumbnails or texts."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import anyio
import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from embq.core.errors import EmbqError, InputError
from embq.core.filter.condition import OPS, Condition
from embq.retrieval.searching.local import check_ids, results_of
from embq.retrieval.searching.query import MOST_RESULTS, Query, Result, by_document
from embq.retrieval.serving.app import Serving, answering, read_body
from embq.retrieval.serving.http_errors import HttpError, status_of
from embq.retrieval.serving.served_index import OpenVersion, ServedIndex, VersionInfo
from embq.retrieval.ui.rendering import SECURITY_HEADERS, page
from embq.retrieval.ui.search_state import PAGE, SearchState

TIMING = (("embed_ms", "embedding"), ("filter_ms", "filter"), ("search_ms", "index"), ("rows_ms", "reading"))
"""Field of the answer -> name on the page."""

MOST_IMAGE = 10 * 2**20
"""Bytes of one image, as for `/search`."""

MOST_HELD = 64 * 2**20
"""Bytes of all images that are held; the one that was used longest ago goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPage:
    """What the page shows below the query.

    Attributes:
        rows: results, best first, by document; or rows to begin with if there is no query.
        timing: (name, milliseconds) of each step.
        total_ms: from the request to the rows.
        query: that they answer; None if there is none, or it was not answered.
        error: why there are no results.
        waiting: the model is loaded at the moment; the page asks again.
        has_more: whether a further page may have results.
    """

    rows: list[list[Result]]
    timing: list[tuple[str, float]]
    total_ms: float = 0.0
    query: Query | None = None
    error: EmbqError | None = None
    waiting: bool = False
    has_more: bool = False


class SearchPage:
    """The page `/`, and the images that it uploads.

    Args:
        preview: makes a small JPEG of an encoded image.
    """

    def __init__(self, serving: Serving, preview: Callable[[bytes], bytes]) -> None:
        self._serving, self._preview = serving, preview
        self._images = UploadedImages()
        self.routes = [
            Route("/", answering(self.show), methods=["GET"]),
            Route("/ui/image", answering(self.upload), methods=["POST"]),
            Route("/ui/image/{token}", answering(self.uploaded), methods=["GET"]),
        ]

    async def show(self, request: Request) -> Response:
        """The page with the results of the query in its address; for htmx the part that changes."""
        part, row, results = request.headers.get("hx-target", ""), None, ResultPage(rows=[], timing=[])
        try:
            state = SearchState.from_address(request.query_params)
            if (added := _added_condition(request)) is not None:
                return RedirectResponse(state.with_(where=(*state.where, added)).href, 303)
            index = self._serving.indices.at(state.index)
            if index is not None and state.row is not None:
                row = await self._row(index, state.row)
        except EmbqError as error:
            state, index = SearchState(), self._serving.indices.at("")
            results = ResultPage(rows=[], timing=[], error=error)
        else:
            if index is not None and part != "row":
                results = await self._results(state, index)
        if index is not None:
            state = replace(state, index=index.qualified_name)
        template = {"results": "search_results.html", "row": "search_row.html"}.get(part, "search.html")
        return page(
            request,
            template,
            status=200 if template != "search.html" or results.error is None else status_of(results.error),
            headers={"Vary": "HX-Request, HX-Target"} | ({"HX-Push-Url": state.href} if part == "results" else {}),
            state=state,
            results=results,
            index=index,
            indices=self._serving.indices.all,
            columns=await self._serving.search.columns(index.name, index.modality) if index is not None else (),
            copies=_copies(str(request.base_url).rstrip("/"), results.query, state.where) if results.query else (),
            takes=self._takes(index.version) if index is not None else (),
            row=row,
            pictures=index is not None and index.modality == "image" and index.version.recipe is not None,
            operators=OPS,
            page_size=PAGE,
        )

    async def upload(self, request: Request) -> Response:
        """Keep an image for a query; answers its token."""
        data = await read_body(request, MOST_IMAGE)
        if not data:
            raise HttpError("the body is empty", code="bad_query", next_step="send the bytes of an image file")
        return JSONResponse({"image": self._images.hold(data)}, headers={"Cache-Control": "no-store"})

    async def uploaded(self, request: Request) -> Response:
        """An uploaded image, made anew as a small JPEG: bytes of a client are never sent back."""
        data = await anyio.to_thread.run_sync(self._preview, self._images.find(request.path_params["token"]))
        headers = {**SECURITY_HEADERS, "Cache-Control": "private, max-age=3600"}
        return Response(data, media_type="image/jpeg", headers=headers)

    def _takes(self, version: VersionInfo) -> tuple[str, ...]:
        """Kinds of queries that can be embedded: none without a model."""
        if version.recipe is None or self._serving.models.state(version) == "off":
            return ()
        from embq.retrieval.searching.embedding import QueryEmbedder

        return QueryEmbedder.open(version.recipe.model, version.recipe.rows, version.fingerprint).modalities

    async def _row(self, index: ServedIndex, id_: int) -> Result:
        """A row by its id. Raises InputError `no_such_id`."""
        check_ids(Query(id=id_), index.version.ids)
        with index.use() as version:
            ids = np.array([id_], np.int64)
            return (await anyio.to_thread.run_sync(partial(_rows, version, ids), limiter=version.turn))[0]

    async def _results(self, state: SearchState, index: ServedIndex) -> ResultPage:
        began = time.perf_counter()
        try:
            conditions = tuple(Condition.parse(text) for text in state.where)
            if not state.has_query and not conditions:
                with index.use() as version:
                    rows = await anyio.to_thread.run_sync(partial(_first_rows, version), limiter=version.turn)
                return ResultPage(rows=[[row] for row in rows], timing=[])
            if not state.has_query:
                raise InputError(
                    "conditions narrow a search, and there is nothing to search for",
                    code="no_query",
                    next_step="type a text, drop an image, or choose a row as an example",
                )
            if (state.text or state.image) and self._serving.models.state(index.version) == "loading":
                return ResultPage(rows=[], timing=[], waiting=True)
            query = Query(
                text=state.text or None if not state.image else None,
                image=self._images.find(state.image) if state.image else None,
                id=state.id if not (state.text or state.image) else None,
                like=state.like,
                unlike=state.unlike,
                where=conditions,
                k=PAGE,
                offset=state.offset,
                index=index.name,
                modality=index.modality,
            )
            answer = await self._serving.search.search(query)
        except EmbqError as error:
            return ResultPage(rows=[], timing=[], error=error)
        timing = [(name, answer.timing[field]) for field, name in TIMING if answer.timing[field]]
        rows = answer.results
        return ResultPage(
            rows=by_document(rows),
            timing=timing,
            total_ms=1000 * (time.perf_counter() - began),
            query=query,
            has_more=len(rows) == PAGE and state.offset + 2 * PAGE <= MOST_RESULTS,
        )


def _first_rows(version: OpenVersion) -> list[Result]:
    """Rows from all over the index, to begin with."""
    ids = np.unique(np.linspace(0, max(0, version.info.ids - 1), PAGE).astype(np.int64))[: version.info.ids]
    return _rows(version, ids)


def _rows(version: OpenVersion, ids: np.ndarray) -> list[Result]:
    return results_of(ids, np.zeros(len(ids), np.float32), version.searcher.rows, k=PAGE)


def _added_condition(request: Request) -> str | None:
    """The condition in the fields of the form; None if the form was not sent."""
    column, operator, value = (request.query_params.get(name, "") for name in ("column", "op", "value"))
    return f"{column} {operator} {value}" if column and operator in OPS else None


def _copies(server: str, query: Query, where: tuple[str, ...]) -> list[tuple[str, str]]:
    """(tool, command) for the search of the page in other tools; `where` has its conditions as texts."""
    body = replace(query, image=None).to_json() | ({"image": "IMAGE IN BASE64"} if query.image else {})
    curl = f"curl -s {shlex.quote(server + '/search')} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    text = [query.text] if query.text else []
    options: dict[str, Any] = {"image": ["FILE"] if query.image else [], "id": [] if query.id is None else [query.id]}
    lists = {"like": query.like, "unlike": query.unlike, "where": where}
    named = {name: values[0] for name, values in options.items() if values}
    named |= {"k": query.k, "name": query.index} | {name: list(values) for name, values in lists.items() if values}
    call = ", ".join([*map(repr, [server, *text]), *(f"{name}={value!r}" for name, value in named.items())])
    pairs = [(f"--{name}", str(value)) for name, values in (options | lists).items() for value in values]
    shell = ["embq", "search", server, *text, *chain(*pairs), "-k", str(query.k), "--index", query.index]
    return [("curl", curl), ("Python", f"import embq\n\nembq.search({call})"), ("CLI", shlex.join(shell))]


class UploadedImages:
    """Images that a page has uploaded for a query, kept in memory for a while; for one event loop.

    They are found by a token in the address, a hash of the bytes: the same image has the same address.
    """

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
