"""Actions on runs from the pages: pause, resume, cancel, and retry of failures with a count before it acts.

A page that a browser shows at the same time may send requests here too. So an action needs the Origin of this server
itself, and a cookie that other sites cannot make the browser send; the cookie is had for the token of the printed URL.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import anyio
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

import embq
from embq.app.status.run_control import request as request_state
from embq.core.errors import BrokerError, EmbqError, InputError, command_line
from embq.core.queue.runs import RunRecord
from embq.core.run.control import VERBS, RunState
from embq.core.service.log import Events
from embq.core.storage.paths import Place
from embq.producer.announce import hand_over
from embq.producer.retry import FailureFilter, RetryResult, preview, retry
from embq.retrieval.serving.app import read_body
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.ui.fleet.snapshot import Sampler
from embq.retrieval.ui.rendering import Notice, page

DONE = {"pause": "is paused", "resume": "goes on", "cancel": "is cancelled"}
MOST_FORM = 4_096
"""Bytes of a form."""
AT_ONCE = 4
"""Actions that run at a time; one may wait ten seconds for a writer."""

_log = Events("ui")


class Permission:
    """Decides who may act: nobody, or the viewers that came with the token.

    Attributes:
        token: for the printed URL; "" if no actions are allowed.
    """

    def __init__(self, *, allowed: bool) -> None:
        self.token = secrets.token_urlsafe(24) if allowed else ""
        self._cookie = secrets.token_urlsafe(24)

    def accepts(self, token: str) -> bool:
        """True if this is the token."""
        return bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())

    def grant(self, request: Request, response: Response) -> None:
        """Give a viewer the cookie. Browsers send it with requests from pages of this server only."""
        response.set_cookie(_cookie_name(request), self._cookie, httponly=True, samesite="strict", path="/")

    def holds(self, request: Request) -> bool:
        """True if the viewer has the cookie."""
        cookie = request.cookies.get(_cookie_name(request), "")
        return bool(self.token) and hmac.compare_digest(cookie.encode(), self._cookie.encode())

    def require(self, request: Request) -> None:
        """Raise HttpError, 403, unless the viewer may act, and the request comes from a page of this server."""
        if not self.token:
            raise _refused("this server shows runs and does not change them", "start it with --allow-actions")
        own = f"http://{request.headers.get('host', '')}"
        if request.headers.get("origin") != own:
            raise _refused("the request does not come from a page of this server", f"use the pages at {own}")
        if not self.holds(request):
            raise _refused("this browser has not come with the token", "open the URL that the server printed")


def _cookie_name(request: Request) -> str:
    # Cookies are of a host and not of a port, and two servers on one machine are no rarity.
    return f"embq_actions_{request.url.port or 80}"


def _refused(message: str, next_step: str) -> HttpError:
    return HttpError(message, code="no_actions", next_step=next_step, status=403)


class Actions:
    """Carries out actions.

    Args:
        sampler: knows the runs.
    """

    def __init__(self, sampler: Sampler, permission: Permission) -> None:
        self._sampler, self._permission = sampler, permission
        self._limit = anyio.CapacityLimiter(AT_ONCE)

    async def act(self, request: Request) -> Response:
        """POST /ui/runs/{run}/{verb}: a notice. Raises EmbqError if nothing was done."""
        self._permission.require(request)
        run, verb = request.path_params["run"], request.path_params["verb"]
        if verb not in (*VERBS, "retry"):
            raise HttpError(f"there is no action {verb[:20]!r}", code="no_such_route", status=404)
        form = await _form(request)
        work = partial(self._retry, run, form) if verb == "retry" else partial(self._control, run, verb)
        return page(request, "notice.html", notice=await anyio.to_thread.run_sync(work, limiter=self._limit))

    def _control(self, run: str, verb: str) -> Notice:
        try:
            if (registration := self._sampler.registered(run)) is None:
                raise _unknown(run)
            result = request_state(*registration, verb)
        except RedisError as error:
            raise BrokerError("the broker does not answer", next_step="try again; embq doctor checks it") from error
        _log.info("action", verb=verb, run=run)
        if result.state == RunState.DONE:
            return Notice(f"Run {run} is done; there is nothing to {verb}.")
        noted = "" if result.noted else "No writer has noted it in the output folder yet; only the broker knows it."
        return Notice(f"Run {run} {DONE[verb]}: {result.how_far}.", next=noted)

    def _retry(self, run: str, form: Mapping[str, str]) -> Notice:
        snapshot = self._sampler.latest()
        view = snapshot.run(run) if snapshot is not None else None
        if view is None:
            raise _unknown(run)
        if view.root is None:
            raise InputError(
                f"the output folder of run {run} is not on this machine",
                next_step="retry where it is: embq retry OUT",
                code="no_folder",
            )
        chosen = FailureFilter(codes=(form["code"],) if form.get("code") else ())
        expected = form.get("expected_count", "")
        if not expected:
            return _preview(run, form, preview(view.root, chosen))
        count = int(expected) if expected.isascii() and expected.isdigit() and len(expected) < 12 else -1
        retried = retry(view.root, chosen, version=embq.__version__, expected=count)
        _log.info("action", verb="retry", run=run, failures=retried.failures)
        by = _handed(retried, view.root, self._sampler.registered(run))
        units = f"{retried.units:,} unit{'' if retried.units == 1 else 's'}"
        return Notice(f"{retried.failures:,} failures are done again, in {units}.", next=by)


def _handed(retried: RetryResult, root: Place, registration: tuple[RunRecord, Any] | None) -> str:
    """Hand the units to the services that are there; tells who does them."""
    if registration is None:
        return f"No broker knows the run: {command_line('resume', root)} does them."
    try:
        hand_over(registration[1], retried.info, root)
    except EmbqError:  # an `embq run` is at work on it, and its writer finds the units
        return "The process that is at work on the run does them."
    except RedisError:
        return f"The broker does not answer: {command_line('resume', root)} hands them to the workers."
    return "The workers have them."


def _preview(run: str, form: Mapping[str, str], result: RetryResult) -> Notice:
    lines = [f"{count:,} {code}" for code, count in (result.samples + result.whole_units).most_common(12)]
    if result.under_way:
        lines.append(f"{result.under_way:,} are under way already")
    if result.missing:
        lines.append(f"{len(result.missing):,} files are not there any more; their failures are left out")
    if result.chunks:
        lines.append(f"{result.chunks:,} failures of single chunks are left out; make a new run of these texts")
    if not result.failures:
        return Notice("There is nothing to retry.", lines=lines)
    units = f"{result.units:,} unit{'' if result.units == 1 else 's'}"
    confirm = {"expected_count": str(result.failures)} | ({"code": form["code"]} if form.get("code") else {})
    message = f"{result.failures:,} failure{'' if result.failures == 1 else 's'} would be done again, in {units}."
    return Notice(message, lines=lines, run=run, confirm=confirm)


def _unknown(run: str) -> HttpError:
    return HttpError(
        f"no broker knows a run {run[:16]}", code="no_run", next_step="embq resume OUT hands it to one", status=404
    )


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form, the first value of each."""
    body = await read_body(request, MOST_FORM)
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=8)
    except ValueError as error:
        raise HttpError("the form has more than 8 fields", code="too_many") from error
    return {name: values[0] for name, values in fields.items()}
