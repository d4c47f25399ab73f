"""Routes of the fleet page: the page, the page of a run, live parts, charts, failures and actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from embq.app.serving.app import answering
from embq.app.serving.http_errors import HttpError
from embq.app.status.failure_causes import described, grouped
from embq.app.status.service_logs import LogLine, logs_of
from embq.app.ui.fleet.actions import Actions, Permission
from embq.app.ui.fleet.fragments import Fragments
from embq.app.ui.fleet.history import Histories, charts
from embq.app.ui.fleet.live import MOST_STREAMS, Live, parts_of
from embq.app.ui.fleet.run_list import RunQuery, titles_of
from embq.app.ui.fleet.snapshot import FleetSnapshot, Sampler
from embq.app.ui.fleet.sources import RunView, Source
from embq.app.ui.rendering import SECURITY_HEADERS, page
from embq.core.errors import EmbqError, command_line
from embq.core.run.layout import Layout
from embq.core.storage.paths import Place

FIRST_S = 3.0
"""Time for the first sample; the page comes without it, and fills later."""
KEPT = 16
"""Runs whose failure groups are in memory."""
MOST_LINES = 100
"""Of the log of each service."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Failure groups of a run.

    Attributes:
        groups: as `embq.app.status.failure_causes.described` makes them.
        total: failures in all groups.
        why: there are none to show; "" if there are.
    """

    groups: Sequence[dict[str, Any]] = ()
    total: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class LogsView:
    """What the template of the logs of a run shows: the last lines of each service, and the command that prints more;
    or why there are none."""

    logs: Sequence[tuple[str, Sequence[LogLine]]] = ()
    why: str = ""
    command: str = ""


class FleetPages:
    """The fleet page of a server.

    Attributes:
        routes: of the pages.
        token: that the printed URL has, as `?token=`; "" if no actions are allowed.
        permission: decides who may act.

    Args:
        sources: of runs, see `embq.app.ui.fleet.sources`.
        allow_actions: whether viewers with the token may pause, resume, cancel and retry.
    """

    def __init__(self, sources: Sequence[Source], *, allow_actions: bool = False) -> None:
        self._sampler, self._histories = Sampler(sources), Histories()
        self._fragments = Fragments(self._histories)
        self._live = Live(self._sampler, self._fragments)
        self.permission = Permission(allowed=allow_actions)
        self._groups, self._turn = lru_cache(KEPT)(_groups), anyio.CapacityLimiter(1)
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
        if self._live.streams >= MOST_STREAMS:
            raise HttpError(
                f"{MOST_STREAMS} pages are being kept up to date already",
                code="overloaded",
                next_step="close pages that nobody looks at",
                status=503,
                retry_after_s=10,
            )
        given = request.query_params
        stream = self._live.stream(given.get("run", ""), RunQuery.of(given), may_act=self.permission.holds(request))
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def history(self, request: Request) -> Response:
        """GET /ui/fleet/history/{run}: columns for charts, see `embq.app.ui.fleet.history.charts`."""
        view = await self._view(request.path_params["run"])
        rates = self._sampler.rates(view.progress.run)
        columns = await anyio.to_thread.run_sync(charts, view, self._histories, rates)
        return JSONResponse(columns, headers={**SECURITY_HEADERS, "Cache-Control": "no-store"})

    async def failures(self, request: Request) -> Response:
        """GET /ui/fleet/failures/{run}: the groups of failures with a sample each, as HTML."""
        may_act = self.permission.holds(request)
        try:
            _, groups = await self._failures(request.path_params["run"])
        except EmbqError as error:
            groups = Groups(why=error.message)
        run = request.path_params["run"]
        return page(request, "fleet/failures.html", failures=groups, run=run, may_act=may_act)

    async def logs(self, request: Request) -> Response:
        """GET /ui/fleet/logs/{run}: the last lines of each service of an `embq run`, as HTML."""
        try:
            view = await self._view(request.path_params["run"])
            logs = await anyio.to_thread.run_sync(_logs, view)
        except EmbqError as error:
            logs = LogsView(why=f"{error.message}; {error.next_step}")
        except OSError as error:
            logs = LogsView(why=f"The logs cannot be read: {error.strerror}")
        return page(request, "fleet/logs.html", view=logs)

    async def failed_sample(self, run: str, unit_id: str, ordinal: int) -> tuple[Place, str, str]:
        """Output folder, key and code of a sample that a failure group of a run shows; HttpError if none does."""
        root, groups = await self._failures(run)
        for group in groups.groups:
            for example in group["examples"][:1]:
                if (example["unit"], example["ordinal"]) == (unit_id, ordinal) and root is not None:
                    return root, example["key"], group["code"]
        raise HttpError("no failure group shows this sample any more", code="no_sample", status=404)

    async def _failures(self, run: str) -> tuple[Place | None, Groups]:
        """Output folder and failure groups of a run, read again when it has others; one run is read at a time."""
        view = await self._view(run)
        if view.root is None:
            return None, Groups(
                why="The output folder is not on this machine; embq failures OUT lists them where it is."
            )
        at = (run, view.progress.done, view.progress.quarantined, view.progress.rows)
        read = partial(self._groups, view.root, view.progress.failures, at)
        return view.root, await anyio.to_thread.run_sync(read, limiter=self._turn)

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
        response = RedirectResponse(request.url.path, 303, {**SECURITY_HEADERS, "Cache-Control": "no-store"})
        self.permission.grant(request, response)
        return response


def _run_view(snapshot: FleetSnapshot, run: str) -> RunView:
    if (view := snapshot.run(run)) is None:
        why = f"there is no run {run[:100]!r} here"
        if snapshot.troubles:
            raise HttpError(f"{why}: {snapshot.troubles[0]}", code="no_run", next_step="load it again then", status=503)
        raise HttpError(why, code="no_run", next_step="the fleet page lists the runs that are here", status=404)
    return view


def _logs(view: RunView) -> LogsView:
    """The logs of a folder; raises as `logs_of` and reading do."""
    command = command_line("logs", view.root or view.progress.output)
    if view.root is None:
        return LogsView(why=f"The output folder is not on this machine; {command} prints its logs where it is.")
    logs = [(log.service, log.new_lines(MOST_LINES)) for log in logs_of(Layout(view.root).home)]
    return LogsView(logs, command=command)


def _groups(root: Place, failures: int, _at: tuple[str | int, ...]) -> Groups:
    """Failure groups of a folder; `_at` tells its states apart."""
    return Groups(described(root, grouped(root)) if failures else [], failures)
