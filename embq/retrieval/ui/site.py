"""The web pages of a server: their routes, and what runs beside them."""

from __future__ import annotations

from starlette.routing import BaseRoute, Mount

from embq.retrieval.serving.app import Serving
from embq.retrieval.ui.fleet.failed_samples import FailedSamples
from embq.retrieval.ui.fleet.pages import FleetPages
from embq.retrieval.ui.map.page import MapPage
from embq.retrieval.ui.rendering import HERE, StaticFilesOfPages
from embq.retrieval.ui.search_page import SearchPage
from embq.retrieval.ui.thumbnails.routes import Thumbnails


class Site:
    """All pages of `embq serve` and `embq ui`.

    Args:
        exposed: see `embq.retrieval.ui.thumbnails.images.Images`.

    Attributes:
        routes: of the pages and their files.
    """

    def __init__(self, serving: Serving, fleet: FleetPages, *, exposed: bool = False) -> None:
        self._fleet = fleet
        self._thumbnails = Thumbnails(serving.indices, exposed=exposed)
        search = SearchPage(serving, self._thumbnails.of)
        failed = FailedSamples(fleet, self._thumbnails.images, self._thumbnails.of)
        self.routes: list[BaseRoute] = [
            *(*search.routes, *self._thumbnails.routes, *fleet.routes, *failed.routes),
            *MapPage(serving, fleet.permission).routes,
            Mount("/static", StaticFilesOfPages(directory=HERE / "static")),
        ]

    def start(self) -> None:
        """Start what runs beside the pages."""
        self._thumbnails.start()

    def stop(self) -> None:
        """Stop it."""
        self._fleet.stop()
        self._thumbnails.close()
