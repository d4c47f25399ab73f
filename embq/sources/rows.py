"""Turns rows of any table into samples: keys, texts, images by value or by link, metadata."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from embq.core.errors import SampleError, SourceError
from embq.core.storage.paths import is_url
from embq.core.units import Sample, Unit
from embq.sources.access.files import join, name_of, read_inside
from embq.sources.access.ranged_reads import fetch_all
from embq.sources.access.urls import check_url, is_inside
from embq.sources.columns import ChosenColumns
from embq.sources.decode import compact_json, decode_text
from embq.sources.interface import SAMPLE_MAX_BYTES, Moved, unwatched

_ROOTS = "roots"
"""Option of a unit that is being read: the URLs that those in its rows must be below, one a line."""

NO_IMAGES = ("images", "none")
"""Option of a unit that is being read: images that are files of their own are left out."""

NO_TEXTS = ("texts", "none")
"""Option of a unit that is being read: nothing is embedded of texts, so one that cannot be read costs no image."""


class RowSamples:
    """Turns the rows of one unit into samples, in order."""

    def __init__(self, unit: Unit, on_progress: Moved = unwatched) -> None:
        self._unit = unit
        self._on_progress = on_progress
        self._name = name_of(unit)
        self._ordinal = 0
        self._keys: set[str] = set()
        named = dict(unit.options)
        self._needs_id = bool(named.get("id_column"))
        self._may_fetch = bool(named.get("image_column"))
        self._without_images = NO_IMAGES in unit.options
        self._without_texts = NO_TEXTS in unit.options
        self._roots = named[_ROOTS].splitlines() if _ROOTS in named else None

    def failed(self, code: str, message: str) -> Sample:
        """The next row as a failure."""
        ordinal, key = self._next()
        return Sample(ordinal=ordinal, key=key, error=(code, message))

    def sample(
        self,
        choice: ChosenColumns,
        *,
        identity: object,
        text: bytes | None,
        image: bytes | SampleError | None,
        fields: dict[str, Any],
    ) -> Sample:
        """The next row as a sample.

        Args:
            choice: which column each value comes from.
            identity: of the key column, text as bytes; None or b"" makes the row's number the key.
            text: of the text column.
            image: the image's bytes, or why they cannot be had.
            fields: columns that become metadata; a SampleError stands for a value that cannot be read, which is lost.
        """
        ordinal, key = self._next()
        decoded = metadata = None
        unread = None
        try:
            if identity is not None and identity != b"":
                key = decode_text(identity) if isinstance(identity, bytes) else str(identity)
            elif self._needs_id:
                raise SampleError("missing_id", f"the row has no value in {choice.key!r}")
            if key in self._keys:
                raise SampleError("duplicate_key", f"row {self._unit.first + ordinal + 1} repeats the id of an earlier")
            self._keys.add(key)
            if isinstance(image, SampleError):
                raise image
            try:
                decoded = _text(choice, text)
            except SampleError as problem:
                if not self._without_texts or not choice.image:
                    raise
                unread = (problem.code, problem.message)
            if image is not None and len(image) > SAMPLE_MAX_BYTES:
                raise SampleError("too_large", f"the image has {len(image)} bytes, more than {SAMPLE_MAX_BYTES}")
            if fields:
                try:
                    values = {name: plain(value) for name, value in fields.items()}
                except SampleError:
                    values, unread = _readable(fields)
                metadata = compact_json(values, "bad_metadata")
                if len(metadata) > SAMPLE_MAX_BYTES:
                    raise SampleError("too_large", f"the metadata have {len(metadata)} characters as JSON")
        except SampleError as problem:
            return Sample(ordinal=ordinal, key=key, error=(problem.code, problem.message))
        return Sample(ordinal=ordinal, key=key, image=image, text=decoded, metadata=metadata, unread=unread)

    def _next(self) -> tuple[int, str]:
        ordinal = self._ordinal
        self._ordinal += 1
        return ordinal, f"{self._name}:{self._unit.first + ordinal + 1}"

    def images(
        self, images: Sequence[bytes | None], links: Sequence[bytes | None]
    ) -> Iterator[bytes | SampleError | None]:
        """The image of each row in order: its bytes, else the file that its path or URL names, else None.

        A path is relative to the table's folder, which it may not leave. A URL is read where the user named the column.
        """
        if self._without_images:
            yield from images
            return
        places = [
            self._place(link) if image is None and link else None for image, link in zip(images, links, strict=True)
        ]
        urls = [place for place in places if isinstance(place, str) and is_url(place)]
        fetched = fetch_all(urls, [None] * len(urls), self._on_progress)
        for image, place in zip(images, places, strict=True):
            if isinstance(place, str):
                content = next(fetched) if is_url(place) else self._read(place)
                yield SampleError(content.code, content.message) if isinstance(content, SourceError) else content
            else:
                yield image if place is None else place

    def _place(self, link: bytes) -> str | SampleError:
        """The URL of an image, or its path in the table's folder."""
        name = os.fsdecode(link)
        inside = is_url(self._unit.source)
        if is_url(name):
            if not self._may_fetch:
                return SampleError(
                    "outside_root", f"{name!r} is a URL; it is read where --image-column names its column"
                )
        elif inside:
            if name.startswith("/"):
                return SampleError("outside_root", f"{name!r} leads out of the table's folder")
            name = join(self._unit.source.rpartition("/")[0], name)
        else:
            return name
        try:
            check_url(name)
        except SourceError as error:
            return SampleError("outside_root", error.message)
        if self._roots is not None and not any(is_inside(name, root) for root in self._roots):
            return SampleError("outside_root", f"{name!r} is outside of what this worker may read (EMBQ_ROOTS)")
        return name

    def _read(self, name: str) -> bytes | SampleError:
        folder = os.path.realpath(os.path.dirname(self._unit.source))
        try:
            return read_inside(folder, name, None, self._on_progress)
        except SampleError as problem:
            return problem
        except ValueError:  # a zero byte
            return SampleError("source_missing", f"{name!r} is no path")


def metadata_of(unit: Unit) -> RowSamples:
    """Samples of a unit whose metadata alone are looked at, whatever their ids are."""
    return RowSamples(replace(unit, options=()))


def within(unit: Unit, roots: Sequence[str]) -> Unit:
    """The unit for a worker that may not read everything: URLs in its rows are read below `roots` only."""
    return replace(unit, options=(*unit.options, (_ROOTS, "\n".join(root for root in roots if is_url(root)))))


def without_images(unit: Unit) -> Unit:
    """The unit for a reader that does not look at images."""
    return replace(unit, options=(*unit.options, NO_IMAGES))


def without_texts(unit: Unit) -> Unit:
    """The unit for a reader whose texts are kept beside images, and not embedded."""
    return replace(unit, options=(*unit.options, NO_TEXTS))


def _text(choice: ChosenColumns, text: bytes | None) -> str | None:
    """The text, which may only be missing if there are images."""
    if text is None:
        if choice.text and not choice.image:
            raise SampleError("missing_text", f"no text in {choice.text!r}: the value is null")
        return None
    if len(text) > SAMPLE_MAX_BYTES:
        raise SampleError("too_large", f"the text has {len(text)} bytes, more than {SAMPLE_MAX_BYTES}")
    decoded = decode_text(text)
    if not choice.image and (not decoded or decoded.isspace()):
        raise SampleError("empty_text", "the text is empty or only white space")
    return decoded


def _readable(fields: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """The fields as JSON values, null for those that cannot be, and the code and message of the last of these."""
    values, unread = {}, None
    for name, value in fields.items():
        try:
            values[name] = plain(value)
        except SampleError as problem:
            values[name], unread = None, (problem.code, f"{name}: {problem.message}")
    return values, unread


def plain(value: Any) -> Any:
    """`value` as `compact_json` takes it: dates, decimals and UUIDs become text; SampleError for bytes."""
    if isinstance(value, SampleError):
        raise value
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        raise SampleError("bad_metadata", "bytes cannot become metadata, which is JSON")
    return str(value)
