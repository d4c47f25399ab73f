"""Text files, plain or compressed: cut into slices at line ends, and read from a slice.

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

from embq.core.errors import InputError, SourceError
from embq.core.units import Unit
from embq.sources.access.cursors import LastCursor
from embq.sources.access.files import base_name, beyond_units, open_current, open_unchanged
from embq.sources.decode import form_of_json
from embq.sources.formats.compressed import DECODERS, MAGICS, OUTPUT_BYTES, SUFFIXES, Members, compression_of
from embq.sources.interface import FILE_UNITS_MAX, SAMPLE_MAX_BYTES, Moved, unwatched
from embq.sources.unusable import failing_unit, not_as_planned, readable_now, refuse_unreadable

OPTION = "compression"
"""Option of units of compressed files: the format of the compression."""

Cut = tuple[int, int, int]
"""First byte, byte after the last, and samples of a slice."""

HEAD_BYTES = 1 << 20
"""Bytes of a text that are looked at for its encoding, and, by `_START_BYTES` of them, for what is no text at all."""

_START_BYTES = 1024

_TEXT = re.compile(rb"[^\0-\x08\x0e-\x1f\x7f]*")

_BLOCK = 1 << 18
"""Bytes that are read at a time; they fit the second-level cache, where counting line ends is fastest."""

_STRIDE = 1 << 11


class Text(Protocol):
    """Methods of a file by which lines are read."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self, limit: int, /) -> bytes: ...
    def peek(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...


class TextCursor:
    """A place in a decompressed text; a file that can be read and sought forwards only."""

    def __init__(self, unit: Unit, compression: str) -> None:
        self.on_progress: Moved = unwatched
        self.position = 0
        with ExitStack() as stack:
            file_unit = replace(unit, start=0, stop=0)
            file = stack.enter_context(open_unchanged(file_unit, "source_changed", lambda: self.on_progress()))
            self._text = stack.enter_context(io.BufferedReader(Members(file, compression, unit.source), OUTPUT_BYTES))
            self._stack = stack.pop_all()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        data = self._text.read(size)
        self.position += len(data)
        return data

    def peek(self, size: int) -> bytes:
        """Some of the next bytes, which stay there."""
        return self._text.peek(size)

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
        """Close the file."""
        self._stack.close()


_LAST: LastCursor[TextCursor] = LastCursor()


@contextmanager
def open_text(unit: Unit, on_progress: Moved) -> Iterator[Text]:
    """The unit's text, at its first byte or before its slice; the file is the version that was planned.

    Raises SourceError `source_changed`, `source_truncated`, `source_damaged`, or as `open_unchanged` does.
    """
    compression = dict(unit.options).get(OPTION, "")
    if not compression:
        with open_unchanged(unit, "source_changed", on_progress) as file:
            yield file
    elif compression not in DECODERS:
        raise SourceError(
            f"{unit.source}: is compressed as {compression!r}, which this worker does not know",
            code="unknown_kind",
            next_step="is this worker older than the run?",
        )
    else:
        with _LAST.at(unit, unit.start, on_progress, lambda: TextCursor(unit, compression)) as cursor:
            yield cursor


@contextmanager
def open_planned(unit: Unit) -> Iterator[tuple[Unit, Text]]:
    """The whole text of a file that is being planned, and the unit with the file's version and compression."""
    with open_current(unit, "source_changed", unwatched) as (version, file):
        unit = replace(unit, etag=version)
        head = file.peek(_START_BYTES)[:_START_BYTES]
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


def split_lines(unit: Unit, most: int, most_bytes: int = 0) -> Iterator[Unit]:
    """A unit that names kind, source and options, cut into units of `most` lines each. The last one may have fewer, and
    so may one that reaches `most_bytes` before (0: none does).

    A compressed file that is damaged becomes one unit without `samples`, which fails.

    Raises InputError if the file is missing, empty, or changes while it is being planned.
    """
    path = unit.source
    first = 0
    try:
        with open_planned(unit) as (unit, file):
            refuse_head(unit, file.peek(HEAD_BYTES))
            cuts = _cuts(file, most, most_bytes)
            for start, stop, lines in whole_first(unit, cuts) if OPTION in dict(unit.options) else cuts:
                yield replace(unit, start=start, stop=stop, first=first, samples=lines)
                first += lines
    except SourceError as error:
        if error.code == "source_changed":
            raise InputError(
                f"{path}: was written to while it was being planned", next_step="plan it when it is complete"
            ) from error
        yield failing_unit(unit, error)
        return
    if first == 0:
        raise InputError(f"{path}: is empty", code="empty_input", next_step="leave it out")


def whole_first(unit: Unit, cuts: Iterator[Cut]) -> Iterable[Cut]:
    """The cuts (start, stop, samples) of a unit's file, after all of it has been read.

    Nothing of a file that turns out to be damaged may stand in the manifest: if it is compressed, or has quotes,
    only its end tells whether what came out of it was right. Held until then are 24 bytes for each cut.
    """
    flat = array("q")
    for cut in cuts:
        flat.extend(cut)
        if len(flat) > 3 * FILE_UNITS_MAX:
            raise beyond_units(unit.source)
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def _cuts(file: Text, most: int, most_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, lines) of each cut. A last line without a line end counts; nothing behind a line end does not."""
    start = lines = offset = 0
    block = b"\n"
    while fresh := file.read(_BLOCK):
        block = fresh
        ends = block.count(b"\n")
        at = 0
        while True:
            behind = _after_lines(block, at, most - lines) if lines + ends >= most else 0
            if most_bytes:
                full = block.find(b"\n", max(at, start + most_bytes - offset - 1)) + 1
                behind = min(full or behind, behind or full)
            if not behind:
                break
            passed = block.count(b"\n", at, behind)
            ends -= passed
            yield start, offset + behind, lines + passed
            start, lines, at = offset + behind, 0, behind
        lines += ends
        offset += len(block)
    if start < offset:
        yield start, offset, lines + (not block.endswith(b"\n"))


def _after_lines(block: bytes, at: int, lines: int) -> int:
    """The offset behind the next `lines` line ends of `block`, which has them."""
    # Counting passes a line end seven times faster than finding it does.
    while (passed := block.count(b"\n", at, at + _STRIDE)) < lines:
        lines -= passed
        at += _STRIDE
    for _ in range(lines):
        at = block.find(b"\n", at) + 1
    return at


def skip_lines(file: Text, lines: int) -> int:
    """Read to the end of the next `lines` lines, or of the file; returns how many bytes that is."""
    skipped = 0
    while lines > 0 and (piece := file.readline(1 << 20)):  # a line may be longer than memory
        skipped += len(piece)
        lines -= piece.endswith(b"\n")
    return skipped


def part_of_lines(unit: Unit, first: int, samples: int | None) -> Unit:
    """See `embq.sources.interface.Source.part`."""
    with open_text(unit, unwatched) as file:
        file.seek(unit.start)
        start = unit.start + skip_lines(file, first)
        stop = unit.stop if samples is None else start + skip_lines(file, samples)
    taken = (unit.samples or 0) - first if samples is None else samples
    return replace(unit, start=start, stop=stop, first=unit.first + first, samples=taken)


def read_lines(file: Text, unit: Unit) -> Iterator[bytes | None]:
    """The unit's lines without their ends (LF or CRLF); None for a line above `SAMPLE_MAX_BYTES`.

    Raises SourceError `source_changed` if the slice does not hold the lines that were planned, and what is wrong
    with a file that was damaged when it was planned.
    """
    refuse_unreadable(unit)
    if unit.samples is None:
        raise damage_of(file, unit)
    file.seek(unit.start)
    remaining = unit.stop - unit.start
    count = 0
    while remaining > 0:
        line = file.readline(min(remaining, SAMPLE_MAX_BYTES + 1))
        if not line:
            break
        remaining -= len(line)
        count += 1
        if len(line) > SAMPLE_MAX_BYTES:
            remaining -= skip_line(file, line, remaining)
            yield None
        else:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
    if remaining or count != unit.samples:
        raise not_as_planned(unit, f"{count} lines")


def skip_line(file: Text, line: bytes, remaining: int) -> int:
    """Read to the end of a line that begins with `line`, at most `remaining` bytes; returns how many."""
    skipped = 0
    while not line.endswith(b"\n") and skipped < remaining:
        line = file.readline(min(remaining - skipped, 1 << 20))
        if not line:
            break
        skipped += len(line)
    return skipped


def check_head(file: Text, unit: Unit) -> None:
    """Raise SourceError for a file that was planned as a plain one, and is no text by how it begins."""
    if OPTION not in dict(unit.options):
        file.seek(0)
        head = file.peek(HEAD_BYTES)  # as planning does: the same bytes tell the same
        compression_of(head[:_START_BYTES], unit.source)
        _refuse_lost_head(unit.source, head[:_START_BYTES])
        refuse_head(unit, head)


def damage_of(file: Text, unit: Unit) -> SourceError:
    """Error of a file that was damaged when it was planned, found by reading it; `readable_now` for a whole one."""
    check_head(file, unit)
    if OPTION in dict(unit.options):
        refuse_head(unit, file.peek(HEAD_BYTES))
    while file.read(OUTPUT_BYTES):
        pass
    return readable_now(unit)


def _refuse_lost_head(path: str, head: bytes) -> None:
    """Raise SourceError for a file that is compressed by its name, and neither that nor a text by how it begins."""
    named = next((name for suffix, name in SUFFIXES.items() if base_name(path).lower().endswith(suffix)), "")
    begun = named and MAGICS[named][0].startswith(head[:2])
    if named and head and (begun or not _TEXT.fullmatch(head) or not _is_utf8(head)):
        raise SourceError(
            f"{path}: does not begin as a file compressed with {named} does: it is cut or damaged",
            code="source_damaged",
            next_step="copy or write the file again",
        )


def refuse_head(unit: Unit, head: bytes) -> None:
    """Raise SourceError for a file that is not UTF-8, or not JSON by line, by how it begins, so that it fails once."""
    refuse_encoding(unit.source, head)
    if unit.kind == "jsonl" and (form := form_of_json(head)) is not None:
        raise SourceError(
            f"{unit.source}: is {form.what}, not one JSON object per line; {form.command} converts it",
            code="table_damaged",
            next_step="convert it, or leave it out",
        )


def refuse_encoding(path: str, head: bytes) -> None:
    """Raise SourceError for a file that is not UTF-8 by how it begins, so that it fails once and not by line.

    Args:
        head: its first bytes, at least `_START_BYTES` if it is not shorter.
    """
    start = head[:_START_BYTES]
    if kind := next((kind for magic, kind in BINARY.items() if start.startswith(magic)), ""):
        raise SourceError(
            f"{path}: is {kind}, whatever its name says",
            code="source_damaged",
            next_step="save its texts as UTF-8 in a .csv, .jsonl or .txt, or leave it out",
        )
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # before UTF-16, whose mark begins that of UTF-32
        what, encoding = "is UTF-32, not UTF-8", "UTF-32"
    elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        what, encoding = "is UTF-16, not UTF-8", "UTF-16"
    elif start.count(0) > max(1, len(start) // 4) or not (_TEXT.fullmatch(start) or _is_utf8(start)):
        encoding = _wide_encoding(start)
        what = f"is no text in UTF-8: it is binary, or {encoding[:6]} without a mark"
    elif not head.isascii() and _is_other(head):
        what, encoding = "is text, but not UTF-8: too many of its lines are not", "WINDOWS-1252"
    elif b"\r" in head.rstrip(b"\r") and b"\n" not in head:
        raise SourceError(
            f"{path}: its lines end with a carriage return alone, so all of it would be one line",
            code="source_damaged",
            next_step="convert it: tr '\\r' '\\n' < OLD > NEW",
        )
    else:
        return
    raise SourceError(
        f"{path}: {what}; iconv -f {encoding} -t UTF-8 converts it where that is its encoding",
        code="source_damaged",
        next_step="convert it, or leave it out",
    )


BINARY = {
    b"PK\x03\x04": "a zip archive, such as a workbook of Excel or a document of Word",
    b"\xd0\xcf\x11\xe0": "a document of an old Excel or Word",
    b"%PDF-": "a PDF",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
    b"SQLite format 3": "a database of SQLite",
}
"""First bytes of files that no text begins with."""


def _wide_encoding(start: bytes) -> str:
    """UTF-32 or UTF-16 with the order of its bytes, by those that are 0 in most texts."""
    zeros = [8 * start[at::4].count(0) > len(start) for at in range(4)]
    if all(zeros[:2]) or all(zeros[2:]):
        return "UTF-32BE" if all(zeros[:2]) else "UTF-32LE"
    return "UTF-16BE" if start[::2].count(0) > start[1::2].count(0) else "UTF-16LE"


def _is_other(head: bytes) -> bool:
    """True if more than a quarter of the lines are not UTF-8, and more than those that are so beyond ASCII.

    Fewer bad lines fail alone: a file of English may have some, and all others would be lost with them. In other
    encodings of two bytes, such as GBK, one short line in 50 happens to be UTF-8 as well.
    """
    *lines, last = head.split(b"\n")
    bad = [not _is_utf8(line + b"\n") for line in lines if not line.isascii()]
    bad += [True] * (not _is_utf8(last))  # it may be cut
    return sum(bad) > max(1, len(bad) // 2, (len(lines) + bool(last)) // 4)


def _is_utf8(head: bytes) -> bool:
    """True if a file that begins with `head` may be UTF-8; its last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
