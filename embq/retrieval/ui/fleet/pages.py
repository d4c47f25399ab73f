"""Routes of the fleet page: the page, the page of a run, live parts, charts, failures and actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from embq.app.status.failure_causes import described, grouped
from embq.app.status.service_logs import LogLine, logs_of
from embq.core.errors import EmbqError, InputError, command_line
from embq.core.networks import client_network
from embq.core.run.layout import Layout
from embq.core.storage.paths import Place
from embq.retrieval.serving.app import answering
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.ui.addresses import url
from embq.retrieval.ui.fleet.actions import Actions, Permission
from embq.retrieval.ui.fleet.fragments import Fragments
from embq.retrieval.ui.fleet.history import Histories, charts
from embq.retrieval.ui.fleet.live import Live, parts_of
from embq.retrieval.ui.fleet.run_list import RunQuery, titles_of
from embq.retrieval.ui.fleet.snapshot import FleetSnapshot, Sampler
from embq.retrieval.ui.fleet.sources import RunView, Source
from embq.retrieval.ui.rendering import SECURITY_HEADERS, page

FIRST_S = 3.0
"""Time for the first sample; the page comes without it, and fills later."""
KEPT = 16
"""Runs whose failure groups are in memory."""
MOST_LINES = 100
"""Of the log of each service."""


class FleetPages:
    """The fleet page of a server.

    Attributes:
        routes: of the pages.
        token: that the printed URL has, as `?token=`; "" if no actions are allowed.
        permission: decides who may act.

    Args:
        sources: of runs, see `embq.retrieval.ui.fleet.sources`.
        allow_actions: whether viewers with the token may pause, resume, cancel and retry.
    """

    def __init__(self, sources: Sequence[Source], *, allow_actions: bool = False) -> None:
        self._sampler, self._histories = Sampler(sources), Histories()
        self._fragments = Fragments(self._histories)
        self._live = Live(self._sampler, self._fragments)
        self.permission = Permission(allowed=allow_actions)
        self._groups = lru_cache(KEPT)(lambda root, _at: described(root, grouped(root)))
        self._turn = anyio.CapacityLimiter(1)
        self.token = self.permission.token
        actions = Actions(self._sampler, self.permission)
        self.routes = [
            Route("/fleet", answering(self.show), methods=["GET"]),
            Route("/fleet/{run}", answering(self.show), methods=["GET"]),
            Route("/ui/fleet/events", answering(self.events), methods=["GET"]),
            Route("/ui/fleet/history/{run}", answering(self.history), methods=["GET"]),
            Route("/ui/fleet/failures/{run}", answering(self.failures), methods=["GET"]),
            Route("/ui/fleet/logs/{run}", answering(self.logs), methods=["GET"]),
            Route("/ui/runs/{run}/{verb}", answering(actions.act), methods=["POST"]),
        ]

    def leave(self) -> None:
        """End the streams, so that the server need not wait for them."""
        self._live.leave()

    def stop(self) -> None:
        """End the sampler, and close connections to brokers."""
        self._sampler.stop()

    async def show(self, request: Request) -> Response:
        """GET /fleet, and /fleet/{run}."""
        if (token := request.query_params.get("token")) is not None:
            return self._granted(request, token)
        run, query = request.path_params.get("run", ""), RunQuery.of(request.query_params)
        snapshot = await self._first()
        may_act = self.permission.holds(request)
        title = titles_of(snapshot.runs)[_run_view(snapshot, run).progress.output] if run else ""
        parts = await anyio.to_thread.run_sync(parts_of, self._fragments, snapshot, run, query, may_act)
        template = "fleet/run.html" if run else "fleet/page.html"
        return page(request, template, parts=parts or {}, run=run, title=title, query=query)

    async def events(self, request: Request) -> Response:
        """GET /ui/fleet/events[?run=]: server-sent events."""
        client = client_network(request.client.host if request.client else "")
        if self._live.is_full(client):
            raise HttpError(
                f"{self._live.streams} pages are being kept up to date already",
                code="overloaded",
                next_step="close pages that nobody looks at",
                status=503,
                retry_after_s=10,
            )
        given = request.query_params
        may_act = self.permission.holds(request)
        stream = self._live.stream(given.get("run", ""), RunQuery.of(given), may_act=may_act, client=client)
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def history(self, request: Request) -> Response:
        """GET /ui/fleet/history/{run}: columns for charts, see `embq.retrieval.ui.fleet.history.charts`."""
        view = await self._view(request.path_params["run"])
        rates = self._sampler.rates(view.progress.run)
        columns = await anyio.to_thread.run_sync(charts, view, self._histories, rates)
        return JSONResponse(columns, headers={**SECURITY_HEADERS, "Cache-Control": "no-store"})

    async def failures(self, request: Request) -> Response:
        """GET /ui/fleet/failures/{run}: the groups of failures with a sample each, as HTML."""
        run, may_act, why = request.path_params["run"], self.permission.holds(request), ""
        groups: Sequence[dict[str, Any]] = ()
        try:
            _, groups = await self._failures(run)
        except EmbqError as error:
            why = f"{error.message}; {error.next_step}".rstrip("; ")
        return page(request, "fleet/failures.html", groups=groups, why=why, run=run, may_act=may_act)

    async def logs(self, request: Request) -> Response:
        """GET /ui/fleet/logs/{run}: the last lines of each service of an `embq run`, as HTML."""
        logs: list[tuple[str, list[LogLine]]] = []
        why = command = ""
        try:
            view = await self._view(request.path_params["run"])
            command = command_line("logs", view.root or view.progress.output)
            logs = await anyio.to_thread.run_sync(_logs, view)
        except EmbqError as error:
            why = f"{error.message}; {error.next_step}"
        except OSError as error:
            why = f"the logs cannot be read: {error.strerror}"
        return page(request, "fleet/logs.html", logs=logs, why=why, command=command)

    async def failed_sample(self, run: str, unit_id: str, ordinal: int) -> tuple[Place, str, str]:
        """Output folder, key and code of a sample that a failure group of a run shows; HttpError if none does."""
        root, groups = await self._failures(run)
        for group in groups:
            for example in group["examples"][:1]:
                if (example["unit"], example["ordinal"]) == (unit_id, ordinal):
                    return root, example["key"], group["code"]
        raise HttpError("no failure group shows this sample any more", code="no_sample", status=404)

    async def _failures(self, run: str) -> tuple[Place, Sequence[dict[str, Any]]]:
        """Output folder and failure groups of a run, as `described` makes them: read again when it has others, and of
        one run at a time. Raises InputError if the folder is not here."""
        view = await self._view(run)
        progress = view.progress
        if view.root is None:
            raise _elsewhere("failures")
        if not progress.failures:
            return view.root, ()
        at = (run, progress.done, progress.quarantined, progress.rows, progress.failures)
        return view.root, await anyio.to_thread.run_sync(self._groups, view.root, at, limiter=self._turn)

    async def _first(self) -> FleetSnapshot:
        snapshot = self._sampler.latest() or await anyio.to_thread.run_sync(self._sampler.first, FIRST_S)
        names = "; ".join(source.name for source in self._sampler.sources)
        return snapshot or FleetSnapshot(number=0, at_s=0.0, troubles=(f"waiting for {names}",))

    async def _view(self, run: str) -> RunView:
        return _run_view(await self._first(), run)

    def _granted(self, request: Request, token: str) -> Response:
        """The same page without the token in its address, which would stay in the history of the browser."""
        if not self.permission.accepts(token):
            why, then = "this server takes no actions", "start it with --allow-actions"
            if self.token:
                why = "this is not the token of this server"
                then = "each start has another token; open the URL that the server printed"
            raise HttpError(why, code="no_actions", next_step=then, status=403)
        run = request.path_params.get("run", "")
        address = url("/fleet/{run}", run=run) if run else "/fleet"
        response = RedirectResponse(address, 303, {**SECURITY_HEADERS, "Cache-Control": "no-store"})
        self.permission.grant(request, response)
        return response


def _run_view(snapshot: FleetSnapshot, run: str) -> RunView:
    if (view := snapshot.run(run)) is None:
        why = f"there is no run {run[:100]!r} here"
        if snapshot.troubles:
            raise HttpError(f"{why}: {snapshot.troubles[0]}", code="no_run", next_step="load it again then", status=503)
        raise HttpError(why, code="no_run", next_step="the fleet page lists the runs that are here", status=404)
    return view


def _logs(view: RunView) -> list[tuple[str, list[LogLine]]]:
    """The last lines of each service of a run; raises as `logs_of` and reading do."""
    if view.root is None:
        raise _elsewhere("logs")
    return [(log.service, log.new_lines(MOST_LINES)) for log in logs_of(Layout(view.root).home)]


def _elsewhere(verb: str) -> InputError:
    return InputError("the output folder is not on this machine", next_step=f"embq {verb} OUT lists them where it is")
