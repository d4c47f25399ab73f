"""Addresses of the pages: every value in one has the type of its name.

A name from data that became part of an address could lead to another route, of which the answer is inserted as HTML.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import quote, urlencode

from msgspec import Meta, Struct

from embq.core import wire
from embq.core.run.control import VERBS


class Values(Struct, forbid_unknown_fields=True):
    """Parameters of routes by name; the defaults stand for none."""

    run: wire.RunId = ""
    verb: Annotated[str, wire.one_of((*VERBS, "retry"))] = ""
    unit: wire.UnitId = ""
    ordinal: wire.Count = 0
    index: wire.RelativePath = ""
    modality: wire.RelativePath = ""
    id: wire.Count = 0
    token: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")] = ""


def url(path: str, query: Mapping[str, object] | None = None, **values: object) -> str:
    """The address of a route.

    Args:
        path: of the route, such as "/fleet/{run}".
        query: fields behind it.
        values: of its parameters. Raises MalformedError for one that does not have its type in `Values`.
    """
    wire.convert(Values, values, what="address")
    parts = {name: quote(str(value)) for name, value in values.items()}
    return path.format(**parts) + (f"?{urlencode(query)}" if query else "")
