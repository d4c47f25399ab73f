"""Rows of a .csv or .tsv: its header, its delimiter, the meaning of its quotes, and the fields of each row."""

from __future__ import annotations

import csv
import json
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Literal

from embq.core.errors import SampleError, SourceError, UsageError
from embq.core.process.limits import decoded_bytes
from embq.core.storage.paths import is_url
from embq.core.units import Unit
from embq.sources.access.urls import path_of
from embq.sources.columns import LINK_COLUMNS, TEXT_COLUMNS
from embq.sources.decode import decode_text
from embq.sources.formats.compressed import SUFFIXES as COMPRESSED
from embq.sources.formats.text_files import HEAD_BYTES, Text, open_planned, open_text, refuse_encoding, skip_line
from embq.sources.interface import SAMPLE_MAX_BYTES, unwatched

FIELD_MAX_BYTES = 2 * SAMPLE_MAX_BYTES
"""A longer field or line makes its row a `bad_csv`; between this and `SAMPLE_MAX_BYTES` it is `too_large`."""

COLUMNS_MAX = 10_000

_MANY_FIELDS, _FIELD_BYTES = 1 << 20, 150
"""A line up to this size is split without a look at it. A field of few bytes takes that many in each of two forms."""

LINES_MAX = 100_000
"""Most lines of a row: more than a book has in a field, and what a quote that nothing closes soon takes."""

_MARK = BOM_UTF8.decode("latin-1")

DELIMITERS = ",;\t|^~\x01\x1f"
"""Looked for in the header, outside quotes."""

_WEAK_DELIMITERS = ": "
"""Taken where the header has none of the others, a usual name between these, and every first row as many fields."""

OPTION = "delimiter"
"""Option of units: the delimiter of their file, named by the user or found when the run was planned."""

_NAMED = re.compile(r'"?sep=(.)"?\r?\n?', re.IGNORECASE | re.DOTALL)
"""The line before the header by which Excel names the delimiter."""

_QUOTED = re.compile(r'"[^"]*("|$)')

_ENCLOSED = re.compile(r'"[^"]*(?:""[^"]*)*"')
"""A field of which quotes are no part: it begins and ends with one, and those inside are doubled."""

_SNIFFED_ROWS = 100
"""First rows that are tried for a delimiter."""

QUOTED_BYTES = 8 << 20
"""Bytes of a .tsv, from the first row with a quote, that tell whether its quotes enclose."""

QUOTES = "quotes"
"""Option of units: "none" where quotes are characters like others, as the user says or the rows of a .tsv."""

NO_HEADER = "no_header"
"""Option of units: "yes" for a file whose first line is a row."""

Row = list[str] | str
"""The fields of a row, each character one byte; or the reason why it cannot be split."""


def _is_object(line: str) -> bool:
    """True if a line is a JSON object."""
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_header(text: Text, unit: Unit) -> tuple[list[str], str, int]:
    """The names of the columns, the delimiter, and the offset of the first row."""
    lines, path = _Lines(text, 0, unit.source), unit.source
    try:
        refuse_encoding(path, text.peek(HEAD_BYTES))
        marked = next(lines, "")
        line = marked.removeprefix(_MARK)
        start = len(marked) - len(line)
        named = dict(unit.options).get(OPTION, "")
        if excel := _NAMED.fullmatch(line):
            start = lines.offset
            line, named = next(lines, ""), named or excel[1]
        if not marked:
            raise SourceError(
                f"{path}: is empty, without even a header",
                code="table_damaged",
                next_step="check how the file was made",
            )
        if NO_HEADER not in dict(unit.options) and _is_object(line):
            raise SourceError(
                f"{path}: its first line is a JSON object, as of JSON Lines, and no header of columns",
                code="table_damaged",
                next_step="call it .jsonl, or give --input-format jsonl",
            )
        delimiter = _checked(named) if named else _delimiter_in(line, unit)
        if line.count(delimiter) >= COLUMNS_MAX:
            raise csv.Error(f"it has more than {COLUMNS_MAX:,} names")
        fields = next(csv.reader(chain([line], lines), delimiter=delimiter, strict=True, quoting=_quoting(unit)), [])
        if fields and NO_HEADER in dict(unit.options):
            return [f"column{number}" for number in range(1, len(fields) + 1)], delimiter, start
        names = [decode_text(field.encode("latin-1")) for field in fields]
        if not names:
            raise csv.Error("it is blank")
    except (csv.Error, SampleError) as error:
        why = "its lines end with CR alone, not with LF or CRLF" if "new-line character" in str(error) else str(error)
        raise SourceError(
            f"{path}: its first line is no header of columns: {why}",
            code="table_damaged",
            next_step="write the file with one name for each column in its first line",
        ) from error
    return names, delimiter, lines.offset


@contextmanager
def at_first_row(text: Text, unit: Unit, start: int) -> Iterator[Text]:
    """The text, which stands behind the header, or another one at `start` if its first line is a row."""
    if NO_HEADER not in dict(unit.options):
        yield text
        return
    with open_text(unit, unwatched) as again:  # compressed texts are read forwards only
        again.seek(start)
        yield again


def _checked(named: str) -> str:
    """The delimiter that a user or a file names; UsageError if fields cannot be separated by it."""
    delimiter = "\t" if named in ("tab", "\\t") else named
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0':
        raise UsageError(
            f"{named!r} is no delimiter of fields", next_step="give --delimiter one ASCII character, or 'tab'"
        )
    return delimiter


def _delimiter_in(header: str, unit: Unit) -> str:
    """The delimiter of a file that names none. Raises SourceError if its header and first rows allow several."""
    if _is_tabbed(unit.source):
        return "\t"
    bare = _QUOTED.sub("", header)
    candidates = [delimiter for delimiter in DELIMITERS if delimiter in bare]
    if len(candidates) > 1:
        fitting = [delimiter for delimiter in candidates if _fitting(delimiter, unit) > 0.5]
        if len(fitting) != 1:
            raise SourceError(
                f"{unit.source}: its columns may be separated by any of {' '.join(map(repr, fitting or candidates))}",
                code="table_damaged",
                next_step="name the delimiter with --delimiter",
            )
        candidates = fitting
    weak = () if candidates or NO_HEADER in dict(unit.options) else _WEAK_DELIMITERS
    usual = {*TEXT_COLUMNS, *LINK_COLUMNS, *(value for name, value in unit.options if name.endswith("_column"))}
    candidates += [
        delimiter
        for delimiter in weak
        if 0 < bare.count(delimiter) < COLUMNS_MAX
        and any(name in usual or name.lower() in usual for name in bare.rstrip().split(delimiter))
        and _fitting(delimiter, unit) == 1
    ]
    return candidates[0] if candidates else ","


def _fitting(delimiter: str, unit: Unit) -> float:
    """The part of the first rows that have as many fields as the header by this delimiter."""
    with open_planned(with_option(unit, OPTION, delimiter)) as (now, text):
        names, _, behind = read_header(text, now)
        with at_first_row(text, now, behind) as rows_text:
            rows = islice(split_rows(rows_text, unit, behind, delimiter, len(names)), _SNIFFED_ROWS)
            fits = [isinstance(row, list) and len(row) == len(names) for _, row in rows]
    return sum(fits) / max(1, len(fits))


class QuotesAreCharacters(Exception):
    """The rows of a .tsv, from its first quote on, fit better with quotes as characters."""


def require_enclosing(unit: Unit, start: int) -> None:
    """Raise `QuotesAreCharacters` where they are, by the rows from `start` on, where the first with a quote begins."""
    if _is_tabbed(unit.source) and _misfits(with_option(unit, QUOTES, "none"), start) < _misfits(unit, start):
        raise QuotesAreCharacters


def _misfits(unit: Unit, start: int) -> int:
    """Number of the rows in `QUOTED_BYTES` from `start` on that do not fit the header, or with a field that does not
    fit the meaning of quotes: one over lines and delimiters if they enclose, an enclosed one if they do not."""
    count, bare = 0, _quoting(unit) == csv.QUOTE_NONE
    try:
        with open_planned(unit) as (_, text):
            names, delimiter, _ = read_header(text, unit)
        if bare and any(map(_ENCLOSED.fullmatch, names)):
            return sys.maxsize
        with open_planned(unit) as (_, text):
            text.seek(start)
            for stop, row in split_rows(text, unit, start, delimiter, len(names)):
                count += (
                    isinstance(row, str)
                    or len(row) != len(names)
                    or any(_ENCLOSED.fullmatch(cell) if bare else "\n" in cell and delimiter in cell for cell in row)
                )
                if stop - start >= QUOTED_BYTES:
                    break
    except SourceError:
        return sys.maxsize
    return count


def with_option(unit: Unit, name: str, value: str) -> Unit:
    """The unit with that value of an option."""
    return replace(unit, options=tuple(sorted({**dict(unit.options), name: value}.items())))


def _is_tabbed(path: str) -> bool:
    name = (path_of(path) if is_url(path) else path).lower()
    return name.removesuffix(next((end for end in COMPRESSED if name.endswith(end)), "")).endswith((".tsv", ".tab"))


class _Lines:
    """The lines of a text as csv wants them, each character one byte.

    Attributes:
        offset: of the byte behind the last line that was given.
        begun: where the row that is being read begins: set to `offset` before each row.
        lines: that were given of this row: set to 0 before each row.

    Args:
        delimiters: those that the fields of a line may have.
        on_quote: called once with `begun`, at the first line with a quote.
    """

    def __init__(
        self,
        text: Text,
        offset: int,
        path: str,
        delimiters: str = DELIMITERS,
        on_quote: Callable[[int], None] | None = None,
    ) -> None:
        self.offset = self.begun = offset
        self._text, self._path, self._delimiters, self._on_quote = text, path, delimiters, on_quote
        self.lines = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(FIELD_MAX_BYTES + 1)
        if not line:
            raise StopIteration
        if self._on_quote and b'"' in line:
            self._on_quote(self.begun)
            self._on_quote = None
        self.lines += 1
        self.offset += len(line)
        if len(line) > FIELD_MAX_BYTES:
            self.offset += skip_line(self._text, line, sys.maxsize)
            raise csv.Error(f"a line has more than {FIELD_MAX_BYTES} bytes")
        if self.lines > LINES_MAX or self.offset - self.begun > FIELD_MAX_BYTES:
            within = f"{LINES_MAX:,} lines or {FIELD_MAX_BYTES:,} bytes"
            step = "use --quotes none where quotes are characters like others"
            raise SourceError(
                f"{self._path}: a quote in the row at byte {self.begun:,} is not closed within {within}; {step}",
                code="table_damaged",
                next_step=f"close it, or {step}",
            )
        if (
            len(line) > _MANY_FIELDS
            and _FIELD_BYTES * sum(map(line.count, map(str.encode, self._delimiters))) > decoded_bytes()
        ):
            raise csv.Error("a line has more fields than a reader has memory for here")
        return line.decode("latin-1")


def _quoting(unit: Unit) -> Literal[0, 3]:
    return csv.QUOTE_NONE if dict(unit.options).get(QUOTES) == "none" else csv.QUOTE_MINIMAL


def split_rows(
    text: Text,
    unit: Unit,
    offset: int,
    delimiter: str,
    columns: int,
    on_quote: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Row]]:
    """(offset behind it, fields) of each row from `offset` on, where `text` stands; `on_quote` as `_Lines` has it."""
    csv.field_size_limit(FIELD_MAX_BYTES)  # of the whole process; its default is 128 kB
    lines = _Lines(text, offset, unit.source, delimiter, on_quote)
    reader = csv.reader(lines, delimiter=delimiter, strict=True, quoting=_quoting(unit))
    while True:
        lines.begun, lines.lines = lines.offset, 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.offset, f"{error} in the row at byte {lines.begun:,} (lines: {lines.lines:,})"
            continue
        if fields:
            yield lines.offset, fields
        elif columns == 1:
            yield lines.offset, [""]
