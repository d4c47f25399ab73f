"""The search page: a query in the address, results with thumbnails or texts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from embq.serving.app import Serving
from embq.ui.rendering import page


class SearchPage:
    """The page `/`."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.routes = [Route("/", self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """The page with the results of the query in its address."""
        return page(request, "search.html", {})
