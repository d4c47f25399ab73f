"""ASGI middleware: checks host, origin and load of every request, and counts and times it.

A browser lets any page send requests to any address, loopback included; only the answer is kept from the page. So
requests from a page of another origin are refused unless that origin is allowed, and a server answers only to
`HostNames`, which a page cannot have.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import BaseRoute, Match

from embq.app.services.http_server import MOST_IN_FLIGHT
from embq.core.networks import HostNames, client_network
from embq.retrieval.serving.http_errors import HttpError, error_response
from embq.retrieval.serving.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}
"""Of every answer that is no page: a browser that opens it runs nothing and loads nothing."""

_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Rules for the requests that are accepted.

    Attributes:
        hosts: accepted names in the Host header.
        origins: of pages that may send requests, such as https://example.org; "*" for any.
    """

    hosts: HostNames = field(default_factory=HostNames)
    origins: frozenset[str] = frozenset()


class AccessMiddleware:
    """Refuses requests by `AccessRules` and load; counts and times all.

    Args:
        routes: what is served; their paths, with the names of parameters, are labels of metrics.
    """

    def __init__(self, app: ASGIApp, *, rules: AccessRules, metrics: Metrics, routes: Sequence[BaseRoute]) -> None:
        self._app, self._rules, self._metrics, self._routes = app, rules, metrics, routes
        self._in_flight = 0
        self._posts: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        route = self._label(scope)

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": _secured(message.get("headers", ()))}
            await send(message)

        self._in_flight += 1
        client = client_of(scope)
        self._posts[client] += scope["method"] == "POST"
        self._metrics.gauges["embq_http_in_flight"].set(self._in_flight)
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await error_response(Request(scope), refusal)(scope, receive, counting)
            else:
                await self._app(scope, receive, counting)
        finally:
            self._in_flight -= 1
            self._posts[client] -= scope["method"] == "POST"
            if not self._posts[client]:
                del self._posts[client]
            self._metrics.gauges["embq_http_in_flight"].set(self._in_flight)
            self._metrics.counters["embq_http_requests_total"].labels(route, str(status or "none")).inc()
            self._metrics.histograms["embq_http_request_seconds"].labels(route).observe(time.perf_counter() - start)

    def _label(self, scope: Scope) -> str:
        """The path of the route for a request, "other" if there is none."""
        for route in self._routes:
            if route.matches(scope)[0] != Match.NONE:
                return str(getattr(route, "path", "other"))
        return "other"

    def _refusal(self, scope: Scope) -> HttpError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._rules.hosts.accept(host):
            return HttpError(
                f"this server does not have the name {host[:100]!r}",
                code="wrong_host",
                next_step="use its IP address or host name, or start it with --allow-host and that name",
                status=421,
            )
        origin = headers.get("origin")
        if origin is not None and not self._may_ask(origin, host):
            return HttpError(
                f"pages of {origin[:100]!r} may not query this server",
                code="foreign_origin",
                next_step="start it with --allow-origin and that origin",
                status=403,
            )
        # Health checks and metrics are still answered, so that monitoring does not take the server for dead; and pages
        # that are kept up to date, whose requests last for minutes, take no room from queries.
        posts, most = self._posts.total(), MOST_IN_FLIGHT
        if scope["method"] == "POST" and (posts > most or self._posts[client_of(scope)] > most * 3 // 4):
            return HttpError(
                f"{posts - 1} requests are being answered already",
                code="overloaded",
                next_step="ask again in a while, or from fewer clients",
                status=503,
                retry_after_s=1,
            )
        return None

    def _may_ask(self, origin: str, host: str) -> bool:
        """True if an origin is allowed: that of this server itself, and those of the rules."""
        return "*" in self._rules.origins or origin in self._rules.origins or origin == f"http://{host}"


def _secured(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer, with `HEADERS` where they have no policy of their own."""
    own = list(headers)
    return own if any(name == b"content-security-policy" for name, _ in own) else [*own, *_RAW_HEADERS]


def client_of(scope: Scope) -> str:
    """The client of a request, as `client_network` has it; all behind a proxy are one client."""
    return client_network(scope["client"][0] if scope.get("client") else "").hex()
