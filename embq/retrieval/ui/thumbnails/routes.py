"""`GET /thumb/{index}/{modality}/{id}`: the thumbnail of a row, as JPEG; `?size=large` and `?size=original`."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING

import anyio
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from embq.core.errors import EmbqError, SampleError, SourceError
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.settings import thumbnail_cache_bytes
from embq.core.units import Unit
from embq.retrieval.serving.app import answering
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.serving.indices import Indices
from embq.retrieval.serving.served_index import OpenVersion
from embq.retrieval.serving.unread_answers import CountedResponse, require_read
from embq.retrieval.ui.thumbnails.cache import ThumbnailCache
from embq.retrieval.ui.thumbnails.decoder import Decoders
from embq.retrieval.ui.thumbnails.finder import Finder, Origin, no_thumbnail
from embq.retrieval.ui.thumbnails.images import Images

if TYPE_CHECKING:
    from embq.index.collection.collection import Collection

PATH = "/thumb/{index:path}/{modality}/{id:int}"

SIDE_PX = 320
"""Long side of a thumbnail."""

SIZES = {"": SIDE_PX, "large": 1_280, "original": 0}
"""`size` of a request -> long side of the JPEG; 0 for the bytes of the input."""

RASTER = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG": "image/png", b"GIF8": "image/gif"}
"""Signature -> type under which a browser draws the bytes of an input, and runs nothing; others it saves."""

FORM = 1
"""Of thumbnails; a change of how they are made counts it up, so that cached ones are made anew."""

LOOKUPS, READS = 4, 8
"""Threads that look rows up, and threads that read images and wait for decoders."""

MOST_WAITING = 192
"""Thumbnails that wait to be made; more are refused."""

CHANGED_CODES = ("source_changed", "shard_changed")

_HEADERS = {
    "Cache-Control": "private, max-age=86400",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",  # pages of others may not embed images of this server
    "Content-Security-Policy": "default-src 'none'; sandbox",  # an original that is opened by itself
}

LOOK_S = 5.0
"""Between looks for new versions of indexes."""

WORK_S = 120.0
"""Time of walks for one version: 8,000,000 images; those of other shards are found when they are asked for."""


class Thumbnails:
    """Makes thumbnails of rows of the served indexes. Raises ConfigError for a setting that cannot be used.

    Args:
        exposed: see `Images`.

    Attributes:
        images: reads them.
    """

    def __init__(self, indices: Indices, *, exposed: bool = False) -> None:
        self._indices, self.images = indices, Images(exposed=exposed)
        self._decoders, self._finder = Decoders(), Finder()
        self._cache = ThumbnailCache(self.images.folder, thumbnail_cache_bytes())
        self._lookups, self._reads = anyio.CapacityLimiter(LOOKUPS), anyio.CapacityLimiter(READS)
        self._ahead = LookAhead(indices, self.images, is_busy=lambda: self._reads.borrowed_tokens > 0)
        self._made_by = f"{FORM} {_version('pillow')}"

        self.routes = [Route(PATH, answering(self.thumbnail), methods=["GET"])]

    def of(self, data: bytes, side: int = SIDE_PX) -> bytes:
        """The thumbnail of an encoded image, as JPEG. Raises HttpError `bad_image` if none can be made."""
        try:
            return self._decoders.thumbnail(data, side)
        except SampleError as error:
            raise HttpError(
                f"the image cannot be decoded: {error.message} ({error.code})",
                next_step="use another image, or look at it in the input of the run",
                code="bad_image",
                status=404,
            ) from error

    def start(self) -> None:
        """Find the images of served shards beside requests; see `LookAhead`."""
        self._ahead.start()

    def close(self) -> None:
        """End the child processes."""
        self._ahead.stop()
        self._decoders.close()
        self.images.close()

    async def thumbnail(self, request: Request) -> Response:
        """The picture of a row. Raises HttpError `no_such_index`, `no_such_id`, `bad_request` or as `_rendered`."""
        named, size = request.path_params, request.query_params.get("size", "")
        if (side := SIZES.get(size)) is None:
            raise HttpError(f"there is no size {size[:40]!r}", next_step="ask for large, original, or no size")
        index = self._indices.only(named["index"], named["modality"])
        with index.use() as version:
            id_ = named["id"]
            if id_ >= version.info.ids:
                raise HttpError(
                    f"index {index.name!r} has no row {id_}; its ids are 0 to {version.info.ids - 1:,}",
                    code="no_such_id",
                    next_step="ask for an id that a search has given",
                    status=404,
                )
            key, unit_id = await anyio.to_thread.run_sync(_identity, version, id_, limiter=version.turn)
            collection = version.searcher.version.collection
        find = partial(self._locate, collection, id_, key, unit_id, side)
        origin, name = await anyio.to_thread.run_sync(find, limiter=self._lookups)
        headers = {**_HEADERS, "ETag": f'"{name}"'}
        if _matches(request.headers.get("if-none-match", ""), name):
            return Response(status_code=304, headers=headers)
        require_read(request)
        data = await anyio.to_thread.run_sync(self._cache.get, name, limiter=self._lookups)
        if data is None:
            if self._reads.statistics().tasks_waiting >= MOST_WAITING:
                raise HttpError(
                    f"{MOST_WAITING} thumbnails are waiting to be made",
                    code="overloaded",
                    next_step="ask again in a while",
                    status=503,
                    retry_after_s=2,
                )
            async with self._reads:
                if await request.is_disconnected():  # a page that was scrolled on
                    return Response(status_code=400)
                # Not bounded by the default limiter, which searches use.
                own = anyio.CapacityLimiter(1)
                data = await anyio.to_thread.run_sync(self._rendered, origin, name, side, limiter=own)
        kind = next((kind for head, kind in RASTER.items() if data.startswith(head)), "application/octet-stream")
        return CountedResponse(data, headers=headers, media_type=kind)

    def _locate(self, collection: Collection, id_: int, key: str, unit_id: str | None, side: int) -> tuple[Origin, str]:
        """The origin of a row that may be read, and the name of its thumbnail: a hash of all that decides its bytes."""
        origin = self._finder.origin(collection, id_, key, unit_id)
        try:
            self.images.require_allowed(origin.unit)
        except SourceError as error:
            raise _refused(error) from error
        of = [f"{self._made_by} {side}", str(origin.run), collection.run, unit_id, key]
        return origin, hashlib.sha256(json.dumps(of).encode()).hexdigest()[:40]

    def _rendered(self, origin: Origin, name: str, side: int) -> bytes:
        """A new thumbnail, or the encoded image. Raises HttpError for an image that cannot be read or decoded."""
        try:
            data = self.images.image(origin.unit, origin.key, origin.ordinal)
        except HttpError:
            raise
        except SourceError as error:
            raise _refused(error) from error
        except EmbqError as error:
            code = "thumbnail_changed" if error.code in CHANGED_CODES else "no_thumbnail"
            raise no_thumbnail(error.message, "look at the input of the run", code=code) from error
        except OSError as error:
            raise no_thumbnail(f"its image cannot be read: {error.strerror or error}", "see the disk") from error
        thumbnail = self.of(data, side or SIDE_PX)  # of an original, too: what is no image is not given
        if not side:
            return data
        self._cache.put(name, thumbnail)
        return thumbnail


class LookAhead:
    """A thread that finds the images of shards before anybody asks: a walk through 10,000 of them takes 0.15 s.

    It walks through the shards of each version once, half of the time at most and only while no thumbnail is being
    made.

    Args:
        is_busy: whether one is.
    """

    def __init__(self, indices: Indices, images: Images, *, is_busy: Callable[[], bool]) -> None:
        self._indices, self._images, self._is_busy = indices, images, is_busy
        self._stopped = threading.Event()
        self._visited: set[tuple[str, str, str]] = set()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="look-ahead", daemon=True).start()

    def stop(self) -> None:
        """End it after the shard in hand."""
        self._stopped.set()

    def _work(self) -> None:
        while not self._stopped.is_set():
            for index in self._indices.all:
                if index.modality != "image":
                    continue
                try:
                    with index.use() as version:
                        name, collection = version.info.name, version.searcher.version.collection
                    if (identity := (index.name, index.modality, name)) not in self._visited:
                        self._visited.add(identity)
                        self._walk(collection)
                except (EmbqError, OSError):  # the request for the thumbnail reports it
                    continue
            self._stopped.wait(LOOK_S)

    def _walk(self, collection: Collection) -> None:
        left_s = WORK_S
        for unit in units_of(collection):
            while self._is_busy() and not self._stopped.is_set():
                time.sleep(0.05)
            if left_s <= 0 or self._stopped.is_set():
                return
            began = time.monotonic()
            try:
                self._images.look_ahead(unit)
            except (EmbqError, OSError):
                continue
            finally:
                took_s = time.monotonic() - began
                left_s -= took_s
                self._stopped.wait(took_s)


def units_of(collection: Collection) -> Iterator[Unit]:
    """The units of the runs of a collection; raises as reading a manifest does."""
    roots = [collection.run_of(part.first_id) for part in collection.parts if part.rows]
    for root in dict.fromkeys(root for root in roots if root is not None):
        manifest = Manifest(Layout(root))
        for number in range(len(manifest)):
            yield manifest.unit(number)


def _identity(version: OpenVersion, id_: int) -> tuple[str, str | None]:
    """Key and unit id of a row."""
    (row,) = version.searcher.rows(np.array([id_]), ["key", "unit_id"]).to_pylist()
    return row["key"], row["unit_id"]


def _refused(error: SourceError) -> HttpError:
    """The error for a source that cannot be read."""
    if error.code in CHANGED_CODES:
        return no_thumbnail(
            error.message, "put the planned input back, or run and index it again", code="thumbnail_changed"
        )
    if error.code == "source_denied":
        return no_thumbnail(
            "its source may not be read by this server",
            "start embq serve with the input's folder in EMBQ_ROOTS, or its host in EMBQ_PRIVATE_HOSTS, as a user who "
            "may read it",
        )
    if error.code == "inputs_not_named":
        return no_thumbnail(error.message, error.next_step)
    if error.transient:
        return no_thumbnail(error.message, "ask again in a while", status=503)
    return no_thumbnail(error.message, "have the input where the run had it, on the machine of the server")


def _matches(sent: str, name: str) -> bool:
    """Whether an If-None-Match header names the thumbnail."""
    tags = {tag.strip().removeprefix("W/") for tag in sent.split(",")}
    return bool(tags & {f'"{name}"', "*"})


def _version(name: str) -> str:
    try:
        return version_of(name)
    except PackageNotFoundError:
        return ""
