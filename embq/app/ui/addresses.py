"""Addresses of the pages: every value in one has the type of its name.

A name from data that became part of an address could lead to another route, of which the answer is inserted as HTML.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from msgspec import Meta

from embq.core import wire
from embq.core.run.control import VERBS

TYPES: Mapping[str, Any] = {
    "run": wire.RunId,
    "verb": Annotated[str, wire.one_of((*VERBS, "retry"))],
    "unit": wire.UnitId,
    "ordinal": wire.Count,
    "index": wire.RelativePath,
    "modality": wire.RelativePath,
    "id": wire.Count,
    "token": Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")],
}
"""Name of a parameter of a route -> its type."""


def url(path: str, query: Mapping[str, object] | None = None, **values: object) -> str:
    """The address of a route.

    Args:
        path: of the route, such as "/fleet/{run}".
        query: fields behind it.
        values: of its parameters. Raises MalformedError for one that does not have its type.
    """
    parts = {name: quote(str(wire.convert(TYPES[name], value, what=name))) for name, value in values.items()}
    return path.format(**parts) + (f"?{urlencode(query)}" if query else "")
