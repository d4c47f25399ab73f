"""`GET /ui/fleet/sample/{run}/{unit}/{ordinal}`: what a failed sample is, read again from the input of its run."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from embq.core.errors import EmbqError
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.storage.paths import Place
from embq.retrieval.serving.app import answering
from embq.retrieval.ui.fleet.pages import FleetPages
from embq.retrieval.ui.rendering import page
from embq.retrieval.ui.thumbnails.images import Images

READS = 2
"""Samples that are read at once; reading one may take seconds."""

HEAD_BYTES = 24
"""Of an image that cannot be drawn; they tell a page of HTML that was saved as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """What the template of a failed sample shows.

    Attributes:
        picture: as a data: URL; "" for none.
        note: why there is neither; "" if there is.
    """

    picture: str = ""
    text: str | None = None
    note: str = ""


class FailedSamples:
    """Shows the samples that the failure groups of a run name, and no others.

    Args:
        fleet: has the groups.
        images: reads samples within the roots of the server.
        thumbnail: makes one of an encoded image; raises HttpError.
    """

    def __init__(self, fleet: FleetPages, images: Images, thumbnail: Callable[[bytes], bytes]) -> None:
        self._fleet, self._images, self._thumbnail = fleet, images, thumbnail
        self._reads = anyio.CapacityLimiter(READS)
        self.routes = [Route("/ui/fleet/sample/{run}/{unit}/{ordinal:int}", answering(self.show), methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """The sample as a piece of HTML: its picture or text, or one line why there is none."""
        named = request.path_params
        try:
            failed = await self._fleet.failed_sample(named["run"], named["unit"], named["ordinal"])
            load = partial(self._load, named["unit"], named["ordinal"], *failed)
            view = await anyio.to_thread.run_sync(load, limiter=self._reads)
        except EmbqError as error:
            view = SampleView(note=f"The sample cannot be shown: {error.message}")
        except (ImportError, OSError) as error:
            view = SampleView(note=f"The sample cannot be shown: {getattr(error, 'strerror', '') or error}")
        headers = {"Cache-Control": "private, max-age=60"}
        return page(request, "fleet/sample.html", headers=headers, view=view)

    def _load(self, unit_id: str, ordinal: int, root: Place, key: str, code: str) -> SampleView:
        unit = Manifest(Layout(root)).find(unit_id)
        if unit is None:
            return SampleView(note="The manifest of the run does not have its unit.")
        if code == "duplicate_key":
            return SampleView()  # its key finds the sample that has the row
        sample = self._images.sample(unit, key, lambda: ordinal)
        if sample.image is None:
            return SampleView(text=sample.text, note="" if sample.text else "It has neither an image nor a text.")
        image = bytes(sample.image)
        try:
            thumbnail = self._thumbnail(image)
        except EmbqError:
            return SampleView(text=sample.text, note=f"Its image has {_described(image)}")
        return SampleView(text=sample.text, picture=f"data:image/jpeg;base64,{base64.b64encode(thumbnail).decode()}")


def _described(data: bytes) -> str:
    """Length, type by Pillow's signatures, and the first bytes, in hexadecimal and as ASCII."""
    from PIL import Image  # a server without it shows texts

    head, padded = data[:HEAD_BYTES], data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")
    Image.init()
    accepts = ((name, accept) for name, (_, accept) in Image.OPEN.items() if accept is not None)
    ascii_ = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in head)
    kind = next(
        (name for name, accept in accepts if accept(padded) is True), "text" if ascii_.encode() == head else "unknown"
    )
    return f"{len(data):,} bytes of type {kind}: {head.hex(' ')}  {ascii_}"
