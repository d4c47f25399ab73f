"""The map page: rows of an index as points, coloured by a column, with search hits and a selection of ids."""

from __future__ import annotations

from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from embq.core import wire
from embq.core.errors import EmbqError, InputError, command_line
from embq.core.process.children import python, start
from embq.retrieval.serving.app import Serving, answering, read_body
from embq.retrieval.serving.http_errors import status_of
from embq.retrieval.serving.served_index import ServedIndex
from embq.retrieval.ui.addresses import url
from embq.retrieval.ui.fleet.actions import Permission
from embq.retrieval.ui.map.data import LoadedMap, LoadedMaps, Shape
from embq.retrieval.ui.map.embedding_atlas import address, application_folder, atlas_routes
from embq.retrieval.ui.rendering import SECURITY_HEADERS, Notice, page

MOST_SHAPE = 1 << 16
"""Bytes of a shape."""


class MapPage:
    """The page `/map`, its data, and Embedding Atlas if that is installed."""

    def __init__(self, serving: Serving, permission: Permission) -> None:
        self._serving, self._permission = serving, permission
        self._making: dict[Path, Popen[bytes]] = {}
        self._maps = LoadedMaps()
        self._atlas = application_folder()
        self.routes: list[BaseRoute] = [
            Route("/map", answering(self.show), methods=["GET"]),
            Route("/map/points", answering(self.points), methods=["GET"]),
            Route("/map/colours", answering(self.colours), methods=["GET"]),
            Route("/map/make", answering(self.make), methods=["POST"]),
            Route("/map/select", answering(self.select), methods=["POST"]),
            *(atlas_routes(self._atlas, self._map_of) if self._atlas is not None else []),
        ]

    async def show(self, request: Request) -> Response:
        """The page; its script fetches points and colours."""
        index: ServedIndex | None = None
        loaded: LoadedMap | None = None
        error: EmbqError | None = None
        try:
            index = self._serving.indices.at(request.query_params.get("index", ""))
            if index is not None:
                loaded = await anyio.to_thread.run_sync(self._maps.of, index.path)
        except EmbqError as failed:
            error = failed
        status = 200 if error is None or error.code == "no_map" else status_of(error)
        return page(
            request,
            "map.html",
            status=status,
            index=index,
            value=index.qualified_name if index is not None else "",
            indices=self._serving.indices.all,
            map=loaded,
            stale=loaded is not None and index is not None and loaded.info.version != index.version.name,
            command=command_line("atlas", index.path) if index is not None else "",
            may_act=self._permission.holds(request),
            error=error,
            query=request.query_params.get("q", ""),
            atlas=address(index.name, index.modality)
            if index is not None and loaded is not None and self._atlas is not None
            else "",
        )

    async def make(self, request: Request) -> Response:
        """Start `embq atlas` for an index, in a process of its own, or tell how it went; its notice asks again."""
        self._permission.require(request)
        index = request.query_params.get("index", "")
        notice = Notice("The map is being made", "It appears here.", again=url("/map/make", {"index": index}))
        path = self._served(index).path
        command = python("-m", "embq", "atlas", str(path), "--no-serve")
        process = self._making.pop(path, None) or start(command, stdout=DEVNULL, stderr=PIPE)
        if process.poll() is None:
            self._making[path] = process
        elif process.returncode == 0:
            return Response(headers={"HX-Refresh": "true", **SECURITY_HEADERS})
        else:
            notice = Notice("The map was not made", process.communicate()[1].decode("utf-8", "replace"), bad=True)
        return page(request, "notice.html", notice=notice)

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
        return self._maps.of(self._served(name).path)

    def _served(self, name: str) -> ServedIndex:
        return self._serving.indices.at(name) or self._serving.indices.only("", "")


def _binary(data: bytes) -> Response:
    headers = {"Cache-Control": "no-store", **SECURITY_HEADERS}
    return Response(data, media_type="application/octet-stream", headers=headers)
