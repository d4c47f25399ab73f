"""The map page: rows of an index as points, coloured by a column, with search hits and a selection of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from embq.app.serving.app import Serving, answering, read_body
from embq.app.serving.http_errors import HttpError, status_of
from embq.app.serving.served_index import ServedIndex
from embq.app.ui.map.data import LoadedMap, LoadedMaps, Shape
from embq.app.ui.map.embedding_atlas import address, application_folder, atlas_routes
from embq.app.ui.rendering import SECURITY_HEADERS, page
from embq.core import wire
from embq.core.errors import EmbqError, InputError
from embq.indexer.atlas.map_file import MapInfo

MOST_SHAPE = 1 << 16
"""Bytes of a shape."""


def map_routes(serving: Serving) -> list[BaseRoute]:
    """Routes of the page `/map`, its data, and Embedding Atlas where that is installed."""
    return MapPage(serving).routes


@dataclass(frozen=True, slots=True, kw_only=True)
class MapView:
    """What the template of the page shows.

    Attributes:
        value: the index as NAME:MODALITY; "" for none.
        stale: whether the index has changed since the map was made.
        missing: whether the index has no map yet.
        error: why there is no map otherwise.
        query: text that is searched for when the page is open.
        atlas: address of Embedding Atlas; "" where that is not installed.
    """

    index: ServedIndex | None
    value: str
    indices: Sequence[ServedIndex]
    map: LoadedMap | None
    info: MapInfo | None
    stale: bool
    missing: bool
    error: EmbqError | None
    query: str
    atlas: str


class MapPage:
    """The page `/map`, and its data."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._maps = LoadedMaps()
        self._atlas = application_folder()
        self.routes: list[BaseRoute] = [
            Route("/map", self.show, methods=["GET"]),
            Route("/map/points", answering(self.points), methods=["GET"]),
            Route("/map/colours", answering(self.colours), methods=["GET"]),
            Route("/map/select", answering(self.select), methods=["POST"]),
            *(atlas_routes(self._atlas, self._map_of) if self._atlas is not None else []),
        ]

    async def show(self, request: Request) -> Response:
        """The page; its script fetches points and colours."""
        index: ServedIndex | None = None
        loaded: LoadedMap | None = None
        error: EmbqError | None = None
        try:
            index = self._index(request.query_params.get("index", ""))
            if index is not None:
                loaded = await anyio.to_thread.run_sync(self._maps.of, index.path)
        except EmbqError as failed:
            error = failed
        view = MapView(
            index=index,
            value=f"{index.name}:{index.modality}" if index is not None else "",
            indices=self._serving.indices.all,
            map=loaded,
            info=loaded.info if loaded is not None else None,
            stale=loaded is not None and index is not None and loaded.info.version != index.version.name,
            missing=error is not None and error.code == "no_map",
            error=error if error is not None and error.code != "no_map" else None,
            query=request.query_params.get("q", ""),
            atlas=address(index.name, index.modality)
            if index is not None and loaded is not None and self._atlas is not None
            else "",
        )
        status = 200 if view.error is None else status_of(view.error)
        return page(request, "map.html", view, status)

    async def points(self, request: Request) -> Response:
        """See `LoadedMap.points`."""
        loaded = await self._loaded(request)
        return _binary(await anyio.to_thread.run_sync(loaded.points))

    async def colours(self, request: Request) -> Response:
        """See `LoadedMap.colours`."""
        loaded = await self._loaded(request)
        return _binary(await anyio.to_thread.run_sync(loaded.colours, request.query_params.get("column", "")))

    async def select(self, request: Request) -> Response:
        """The ids of the rows in a `Shape`, one per line."""
        loaded = await self._loaded(request)
        body = await read_body(request, MOST_SHAPE)
        try:
            shape = wire.read(Shape, body, what="shape", most_bytes=MOST_SHAPE)
        except wire.MalformedError as error:
            raise InputError(str(error), code="bad_request", next_step='send {"polygon": [[x, y], ...]}') from error
        ids = await anyio.to_thread.run_sync(loaded.select, shape)
        return Response(ids, media_type="text/plain", headers={"Cache-Control": "no-store", **SECURITY_HEADERS})

    async def _loaded(self, request: Request) -> LoadedMap:
        return await anyio.to_thread.run_sync(self._map_of, request.query_params.get("index", ""))

    def _map_of(self, name: str) -> LoadedMap:
        index = self._index(name)
        if index is None:
            raise HttpError("no index is served yet", code="no_index", next_step="embq index OUT", status=503)
        return self._maps.of(index.path)

    def _index(self, name: str) -> ServedIndex | None:
        """The index of NAME:MODALITY; the first one for ""."""
        if not name:
            return next(iter(self._serving.indices.all), None)
        of, _, modality = name.rpartition(":")
        return self._serving.indices.only(of, modality)


def _binary(data: bytes) -> Response:
    headers = {"Cache-Control": "no-store", **SECURITY_HEADERS}
    return Response(data, media_type="application/octet-stream", headers=headers)
