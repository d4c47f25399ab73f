"""Tables that pyarrow reads: planning and reading that the kinds "parquet" and "arrow" share."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from embq.core.errors import InputError, SourceError
from embq.core.service.log import Events
from embq.core.units import Sample, Unit
from embq.sources.access.cursors import LastCursor
from embq.sources.access.files import beyond_memory, beyond_units, open_unchanged, source_errors, stat_file
from embq.sources.columns import Column, choose, fields_of, left_out, shown
from embq.sources.interface import FILE_UNITS_MAX, Fields, Moved, Source, unwatched
from embq.sources.reader_options import ReadOptions
from embq.sources.reader_process.client import inspect
from embq.sources.rows import RowSamples, metadata_of
from embq.sources.unusable import COLUMN_CODES, failing_unit, readable_now, refuse_unreadable

if TYPE_CHECKING:
    import pyarrow as pa

log = Events("sources")


class Table(Protocol):
    """A table file that is open.

    Attributes:
        rows: their exact number.
        groups: (rows, bytes) of each piece in which they stand, in order; the bytes tell long rows from short ones.
        columns: all of them.
    """

    rows: int
    groups: list[tuple[int, int]]
    columns: list[Column]

    def batches(self, row: int, names: list[str]) -> tuple[int, Iterator[pa.RecordBatch]]:
        """The batches from the one that holds `row` on, with at least the columns `names`, and the first one's row."""
        ...


OpenTable = Callable[[io.BufferedIOBase, str], Table]
"""A table from its open file and its path; raises what pyarrow raises, or SourceError."""


class TableSource(Source):
    """Tables in units of at most `unit_samples` rows.

    The key is the id column's value, else "<file name>:<row from 1>". An id that its unit has seen before makes the
    later row a `duplicate_key`. The path of an image is relative to the table's folder and may not leave it.
    """

    modalities: tuple[str, ...] = ("image", "text")

    def __init__(self, kind: str, open_table: OpenTable) -> None:
        self.kind = kind
        self._open = open_table

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """The modalities that the samples of this table can have, from its schema alone.

        Raises SourceError if the columns cannot be chosen, or the file is damaged or cannot be read.
        """
        unit = self._unit_of_file(path, options)
        columns = _columns(inspect(unit))
        choice = choose(columns, unit.options, path)
        if unused := left_out(columns, unit.options, choice):
            log.warning("columns_left_out", path=path, columns=shown(unused))
        return choice.modalities

    def fields(self, path: str, options: ReadOptions) -> Fields:
        """The columns of the schema."""
        unit = self._unit_of_file(path, options)
        columns = _columns(inspect(unit))
        return fields_of(choose(columns, unit.options, path), (column.name for column in columns), unit.options)

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units from the table's own counts; no row is read.

        A table that is damaged, or lacks a column, still has its units: they fail, and the rest of the run goes on.
        Raises InputError `empty_input` if it has no row.
        """
        file_unit = self._unit_of_file(path, options)
        rows, groups = 0, []
        try:
            summary = inspect(file_unit)
            if summary["rows"] > FILE_UNITS_MAX * options.unit_samples:
                raise beyond_units(path)
            rows, groups = summary["rows"], summary["groups"]
            choose(_columns(summary), file_unit.options, path)
        except SourceError as error:
            failing = failing_unit(file_unit, error)
            if error.code not in COLUMN_CODES:
                yield failing
                return
        if not rows:
            raise InputError(f"{path}: has no row", code="empty_input", next_step="leave it out")
        sizes = _sizes(groups, options.unit_samples)
        for first in range(0, rows, options.unit_samples):
            samples = min(options.unit_samples, rows - first)
            yield replace(file_unit, first=first, samples=samples, size=next(sizes, 0))

    def inspect(self, unit: Unit) -> dict[str, Any]:
        """Rows, groups and columns of a table as JSON-ready values; called in the reader process."""
        with self._opened(unit, unwatched) as table:
            columns = [[column.name, column.role, column.type, column.inner] for column in table.columns]
            return {"rows": table.rows, "groups": table.groups, "columns": columns}

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """One sample per row."""
        refuse_unreadable(unit)
        if unit.samples is None:
            with self._opened(unit, on_progress):
                pass
            raise readable_now(unit)
        samples = RowSamples(unit, on_progress)
        with _LAST.at(unit, unit.first, on_progress, lambda: _TableCursor(unit, self._opened)) as cursor:
            yield from cursor.samples(unit.first, unit.samples, samples)

    def unit_of_sample(self, unit: Unit, ordinal: int) -> Unit:
        """The unit of one row."""
        return self.part(unit, ordinal, 1)

    def part(self, unit: Unit, first: int, samples: int | None = None) -> Unit:
        """The unit of some of its rows."""
        rows = unit.samples or 0
        taken = rows - first if samples is None else samples
        return replace(unit, first=unit.first + first, samples=taken, size=unit.size * taken // max(1, rows))

    def may_have_metadata(self, unit: Unit) -> bool:
        """Columns become metadata where the user names some."""
        return unit.samples is not None and "metadata_columns" in dict(unit.options)

    def first_metadata(self, unit: Unit, most: int) -> Iterator[str]:
        """From the first rows; no other columns are read."""
        cursor = _TableCursor(unit, self._opened, metadata_only=True)
        with source_errors(unit.source), closing(cursor):
            count = min(most, unit.samples or 0) if cursor.choice.metadata else 0
            for sample in cursor.samples(unit.first, count, metadata_of(unit)):
                if sample.metadata is not None:
                    yield sample.metadata

    def _unit_of_file(self, path: str, options: ReadOptions) -> Unit:
        return Unit(kind=self.kind, source=path, etag=stat_file(path).version, options=options.columns)

    @contextmanager
    def _opened(self, unit: Unit, on_progress: Moved) -> Iterator[Table]:
        with open_unchanged(unit, "source_changed", on_progress) as file:
            with table_errors(unit.source):
                table = self._open(file, unit.source)
            yield table


def _sizes(groups: Sequence[tuple[int, int]], most: int) -> Iterator[int]:
    """Approximate bytes of each `most` rows in turn; the rows of a group are taken to be equally long."""
    size, remaining = 0.0, most
    for rows, group_bytes in groups:
        # A damaged file may claim more than a manifest can hold.
        of_row = min(max(0, group_bytes), 1 << 50) / max(1, rows)
        while rows >= remaining:
            yield round(size + remaining * of_row)
            rows, size, remaining = rows - remaining, 0.0, most
        size, remaining = size + rows * of_row, remaining - rows
    yield round(size)


def _columns(summary: dict[str, Any]) -> list[Column]:
    return [Column(name=name, role=role, type=type_, inner=inner) for name, role, type_, inner in summary["columns"]]


class _TableCursor:
    """A place in a table, between two rows."""

    def __init__(self, unit: Unit, opened: Callable[[Unit, Moved], Any], *, metadata_only: bool = False) -> None:
        self.on_progress: Moved = unwatched
        self._path = unit.source
        with ExitStack() as stack:
            table: Table = stack.enter_context(opened(unit, lambda: self.on_progress()))
            choice = choose(table.columns, unit.options, unit.source)
            self.choice = choice.metadata_only if metadata_only else choice
            with table_errors(self._path):
                self.position, self._batches = table.batches(unit.first, self.choice.names)
            self._stack = stack.pop_all()
        self._rest: pa.RecordBatch | None = None

    def samples(self, first: int, rows: int, samples: RowSamples) -> Iterator[Sample]:
        """The samples of the rows from `first` on; raises as `batches`, also if a value cannot be converted."""
        from embq.sources.formats.arrow_values import samples_of, values_of

        for batch in self.batches(first, rows):
            with table_errors(self._path):
                values = values_of(batch, self.choice)
            yield from samples_of(values, self.choice, samples)

    def batches(self, first: int, rows: int) -> Iterator[pa.RecordBatch]:
        """The rows from `first` on in pieces; SourceError `table_damaged` if the table has fewer."""
        stop = first + rows
        while self.position < stop:
            batch = self._rest if self._rest is not None else self._next()
            skipped = min(batch.num_rows, max(0, first - self.position))
            taken = min(batch.num_rows, stop - self.position) - skipped
            self._rest = batch.slice(skipped + taken) if skipped + taken < batch.num_rows else None
            self.position += skipped + taken
            if taken:
                yield batch.slice(skipped, taken)

    def close(self) -> None:
        """Close the file."""
        self._rest = None
        self._stack.close()

    def _next(self) -> pa.RecordBatch:
        with table_errors(self._path):
            batch = next(self._batches, None)
        if batch is None:
            raise SourceError(f"{self._path}: ends after {self.position} rows", code="table_damaged")
        return batch


_LAST: LastCursor[_TableCursor] = LastCursor()


@contextmanager
def table_errors(path: str) -> Iterator[None]:
    """Translate errors of a library about the content of a file into SourceError `table_damaged`, or `too_large` where
    it asks for more memory than there is.

    Errors of the storage have a number, or a class of their own, and pass.
    """
    import pyarrow as pa

    try:
        yield
    # A size that is damaged may be negative (SystemError), or ask for more memory than there is.
    except MemoryError as error:
        raise beyond_memory(path) from error
    except (pa.ArrowException, ValueError, OverflowError, OSError, SystemError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise
        what = " ".join(str(error).split())[:300]
        if isinstance(error, pa.ArrowNotImplementedError):  # of a schema alone, whatever columns are used
            raise SourceError(
                f"{path}: pyarrow {pa.__version__} does not read it: {what}",
                code="table_damaged",
                next_step="cast or drop the column of that type, and write the file again",
            ) from error
        raise SourceError(
            f"{path}: cannot be read as what its name says: {what}",
            code="table_damaged",
            next_step="copy or write the file again",
        ) from error
