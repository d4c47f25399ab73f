"""`GET /ui/fleet/sample/{run}/{unit}/{ordinal}`: what a failed sample is, read again from the input of its run."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from embq.app.ui.fleet.pages import FailedSample, FleetPages
from embq.app.ui.rendering import page
from embq.app.ui.thumbnails.images import Images
from embq.core.errors import EmbqError
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.units import Sample

READS = 2
"""Samples that are read at once; reading one may take seconds."""

HEAD_BYTES = 60
"""Of an image that cannot be drawn; they tell a page of HTML that was saved as one."""


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
        self.routes = [Route("/ui/fleet/sample/{run}/{unit}/{ordinal:int}", self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """The sample as a piece of HTML: its picture or text, or one line why there is none."""
        named = request.path_params
        values: dict[str, Any] = {"picture": "", "text": None, "note": ""}
        try:
            failed = await self._fleet.failed_sample(named["run"], named["unit"], named["ordinal"])
            values |= await anyio.to_thread.run_sync(self._look, failed, limiter=self._reads)
        except EmbqError as error:
            values["note"] = f"The sample cannot be shown: {error.message}"
        except OSError as error:
            values["note"] = f"The sample cannot be shown: {error.strerror or error}"
        headers = {"Cache-Control": "private, max-age=60"}
        return page(request, "fleet/sample.html", values, headers=headers)

    def _look(self, failed: FailedSample) -> dict[str, Any]:
        unit = Manifest(Layout(failed.root)).find(failed.unit_id)
        if unit is None:
            return {"note": "The manifest of the run does not have its unit."}
        if failed.code == "duplicate_key":
            return {}  # its key finds the sample that has the row
        sample = self._images.sample(unit, failed.key, lambda: failed.ordinal)
        return {"text": sample.text} | self._picture(sample)

    def _picture(self, sample: Sample) -> dict[str, str]:
        if sample.image is None:
            return {} if sample.text else {"note": "It has neither an image nor a text."}
        try:
            made = self._thumbnail(sample.image)
        except EmbqError:
            head = sample.image[:HEAD_BYTES].decode("latin-1")
            return {"note": f"Its image has {len(sample.image):,} bytes, which begin with {head!r}."}
        return {"picture": f"data:image/jpeg;base64,{base64.b64encode(made).decode()}"}
