"""Renders pages from templates, and gives each response the headers that keep it apart from other pages.

Texts of captions, keys, file names and errors come from data. Templates escape all of them, `shown` cuts them and makes
control and direction characters visible, and the content security policy lets no script and no style run that is not a
file of this package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from embq.core.errors import EmbqError
from embq.core.redaction import masked, printable
from embq.core.service.progress_line import duration, moment
from embq.retrieval.ui.addresses import url

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

PAGE_HEADER = "X-Embq-Page"
"""Marks what a page of embq is made of; the script of the pages inserts nothing else."""

_JOINERS = re.compile("[^\u200c\u200d]+")
"""All but the characters that join and part letters: Persian words and many emoji need them, and they hide nothing."""

_LINK = re.compile(r"https?://[!-~]{1,2000}")
"""A text from data that may be a link: of the web, without what hides its end."""

MOST_SHOWN = 300
"""Characters of a text from data; the whole of a caption may have megabytes."""


def shown(text: object, most: int = MOST_SHOWN) -> str:
    """A text from data, cut at a word to `most` characters; line ends are spaces, control characters escapes."""
    full = "" if text is None else str(text)
    cut = " ".join(full[: 4 * most].split())
    short = cut if len(cut) <= most and len(full) <= 4 * most else f"{cut[: most + 1].rsplit(' ', 1)[0][:most]}…"
    return short if short.isprintable() else _JOINERS.sub(lambda part: printable(part[0]), short)


@cache
def environment() -> Environment:
    """The templates, with the filters that they share."""
    jinja = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    jinja.filters |= {
        "shown": shown,
        "masked": lambda text: shown(masked(str(text))),
        "count": lambda number: f"{number:,}",
        "share": lambda number: f"{number:.1%}",
        "duration": duration,
        "moment": moment,
    }
    jinja.tests["link"] = lambda text: isinstance(text, str) and _LINK.fullmatch(text) is not None
    jinja.globals |= {"version": version_of("embq"), "url": url}
    return jinja


def fragment(template: str, values: Mapping[str, Any]) -> str:
    """A part of a page as HTML."""
    return environment().get_template(template).render(values)


def page(
    request: Request, template: str, *, status: int = 200, headers: Mapping[str, str] = {}, **values: Any
) -> Response:
    """A page, or the part of it that a template makes of `values`, and of `here`, the path of the page."""
    html = fragment(template, {"here": request.scope["path"], **values})
    all_headers = {"Cache-Control": "no-store", **SECURITY_HEADERS, PAGE_HEADER: "1", **headers}
    return HTMLResponse(html.encode("utf-8", "replace"), status, all_headers)


@dataclass(frozen=True, slots=True)
class Notice:
    """A message on a page: what an action did, or an error.

    Attributes:
        lines: counts.
        run, confirm: for a retry that waits for the user: the run, and the fields that carry it out.
        bad: whether nothing was done.
        again: address that is asked a second later, for a notice in place of this one.
    """

    message: str
    next: str = ""
    lines: Sequence[str] = ()
    run: str = ""
    confirm: Mapping[str, str] | None = None
    bad: bool = False
    again: str = ""


def error_page(request: Request, error: EmbqError, status: int, headers: Mapping[str, str]) -> Response:
    """The page of an error; for htmx the notice alone, which goes into a part of a page."""
    template = "notice.html" if "hx-request" in request.headers else "error.html"
    notice = Notice(error.message, error.next_step, bad=True)
    return page(request, template, status=status, headers=headers, notice=notice)


class StaticFilesOfPages(StaticFiles):
    """The files below a folder, with security headers; arguments as of `StaticFiles`."""

    headers: ClassVar[Mapping[str, str]] = SECURITY_HEADERS

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """See `StaticFiles`; browsers ask each time whether a file has changed."""
        response = super().file_response(*args, **kwargs)
        response.headers.update({"Cache-Control": "no-cache", **self.headers})
        return response
