"""Apple's Embedding Atlas on the map of an index: its static application, and the files that it asks for.

The application computes in the browser, with a DuckDB of its own that reads the map as one parquet file. So the server
executes no query, and of the package embedding-atlas only files are used: it is never imported.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from embq.retrieval.serving.app import answering
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.ui.map.data import LoadedMap
from embq.retrieval.ui.rendering import SECURITY_HEADERS, StaticFilesOfPages

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""Wider than that of the pages: WebAssembly, workers and inline styles. Still nothing from elsewhere."""

HEADERS = {**SECURITY_HEADERS, "Content-Security-Policy": POLICY}

BASE = "/map/app"


def application_folder() -> Path | None:
    """The static application of the package embedding-atlas; None if it is not installed."""
    spec = find_spec("embedding_atlas")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / "static" / "index.html").is_file():
            return Path(place) / "static"
    return None


def address(name: str, modality: str) -> str:
    """Where the application shows an index. Names of indexes have slashes, and the application relative paths."""
    token = base64.urlsafe_b64encode(f"{name}:{modality}".encode()).decode().rstrip("=")
    return f"{BASE}/{token}/"


def index_name(token: str) -> str:
    """The NAME:MODALITY of an address; "" if it is malformed."""
    try:
        return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except (binascii.Error, ValueError):
        return ""


class _Files(StaticFilesOfPages):
    headers = HEADERS


def atlas_routes(folder: Path, map_of: Callable[[str], LoadedMap]) -> list[BaseRoute]:
    """The routes of the application.

    Args:
        folder: of its files.
        map_of: the map of an index by NAME:MODALITY; raises EmbqError if there is none.
    """

    async def requested_map(request: Request) -> LoadedMap:
        name = index_name(request.path_params["token"])
        if not name:
            raise HttpError("the address names no index", code="no_such_index", next_step="open /map", status=404)
        return await anyio.to_thread.run_sync(map_of, name)

    async def metadata(request: Request) -> Response:
        return JSONResponse(described(await requested_map(request)), headers={"Cache-Control": "no-store", **HEADERS})

    async def dataset(request: Request) -> Response:
        path = (await requested_map(request)).path
        return FileResponse(
            path, media_type="application/octet-stream", headers={"Cache-Control": "no-cache", **HEADERS}
        )

    async def nothing(_request: Request) -> Response:
        return JSONResponse(None, headers={"Cache-Control": "no-store", **HEADERS})

    data = f"{BASE}/{{token}}/data"
    return [
        Route(f"{data}/metadata.json", answering(metadata), methods=["GET"]),
        Route(f"{data}/dataset.parquet", answering(dataset), methods=["GET"]),
        Route(f"{data}/cache/{{name:path}}", answering(nothing), methods=["GET", "POST"]),
        Mount(f"{BASE}/{{token}}", _Files(directory=folder, html=True)),
    ]


def described(loaded: LoadedMap) -> dict[str, Any]:
    """The metadata of the application: columns with a role, labels, and the first layout."""
    projection = {"x": "x", "y": "y"}
    labels = [
        {"x": cluster.x, "y": cluster.y, "text": cluster.label, "level": 0, "priority": cluster.rows}
        for cluster in loaded.info.clusters
        if cluster.label
    ]
    return {
        "isStatic": True,
        "database": {"type": "wasm", "load": True},
        "props": {
            "data": {"table": "dataset", "id": "id", "text": "caption", "projection": projection},
            "embeddingViewLabels": labels,
            "defaultChartsConfig": {
                "embedding": {"title": "Map", "data": {**projection, "text": "caption", "category": "label"}},
                "include": ["label", "source", *loaded.columns[2:]],
            },
        },
    }
