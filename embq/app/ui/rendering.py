"""Renders pages from templates, and gives each response the headers that keep it apart from other pages.

Texts of captions, keys, file names and errors come from data. Templates escape all of them, `shown` cuts them and makes
control and direction characters visible, and the content security policy lets no script and no style run that is not a
file of this package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from embq.app.serving.app import Endpoint, logged_bug
from embq.app.serving.http_errors import status_of
from embq.core.errors import EmbqError
from embq.core.redaction import masked, printable
from embq.core.service.progress_line import duration

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HERE = Path(__file__).parent

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Content security policy of the pages: nothing inline, nothing from elsewhere."""

SECURITY_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

_JOINERS = re.compile("[^\u200c\u200d]+")
"""All but the characters that join and part letters: Persian words and many emoji need them, and they hide nothing."""

_LINK = re.compile(r"https?://[!-~]{1,2000}")
"""A text from data that may be a link: of the web, without what hides its end."""

MOST_SHOWN = 300
"""Characters of a text from data; the whole of a caption may have megabytes."""


def shown(text: object, most: int = MOST_SHOWN) -> str:
    """A text from data, cut to `most` characters, with line ends as spaces and control characters as escapes."""
    whole = "" if text is None else str(text)
    cut = " ".join(whole[: 4 * most].split())
    kept = cut[:most] + ("…" if len(cut) > most or len(whole) > 4 * most else "")
    return kept if kept.isprintable() else _JOINERS.sub(lambda part: printable(part[0]), kept)


@cache
def environment() -> Environment:
    """The templates, with the filters that they share."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    made.filters |= {
        "shown": shown,
        "masked": lambda text: shown(masked(str(text))),
        "count": lambda number: f"{number:,}",
        "share": lambda number: f"{number:.1%}",
        "duration": duration,
    }
    made.tests["link"] = lambda text: isinstance(text, str) and _LINK.fullmatch(text) is not None
    made.globals |= {"version": version_of("embq")}
    return made


def fragment(template: str, values: Mapping[str, Any]) -> str:
    """A part of a page as HTML."""
    return environment().get_template(template).render(values)


def page(
    request: Request, template: str, view: DataclassInstance, status: int = 200, headers: Mapping[str, str] = {}
) -> Response:
    """A page, or the part of it that a template gives.

    Args:
        view: its fields are the names of the template, besides `here`, the path of the page.
    """
    values = {one.name: getattr(view, one.name) for one in fields(view)}
    html = fragment(template, {"here": request.url.path, **values})
    kept = {"Cache-Control": "no-store", **SECURITY_HEADERS, **headers}
    return HTMLResponse(html.encode("utf-8", "replace"), status, kept)


@dataclass(frozen=True, slots=True)
class ErrorView:
    """A page that consists of an error."""

    message: str
    next: str


def showing(route: Route) -> Route:
    """A route of pages whose errors are pages."""
    endpoint: Endpoint = route.endpoint

    async def show(request: Request) -> Response:
        try:
            return await endpoint(request)
        except EmbqError as failed:
            error = failed
        except Exception:  # noqa: BLE001 - the boundary to the client
            error = logged_bug(request)
        return page(request, "error.html", ErrorView(error.message, error.next_step), status_of(error))

    return Route(route.path, show, methods=list(route.methods or ()))


class StaticFilesOfPages(StaticFiles):
    """The files below `static`, with the headers of the pages."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """See `StaticFiles`; browsers ask each time whether a file has changed."""
        response = super().file_response(*args, **kwargs)
        response.headers.update({"Cache-Control": "no-cache", **SECURITY_HEADERS})
        return response


def static_files() -> StaticFilesOfPages:
    """The ASGI application of the files below `static`."""
    return StaticFilesOfPages(directory=HERE / "static")
