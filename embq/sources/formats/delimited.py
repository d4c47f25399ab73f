"""Kind "csv": .csv and .tsv files with a header, quoted as in RFC 4180, as units of consecutive rows.

A row that does not fit the header is a failure of its own. A blank line is no row, except where there is only one
column. Fields are split before they are decoded, so that one that is not UTF-8 harms no other.
"""

from __future__ import annotations

import csv
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import Literal

from embq.core.errors import InputError, SampleError, SourceError, UsageError
from embq.core.process.limits import decoded_bytes
from embq.core.storage.paths import is_url
from embq.core.units import Sample, Unit
from embq.sources.access.files import require_same
from embq.sources.access.urls import path_of
from embq.sources.columns import ChosenColumns, Column, choose, refuse_duplicates
from embq.sources.decode import decode_text
from embq.sources.formats.compressed import SUFFIXES as COMPRESSED
from embq.sources.formats.text_files import (
    HEAD_BYTES,
    Cut,
    Text,
    check_head,
    damage_of,
    open_planned,
    open_text,
    refuse_encoding,
    whole_first,
)
from embq.sources.interface import SAMPLE_MAX_BYTES, Moved, Source, unwatched
from embq.sources.reader_options import ReadOptions
from embq.sources.rows import RowSamples, metadata_of
from embq.sources.unusable import failing_unit, note_unusable, refuse_unreadable

FIELD_MAX_BYTES = 2 * SAMPLE_MAX_BYTES
"""A longer field or line makes its row a `bad_csv`; between this and `SAMPLE_MAX_BYTES` it is `too_large`."""

COLUMNS_MAX = 10_000

_MANY_FIELDS, _FIELD_BYTES = 1 << 20, 150
"""A line up to this size is split without a look at it. A field of few bytes takes so many in each of two forms."""

LINES_MAX = 100_000
"""Most lines of a row: more than a book has in a field, and what a quote that nothing closes soon takes."""

_CHUNK_ROWS = 64
"""Rows that are turned into samples at a time, so that images behind URLs are fetched several at a time."""

_MARK = BOM_UTF8.decode("latin-1")

DELIMITERS = ",;\t|^~\x01\x1f"
"""Looked for in the header, outside quotes."""

OPTION = "delimiter"
"""Option of units: the delimiter of their file, named by the user or found when the run was planned."""

_NAMED = re.compile(r'"?sep=(.)"?\r?\n?', re.IGNORECASE | re.DOTALL)
"""The line before the header by which Excel names the delimiter."""

_QUOTED = re.compile(r'"[^"]*("|$)')

_SNIFFED_ROWS, _QUOTED_ROWS = 100, 10_000
"""First rows that are tried for a delimiter, and for the meaning of quotes in a .tsv that names none."""

QUOTES = "quotes"
"""Option of units: "none" where quotes are characters like others, as the user says or the first rows of a .tsv."""

Row = list[str] | str
"""The fields of a row, each character one byte; or the reason why it cannot be split."""


class DelimitedSource(Source):
    """One sample per row. The key is the id column's value, else "<file name>:<row from 1>".

    The delimiter is the one that the user or a first line "sep=;" names, a tab in .tsv, or the one of `DELIMITERS` that
    the header has; of several, the one by which the first rows have as many fields as the header. All other columns
    become metadata, unless the user names some.
    """

    kind = "csv"
    modalities: tuple[str, ...] = ("image", "text")

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """The modalities that the samples of this file can have, from its header; SourceError where it has none."""
        with open_planned(Unit(kind=self.kind, source=path, options=options.columns)) as (unit, text):
            return _choice(_read_header(text, unit)[0], unit).modalities

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units of `unit_samples` rows, from one pass over the file. Columns that are missing make its units fail.

        A file that has no header, or is compressed and damaged, gives one unit that fails.
        """
        unit = Unit(kind=self.kind, source=path, options=options.columns)
        first = 0
        try:
            with open_planned(unit) as (unit, text):
                names, delimiter, behind = _read_header(text, unit)
                unit = _with(unit, OPTION, delimiter)
                if not options.quotes and _is_tabbed(path) and _misfits(_with(unit, QUOTES, "none")) < _misfits(unit):
                    unit = _with(unit, QUOTES, "none")
                try:
                    _choice(names, unit)
                except SourceError as error:
                    note_unusable(path, error)
                found = _rows(text, unit, behind, delimiter, len(names))
                cuts = _cuts(found, behind, options.unit_samples, options.unit_bytes)
                for start, stop, rows in whole_first(unit, cuts):
                    yield replace(unit, start=start, stop=stop, first=first, samples=rows)
                    first += rows
        except SourceError as error:
            yield failing_unit(unit, error)
            return
        if not first:
            raise InputError(f"{path}: has a header and no row", code="empty_input", next_step="leave it out")

    def read(self, unit: Unit, moved: Moved = unwatched) -> Iterator[Sample]:
        """One sample per row."""
        refuse_unreadable(unit)
        if unit.samples is None:
            with open_text(unit, moved) as text:
                check_head(text, unit)
                names, delimiter, behind = _read_header(text, unit)
                for _ in _rows(text, unit, behind, delimiter, len(names)):
                    pass
                raise damage_of(text, unit)
        names, delimiter = _header_of(unit)
        choice = _choice(names, unit)
        samples = RowSamples(unit, moved)
        stop, rows = unit.start, 0
        with open_text(unit, moved) as text:
            text.seek(unit.start)
            planned = islice(_rows(text, unit, unit.start, delimiter, len(names)), unit.samples)
            while some := list(islice(planned, _CHUNK_ROWS)):
                stop, rows = some[-1][0], rows + len(some)
                yield from _samples(samples, choice, names, [row for _, row in some])
        if (stop, rows) != (unit.stop, unit.samples):
            raise SourceError(
                f"{unit.source}: bytes {unit.start} to {unit.stop} hold {rows} rows and not the planned {unit.samples}",
                code="source_changed",
                next_step="put the planned file back, or plan a new run",
            )

    def alone(self, unit: Unit, ordinal: int) -> Unit:
        """The unit of one row, which is found by reading those before it; the unit where it has fewer."""
        names, delimiter = _header_of(unit)
        with open_text(unit, unwatched) as text:
            text.seek(unit.start)
            cuts = _cuts(_rows(text, unit, unit.start, delimiter, len(names)), unit.start, 1, 0)
            for start, stop, _ in islice(cuts, ordinal, ordinal + 1):
                return replace(unit, start=start, stop=stop, first=unit.first + ordinal, samples=1)
        return unit

    def may_have_metadata(self, unit: Unit) -> bool:
        """Every other column is metadata, unless the user names some."""
        return unit.samples is not None

    def first_metadata(self, unit: Unit, most: int) -> Iterator[str]:
        """From the first rows."""
        names, delimiter = _header_of(unit)
        choice = _choice(names, unit).metadata_only
        with open_text(unit, unwatched) as text:
            text.seek(unit.start)
            rows = islice(_rows(text, unit, unit.start, delimiter, len(names)), min(most, unit.samples or 0))
            for sample in _samples(metadata_of(unit), choice, names, [row for _, row in rows]):
                if sample.metadata is not None:
                    yield sample.metadata


def _header_of(unit: Unit) -> tuple[list[str], str]:
    named = tuple(pair for pair in unit.options if pair[0] in (OPTION, QUOTES))
    return _header(Unit(kind=unit.kind, source=unit.source, etag=unit.etag, options=named))


@lru_cache(maxsize=8)
def _header(whole: Unit) -> tuple[list[str], str]:
    """Names and delimiter of a file's version; every unit needs them, and few files are open at a time."""
    with open_planned(whole) as (now, text):
        require_same(whole, now.etag, "source_changed")
        names, delimiter, _ = _read_header(text, whole)
    return names, delimiter


def _read_header(text: Text, unit: Unit) -> tuple[list[str], str, int]:
    """The names of the columns, the delimiter, and the offset behind the header."""
    lines, path = _Lines(text, 0, unit.source), unit.source
    try:
        refuse_encoding(path, text.peek(HEAD_BYTES))
        line = next(lines, "").removeprefix(_MARK)
        named = dict(unit.options).get(OPTION, "")
        if excel := _NAMED.fullmatch(line):
            line, named = next(lines, ""), named or excel[1]
        delimiter = _checked(named) if named else _delimiter_in(line, unit)
        if line.count(delimiter) >= COLUMNS_MAX:
            raise csv.Error(f"it has more than {COLUMNS_MAX:,} names")
        fields = next(csv.reader(chain([line], lines), delimiter=delimiter, strict=True, quoting=_quoting(unit)), [])
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


def _checked(named: str) -> str:
    """The delimiter that a user or a file names; UsageError where fields cannot be separated by it."""
    delimiter = "\t" if named in ("tab", "\\t") else named
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0 ':
        raise UsageError(
            f"{named!r} is no delimiter of fields", next_step="give --delimiter one ASCII character, or 'tab'"
        )
    return delimiter


def _delimiter_in(header: str, unit: Unit) -> str:
    """The delimiter of a file that names none. Raises SourceError where its header and first rows allow several."""
    if _is_tabbed(unit.source):
        return "\t"
    bare = _QUOTED.sub("", header)
    found = [one for one in DELIMITERS if one in bare]
    if len(found) > 1:
        fitting = [one for one in found if _fits(one, unit)]
        if len(fitting) != 1:
            raise SourceError(
                f"{unit.source}: its columns may be separated by any of {' '.join(map(repr, fitting or found))}",
                code="table_damaged",
                next_step="name the delimiter with --delimiter",
            )
        found = fitting
    return found[0] if found else ","


def _fits(delimiter: str, unit: Unit) -> bool:
    """True if most of the first rows have as many fields as the header by this delimiter."""
    first = _first_rows(_with(unit, OPTION, delimiter), _SNIFFED_ROWS)
    fits = [isinstance(row, list) and len(row) == columns for row, columns in first]
    return 2 * sum(fits) > len(fits)


def _misfits(unit: Unit) -> int:
    """Number of the first rows that do not fit the header, or of whose fields, if several, one goes over lines."""
    try:
        return sum(
            isinstance(row, str) or len(row) != columns or (columns > 1 and "\n" in "".join(row))
            for row, columns in _first_rows(unit, _QUOTED_ROWS)
        )
    except SourceError:
        return _QUOTED_ROWS + 1


def _first_rows(unit: Unit, most: int) -> Iterator[tuple[Row, int]]:
    with open_planned(unit) as (_, text):
        names, delimiter, behind = _read_header(text, unit)
        for _, row in islice(_rows(text, unit, behind, delimiter, len(names)), most):
            yield row, len(names)


def _with(unit: Unit, name: str, value: str) -> Unit:
    return replace(unit, options=tuple(sorted({**dict(unit.options), name: value}.items())))


def _is_tabbed(path: str) -> bool:
    name = (path_of(path) if is_url(path) else path).lower()
    return name.removesuffix(next((end for end in COMPRESSED if name.endswith(end)), "")).endswith((".tsv", ".tab"))


def _choice(names: list[str], unit: Unit) -> ChosenColumns:
    """The chosen columns; all others become metadata unless the user named some."""
    columns = [Column(name=name, role="text", type="text") for name in names]
    choice = choose(columns, unit.options, unit.source)
    if choice.metadata:
        return choice
    others = tuple(name for name in names if name not in choice.names)
    refuse_duplicates(others, names, unit.source)
    return replace(choice, metadata=others)


class _Lines:
    """The lines of a text as csv wants them, each character one byte.

    Attributes:
        offset: of the byte behind the last line that was given.
        begun: where the row that is being read begins: set to `offset` before each row.
        lines: that were given of this row: set to 0 before each row.
    """

    def __init__(self, text: Text, offset: int, path: str) -> None:
        self.offset = self.begun = offset
        self._text, self._path = text, path
        self.lines = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(FIELD_MAX_BYTES + 1)
        if not line:
            raise StopIteration
        self.lines += 1
        if self.lines > LINES_MAX:
            why = f"a quote in the row at byte {self.begun:,} is not closed within {LINES_MAX:,} lines"
            step = "use --quotes none where quotes are characters like others"
            raise SourceError(f"{self._path}: {why}; {step}", code="table_damaged", next_step=f"close it, or {step}")
        self.offset += len(line)
        if len(line) > FIELD_MAX_BYTES:
            while not line.endswith(b"\n") and (line := self._text.readline(1 << 20)):
                self.offset += len(line)
            raise csv.Error(f"a line has more than {FIELD_MAX_BYTES} bytes")
        if self.offset - self.begun > FIELD_MAX_BYTES:
            raise csv.Error(f"a row has more than {FIELD_MAX_BYTES} bytes")
        if (
            len(line) > _MANY_FIELDS
            and _FIELD_BYTES * sum(map(line.count, map(str.encode, DELIMITERS))) > decoded_bytes()
        ):
            raise csv.Error("a line has more fields than a reader has memory for here")
        return line.decode("latin-1")


def _quoting(unit: Unit) -> Literal[0, 3]:
    return csv.QUOTE_NONE if dict(unit.options).get(QUOTES) == "none" else csv.QUOTE_MINIMAL


def _rows(text: Text, unit: Unit, offset: int, delimiter: str, columns: int) -> Iterator[tuple[int, Row]]:
    """(offset behind it, fields) of each row from `offset` on, where `text` stands."""
    csv.field_size_limit(FIELD_MAX_BYTES)  # of the whole process; its default is 128 kB
    lines = _Lines(text, offset, unit.source)
    reader = csv.reader(lines, delimiter=delimiter, strict=True, quoting=_quoting(unit))
    while True:
        lines.begun, lines.lines = lines.offset, 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.offset, str(error)
            continue
        if fields:
            yield lines.offset, fields
        elif columns == 1:
            yield lines.offset, [""]


def _cuts(rows: Iterator[tuple[int, Row]], start: int, most: int, most_bytes: int) -> Iterator[Cut]:
    """Slices of `rows` from `start` on: of `most`, or up to the one that reaches `most_bytes` where that is not 0."""
    count, stop = 0, start
    for stop, _ in rows:
        count += 1
        if count == most or (most_bytes and stop - start >= most_bytes):
            yield start, stop, count
            start, count = stop, 0
    if count:
        yield start, stop, count


def _samples(samples: RowSamples, choice: ChosenColumns, names: list[str], rows: list[Row]) -> Iterator[Sample]:
    fields = [
        {name: field.encode("latin-1") for name, field in zip(names, row, strict=False)}
        if isinstance(row, list) and len(row) == len(names)
        else {}
        for row in rows
    ]
    images = samples.images([None] * len(rows), [_field(one, choice.image) for one in fields])
    for row, one, image in zip(rows, fields, images, strict=True):
        if isinstance(row, str):
            yield samples.failed("bad_csv", f"the row cannot be split into fields: {row}")
        elif not one:
            yield samples.failed("ragged_row", f"the row has {len(row)} fields, the header has {len(names)}")
        else:
            yield samples.sample(
                choice,
                identity=_field(one, choice.key),
                text=_field(one, choice.text),
                image=image,
                others={name: _decoded(one[name]) for name in choice.metadata},
            )


def _field(row: dict[str, bytes], name: str) -> bytes | None:
    """The field of a column; None where there is no such column, which is not the one without a name."""
    return row.get(name) if name else None


def _decoded(field: bytes) -> str | SampleError:
    try:
        return decode_text(field)
    except SampleError as error:
        return SampleError("bad_metadata", error.message)
