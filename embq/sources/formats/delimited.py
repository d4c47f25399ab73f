"""Kind "csv": .csv and .tsv files with a header, quoted as in RFC 4180, as units of consecutive rows.

A row that does not fit the header is a failure of its own. A blank line is no row, except if there is only one
column. Fields are split before they are decoded, so that one that is not UTF-8 harms no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice

from embq.core.errors import InputError, SampleError, SourceError
from embq.core.units import Sample, Unit
from embq.sources.access.files import require_same
from embq.sources.columns import ChosenColumns, Column, choose, fields_of, refuse_duplicates
from embq.sources.decode import decode_text
from embq.sources.formats.delimited_rows import (
    NO_HEADER,
    OPTION,
    QUOTES,
    QuotesAreCharacters,
    Row,
    at_first_row,
    read_header,
    require_enclosing,
    split_rows,
    with_option,
)
from embq.sources.formats.text_files import Cut, check_head, damage_of, open_planned, open_text, whole_first
from embq.sources.interface import Fields, Moved, Source, unwatched
from embq.sources.reader_options import ReadOptions
from embq.sources.rows import RowSamples, metadata_of
from embq.sources.unusable import failing_unit, not_as_planned, note_unusable, refuse_unreadable

_CHUNK_ROWS = 64
"""Rows that are turned into samples at a time, so that images behind URLs are fetched several at a time."""


class DelimitedSource(Source):
    """One sample per row. The key is the id column's value, else "<file name>:<row from 1>".

    The delimiter is the one that the user or a first line "sep=;" names, a tab in .tsv, or the one of `DELIMITERS` that
    the header has; of several, the one by which the first rows have as many fields as the header. All other columns
    become metadata, unless the user names some.
    """

    kind = "csv"
    modalities: tuple[str, ...] = ("image", "text")

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """The modalities that the samples of this file can have, from its header; SourceError if it has none."""
        return self._chosen(path, options)[0].modalities

    def fields(self, path: str, options: ReadOptions) -> Fields:
        """The names in the header."""
        choice, names = self._chosen(path, options)
        return fields_of(choice, names, options.columns)

    def _chosen(self, path: str, options: ReadOptions) -> tuple[ChosenColumns, list[str]]:
        with open_planned(Unit(kind=self.kind, source=path, options=options.columns)) as (unit, text):
            names = read_header(text, unit)[0]
            return _choice(names, unit), names

    def header(self, path: str, options: ReadOptions) -> list[str]:
        """The names in the first line of a file; none if that is a row."""
        with open_planned(Unit(kind=self.kind, source=path, options=options.columns)) as (unit, text):
            return [] if options.no_header else read_header(text, unit)[0]

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units of `unit_samples` rows, from one pass over the file. Columns that are missing make its units fail.

        A file without a header, compressed and damaged, or with an unclosed quote, becomes one unit that fails.
        """
        unit = Unit(kind=self.kind, source=path, options=options.columns)
        first = 0
        try:
            with open_planned(unit) as (unit, head):
                names, delimiter, behind = read_header(head, unit)
                unit = with_option(unit, OPTION, delimiter)
                on_quote = None if options.quotes else partial(require_enclosing, unit)
                with at_first_row(head, unit, behind) as text:
                    parsed = split_rows(text, unit, behind, delimiter, len(names), on_quote)
                    cuts = whole_first(unit, _cuts(parsed, behind, options.unit_samples, options.unit_bytes))
                try:
                    _choice(names, unit)
                except SourceError as error:
                    note_unusable(path, error)
                for start, stop, rows in cuts:
                    yield replace(unit, start=start, stop=stop, first=first, samples=rows)
                    first += rows
        except QuotesAreCharacters:
            yield from self.split(path, replace(options, quotes="none"))
            return
        except SourceError as error:
            if first:
                raise
            yield failing_unit(unit, error)
            return
        if not first:
            raise InputError(f"{path}: has a header and no row", code="empty_input", next_step="leave it out")

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """One sample per row."""
        refuse_unreadable(unit)
        if unit.samples is None:
            with open_text(unit, on_progress) as text:
                check_head(text, unit)
                names, delimiter, behind = read_header(text, unit)
                for _ in split_rows(text, unit, behind, delimiter, len(names)):
                    pass
                raise damage_of(text, unit)
        names, delimiter = _header_of(unit)
        choice = _choice(names, unit)
        samples = RowSamples(unit, on_progress)
        stop, rows = unit.start, 0
        with open_text(unit, on_progress) as text:
            text.seek(unit.start)
            planned = islice(split_rows(text, unit, unit.start, delimiter, len(names)), unit.samples)
            while chunk := list(islice(planned, _CHUNK_ROWS)):
                stop, rows = chunk[-1][0], rows + len(chunk)
                yield from _samples(samples, choice, names, [row for _, row in chunk])
        if (stop, rows) != (unit.stop, unit.samples):
            raise not_as_planned(unit, f"{rows} rows")

    def unit_of_sample(self, unit: Unit, ordinal: int) -> Unit:
        """The unit of one row, which is found by reading those before it; the unit if it has fewer."""
        part = self.part(unit, ordinal, 1)
        return part if part.stop > part.start else unit

    def part(self, unit: Unit, first: int, samples: int | None = None) -> Unit:
        """The unit of some of its rows, which are found by reading those before them."""
        names, delimiter = _header_of(unit)
        with open_text(unit, unwatched) as text:
            text.seek(unit.start)
            ends = (end for end, _ in split_rows(text, unit, unit.start, delimiter, len(names)))
            start = max(islice(ends, first), default=unit.start)
            stop = unit.stop if samples is None else max(islice(ends, samples), default=start)
        taken = (unit.samples or 0) - first if samples is None else samples
        return replace(unit, start=start, stop=stop, first=unit.first + first, samples=taken)

    def may_have_metadata(self, unit: Unit) -> bool:
        """Every other column is metadata, unless the user names some."""
        return unit.samples is not None

    def first_metadata(self, unit: Unit, most: int) -> Iterator[str]:
        """From the first rows."""
        names, delimiter = _header_of(unit)
        choice = _choice(names, unit).metadata_only
        with open_text(unit, unwatched) as text:
            text.seek(unit.start)
            rows = islice(split_rows(text, unit, unit.start, delimiter, len(names)), min(most, unit.samples or 0))
            for sample in _samples(metadata_of(unit), choice, names, [row for _, row in rows]):
                if sample.metadata is not None:
                    yield sample.metadata


def _header_of(unit: Unit) -> tuple[list[str], str]:
    named = tuple(pair for pair in unit.options if pair[0] in (OPTION, QUOTES, NO_HEADER))
    return _header(Unit(kind=unit.kind, source=unit.source, etag=unit.etag, options=named))


@lru_cache(maxsize=8)
def _header(unit: Unit) -> tuple[list[str], str]:
    """Names and delimiter of a file's version; every unit needs them, and few files are open at a time."""
    with open_planned(unit) as (now, text):
        require_same(unit, now.etag, "source_changed")
        names, delimiter, _ = read_header(text, unit)
    return names, delimiter


def _choice(names: list[str], unit: Unit) -> ChosenColumns:
    """The chosen columns; all others become metadata unless the user named some."""
    columns = [Column(name=name, role="text", type="text") for name in names]
    try:
        choice = choose(columns, unit.options, unit.source)
    except SourceError as error:
        if NO_HEADER not in dict(unit.options):
            error.next_step += "; where its first line is no header, add --no-header"
        raise
    if choice.metadata:
        return choice
    rest = tuple(name for name in names if name not in choice.names)
    refuse_duplicates(rest, names, unit.source)
    return replace(choice, metadata=rest)


def _cuts(rows: Iterator[tuple[int, Row]], start: int, most: int, most_bytes: int) -> Iterator[Cut]:
    """Slices of `rows` from `start` on: of `most`, or up to the one that reaches `most_bytes` if that is not 0."""
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
    images = samples.images([None] * len(rows), [_field(by_name, choice.image) for by_name in fields])
    for row, values, image in zip(rows, fields, images, strict=True):
        if isinstance(row, str):
            yield samples.failed("bad_csv", f"the row cannot be split into fields: {row}")
        elif not values:
            yield samples.failed("ragged_row", f"the row has {len(row)} fields, the header has {len(names)}")
        else:
            yield samples.sample(
                choice,
                identity=_field(values, choice.key),
                text=_field(values, choice.text),
                image=image,
                fields={name: _decoded(values[name]) for name in choice.metadata},
            )


def _field(row: dict[str, bytes], name: str) -> bytes | None:
    """The field of a column; None if there is no such column, which is not the one without a name."""
    return row.get(name) if name else None


def _decoded(field: bytes) -> str | SampleError:
    try:
        return decode_text(field)
    except SampleError as error:
        return SampleError("bad_metadata", error.message)
