"""The text of a unit, plain or compressed: planned, and opened again at a slice.

Offsets count the bytes that come out. Planning reads a compressed file to its end, checksums and all.
"""

from __future__ import annotations

import codecs
import io
import re
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

from core.errors import SourceError
from core.units import Unit
from sources.base import FILE_UNITS_MAX, Moved, unwatched
from sources.compressed import DECODERS, MAGICS, OUTPUT_BYTES, SUFFIXES, Members, compression_of
from sources.cursors import LastCursor
from sources.storage import base_name, beyond_units, open_unchanged

OPTION = "compression"
"""The option by which a unit says how its file is compressed; units of plain files have none."""

Cut = tuple[int, int, int]
"""First byte, byte after the last, and samples of a slice."""

_HEAD_BYTES = 1024
_TEXT = re.compile(rb"[^\0-\x08\x0e-\x1f\x7f]*")


class Text(Protocol):
    """What reading lines needs of a file."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self, limit: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...


class TextCursor:
    """A place in a decompressed text; a file that can be read and sought forwards only."""

    def __init__(self, unit: Unit, compression: str) -> None:
        self.moved: Moved = unwatched
        self.position = 0
        with ExitStack() as stack:
            whole = replace(unit, start=0, stop=0)
            file = stack.enter_context(open_unchanged(whole, "source_changed", lambda: self.moved()))
            self._text = stack.enter_context(io.BufferedReader(Members(file, compression, unit.source), OUTPUT_BYTES))
            self._stack = stack.pop_all()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        data = self._text.read(size)
        self.position += len(data)
        return data

    def readline(self, limit: int = -1) -> bytes:
        """A line with its end, or its first `limit` bytes."""
        line = self._text.readline(limit)
        self.position += len(line)
        return line

    def seek(self, offset: int) -> int:
        """Go forwards to `offset`."""
        while self.position < offset and self.read(min(OUTPUT_BYTES, offset - self.position)):
            pass
        return self.position

    def close(self) -> None:
        """Let go of the file."""
        self._stack.close()


_LAST: LastCursor[TextCursor] = LastCursor()


@contextmanager
def open_text(unit: Unit, moved: Moved) -> Iterator[Text]:
    """The unit's text, at its first byte or before its slice; the file is the version that was planned.

    Raises SourceError `source_changed`, `source_truncated`, `source_damaged`, or as `open_unchanged` does.
    """
    compression = dict(unit.options).get(OPTION, "")
    if not compression:
        with open_unchanged(unit, "source_changed", moved) as file:
            yield file
    elif compression not in DECODERS:
        raise SourceError(
            f"{unit.source}: is compressed as {compression!r}, which this worker does not know",
            code="unknown_kind",
            next_step="is this worker older than the run?",
        )
    else:
        with _LAST.at(unit, unit.start, moved, lambda: TextCursor(unit, compression)) as cursor:
            yield cursor


@contextmanager
def open_planned(unit: Unit) -> Iterator[tuple[Unit, Text]]:
    """The whole text of a file that is being planned, and the unit, which now says how the file is compressed."""
    with open_unchanged(unit, "source_changed", unwatched) as file:
        head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
        compression = compression_of(head, unit.source)
        if not compression:
            _refuse_lost_head(unit.source, head)
            yield unit, file
            return
        unit = replace(unit, options=tuple(sorted((*unit.options, (OPTION, compression)))))
        cursor = TextCursor(unit, compression)
        try:
            yield unit, cursor
        finally:
            cursor.close()


def whole_first(unit: Unit, cuts: Iterator[Cut]) -> Iterable[Cut]:
    """The cuts (start, stop, samples) of a unit's file: where it is compressed, after all of it has been read.

    Nothing of a file that turns out to be damaged may stand in the manifest, as only its end tells whether what came
    out of it was right. Held until then are 24 bytes for each cut.
    """
    if OPTION not in dict(unit.options):
        return cuts
    flat = array("q")
    for cut in cuts:
        flat.extend(cut)
        if len(flat) > 3 * FILE_UNITS_MAX:
            raise beyond_units(unit.source)
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def check_head(file: Text, unit: Unit) -> None:
    """Raise SourceError for a file that was planned as a plain one, and is no text by how it begins."""
    if OPTION not in dict(unit.options):
        file.seek(0)
        head = file.read(_HEAD_BYTES)
        compression_of(head, unit.source)
        _refuse_lost_head(unit.source, head)
        file.seek(0)


def damage_of(file: Text, unit: Unit) -> SourceError:
    """What is wrong with a file that was damaged when it was planned: found by reading it, or that it is whole now."""
    check_head(file, unit)
    while file.read(OUTPUT_BYTES):
        pass
    return SourceError(
        f"{unit.source}: could not be read when the run was planned, and can be now",
        code="source_changed",
        next_step="make a new run of it",
    )


def _refuse_lost_head(path: str, head: bytes) -> None:
    """Raise SourceError for a file that is compressed by its name, and neither that nor a text by how it begins."""
    said = next((name for suffix, name in SUFFIXES.items() if base_name(path).lower().endswith(suffix)), "")
    begun = said and MAGICS[said][0].startswith(head[:2])
    if said and head and (begun or not _TEXT.fullmatch(head) or not _is_utf8(head)):
        raise SourceError(
            f"{path}: does not begin as a file compressed with {said} does: it is cut or damaged",
            code="source_damaged",
            next_step="copy or write the file again",
        )


def _is_utf8(head: bytes) -> bool:
    """Whether a file that begins with `head` may be UTF-8; its last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
