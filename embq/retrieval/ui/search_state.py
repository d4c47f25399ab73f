"""The state of the search page: what its address says, and the addresses of its links."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from embq.core.errors import InputError
from embq.retrieval.searching.query import MOST_TEXT

PAGE = 48
"""Results of one page: whole rows of a grid with 2, 3, 4, 6 and 8 columns."""

IMAGE_TOKEN = re.compile(r"[0-9a-f]{32}")

_INTEGER = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The query in an address.

    Attributes:
        index: NAME:MODALITY; "" for the first index.
        text: query text.
        image: token of an uploaded image.
        id: of a row; its nearest rows are searched for.
        like, unlike: ids of rows that are examples.
        where: conditions, as text.
        offset: of the first result.
        row: id of the row whose details are shown.
    """

    index: str = ""
    text: str = ""
    image: str = ""
    id: int | None = None
    like: tuple[int, ...] = ()
    unlike: tuple[int, ...] = ()
    where: tuple[str, ...] = ()
    offset: int = 0
    row: int | None = None

    @classmethod
    def from_address(cls, given: QueryParams) -> SearchState:
        """The state in the parameters of an address. Raises InputError `bad_request` for a number that is none."""
        text = given.get("q", "").strip()
        if len(text) > MOST_TEXT:
            raise InputError(
                f"the text has {len(text):,} characters; {MOST_TEXT:,} are the most",
                code="too_long",
                next_step="search for its beginning",
            )
        image, index = given.get("image", ""), given.get("index", "")
        if given.get("of", index) != index:  # the form was changed to another index: ids and columns are not of that
            return cls(index=index, text=text)
        return cls(
            index=index,
            text=text,
            image=image if IMAGE_TOKEN.fullmatch(image) else "",
            id=_number("id", given["id"]) if given.get("id") else None,
            like=_numbers("like", given.get("like", "")),
            unlike=_numbers("unlike", given.get("unlike", "")),
            where=tuple(condition for condition in given.getlist("where") if condition),
            offset=max(0, _number("offset", given.get("offset") or "0")),
            row=_number("row", given["row"]) if given.get("row") else None,
        )

    @property
    def has_query(self) -> bool:
        """Whether there is something to search for."""
        return bool(self.text or self.image or self.id is not None or self.like)

    @property
    def fields(self) -> list[tuple[str, object]]:
        """Names and values of the address; a form that adds to the state sends them too."""
        fields: list[tuple[str, object]] = [
            ("index", self.index),
            ("q", self.text),
            ("image", self.image),
            ("id", "" if self.id is None else self.id),
            ("like", ",".join(map(str, self.like))),
            ("unlike", ",".join(map(str, self.unlike))),
            *(("where", condition) for condition in self.where),
            ("offset", self.offset or ""),
            ("row", "" if self.row is None else self.row),
        ]
        return [(name, value) for name, value in fields if value != ""]

    @property
    def href(self) -> str:
        """The address of this state."""
        return "/?" + urlencode(self.fields)

    def with_(self, **changes: Any) -> SearchState:
        """The state after a change, at its first result, without the details of a row."""
        return replace(self, **{"offset": 0, "row": None, **changes})

    def only(self, id_: int) -> SearchState:
        """A search for rows like one, in the same index under the same conditions."""
        return SearchState(index=self.index, where=self.where, id=id_)

    def example(self, id_: int, *, liked: bool) -> SearchState:
        """The state with a row as an example, or without it if it is one already."""
        like = tuple(row_id for row_id in self.like if row_id != id_)
        unlike = tuple(row_id for row_id in self.unlike if row_id != id_)
        if liked and id_ not in self.like:
            like = (*like, id_)
        if not liked and id_ not in self.unlike:
            unlike = (*unlike, id_)
        return self.with_(like=like, unlike=unlike)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    return tuple(_number(name, part) for part in text.split(",")) if text else ()


def _number(name: str, text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise InputError(f"{name}={text[:40]!r} is no number", code="bad_request", next_step=f"correct {name}")
    return int(text)
