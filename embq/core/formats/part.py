"""Parts in any format: opens the aligned files of a commit record as one table, and writes new ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import numpy as np
import pyarrow as pa

from embq.core.errors import OutputError
from embq.core.formats.arrow import ArrowPart, unit_of_arrow, write_arrow, write_batches
from embq.core.formats.base import COLUMNS, FORMAT_ERRORS, Draft, PartFile, PartName
from embq.core.formats.hdf5 import Hdf5Part, h5py_module, write_hdf5
from embq.core.formats.hdf5_dataset import join_parts as join_hdf5
from embq.core.formats.npy import NpyPart, write_npy
from embq.core.formats.parquet import ParquetPart, encoding, unit_of_parquet, with_notes, write_rows, write_table
from embq.core.rows.results import unlike
from embq.core.rows.spec import FORMATS
from embq.core.run.commits import CommittedFile
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo
from embq.core.settings import spool_folder
from embq.core.storage.beneath import require_regular
from embq.core.storage.durable import denied
from embq.core.storage.hashing import HashingFile
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place

ID = pa.field("id", pa.int64())

OPENERS: dict[str, Callable[[Path], PartFile]] = {".parquet": ParquetPart, ".h5": Hdf5Part, ".arrow": ArrowPart}
"""Suffix of a file of rows or failures -> its reader."""


class Cursor:
    """The rows of some tables, in order, holding one table at a time. Raises what reading the tables raises."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._table: pa.Table | None = None

    def read(self, count: int) -> pa.Table:
        """The next `count` rows, or what is left of them."""
        pieces: list[pa.Table] = []
        while count > 0:
            if self._table is None or self._table.num_rows == 0:
                self._table = next(self._tables, None)
                if self._table is None:
                    break
            piece = self._table.slice(0, count)
            self._table = self._table.slice(piece.num_rows)
            pieces.append(piece)
            count -= piece.num_rows
        return pa.concat_tables(pieces) if pieces else pa.table({})

    def rest(self) -> int:
        """Number of rows that are left; consumes them."""
        rows: int = 0 if self._table is None else self._table.num_rows
        for table in self._tables:
            rows += table.num_rows
        return rows


class Part:
    """The open files of one part, in the order in which the record names them.

    Rows of a part that a worker has written have no ids in the file, because only their commit gives them: they count
    up from the file's first id.

    Attributes:
        rows: number of rows in each file.
        schema: of the part's tables; its metadata is that of the first file.
    """

    def __init__(self, files: Sequence[tuple[CommittedFile, PartFile]]) -> None:
        self._files = files
        self.rows = [opened.rows for _, opened in files]
        if files[0][0].kind == "vectors":
            raise ValueError("its record names vectors, and no rows beside them")
        first = files[0][1].schema
        fields = {field.name: field for _, opened in files for field in opened.schema}
        notes: dict[bytes, bytes] = first.metadata or {}
        names = json.loads(notes[COLUMNS.encode()]) if COLUMNS.encode() in notes else list(fields)
        self._first_id = files[0][0].first_id if "id" not in names else -1
        if self._first_id >= 0:
            fields, names = {**fields, "id": ID}, ["id", *names]
        self.schema = pa.schema([fields[name] for name in names], metadata=notes)

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `embq.core.formats.base.PartFile`; of the first file. Empty where ids are in none of them."""
        return [] if self._first_id >= 0 else self._files[0][1].ids()

    def tables(
        self, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[pa.Table]:
        """The rows from `start` up to `stop` in order, a bounded number at a time.

        Args:
            columns: the columns to read; None for all.
            stop: None for all rows from `start` on.

        Raises one of `FORMAT_ERRORS` if a file is damaged, or the files are of different lengths.
        """
        names = self.schema.names if columns is None else list(columns)
        if absent := [name for name in names if name not in self.schema.names]:
            raise KeyError(f"no column {', '.join(absent)}")
        read = [self.schema.field(name) for name in names]
        if odd := [f"{field.name} ({field.type})" for field in read if not is_plain(field.type)]:
            raise ValueError(f"embq writes no such columns: {', '.join(odd)[:200]}")
        file_columns = [[name for name in names if name in opened.schema.names] for _, opened in self._files]
        (_, first), *other_files = self._files
        beside = [
            Cursor(opened.tables(mine, start, stop))
            for (_, opened), mine in zip(other_files, file_columns[1:], strict=True)
            if mine
        ]
        next_id = self._first_id + start
        for table in first.tables(file_columns[0], start, stop):
            merged = dict(zip(table.column_names, table.columns, strict=True))
            if self._first_id >= 0:
                merged["id"] = pa.array(np.arange(next_id, next_id + table.num_rows, dtype=np.int64))
                next_id += table.num_rows
            for cursor in beside:
                piece = cursor.read(table.num_rows)
                if piece.num_rows != table.num_rows:
                    raise ValueError("its files do not have the same number of rows")
                merged |= dict(zip(piece.column_names, piece.columns, strict=True))
            schema = pa.schema(read, self.schema.metadata)
            yield pa.Table.from_arrays([merged[name] for name in names], schema=schema)


def is_plain(type_: pa.DataType) -> bool:
    """Whether each row of a column has bytes of its own: not of views, dictionaries, runs and nulls."""
    if pa.types.is_fixed_size_list(type_):
        type_ = type_.value_type
    return bool(pa.types.is_primitive(type_) or pa.types.is_string(type_))


@contextmanager
def opened(root: Place, files: Sequence[CommittedFile]) -> Iterator[Part]:
    """Open the files of one record that are aligned with each other, for the length of the block.

    Raises OutputError if one is missing, has another size than its record says, or cannot be read; also where what
    the block reads of them turns out to be damaged.
    """
    open_files: list[tuple[CommittedFile, PartFile]] = []
    path = root
    copies = ExitStack()
    try:
        for file in files:
            path = root / file.path
            path = file.place(root)
            if isinstance(path, Path):
                require_regular(path)
            if (size := path.stat().st_size) != file.bytes:
                raise ValueError(f"it has {size} bytes, its record says {file.bytes}")
            open_files.append((file, _open(path, file, copies)))
        yield Part(open_files)
    except FileNotFoundError as error:
        raise OutputError(
            f"{path} is named by a commit record and is not there",
            next_step="restore it from a backup; `embq verify` lists everything that is missing",
            code="part_missing",
        ) from error
    except FORMAT_ERRORS as error:
        raise denied(error, path) or OutputError(
            f"{path} cannot be read: {error}", next_step="restore it from a backup", code="part_damaged"
        ) from error
    finally:
        for _, part_file in open_files:
            part_file.close()
        copies.close()


def _open(path: Place, file: CommittedFile, copies: ExitStack) -> PartFile:
    """Open a file. Parquet on an object store is read in ranges; other files are copied to this machine first."""
    if isinstance(path, ObjectPath) and path.suffix == ".parquet":
        return ParquetPart(path)
    if isinstance(path, ObjectPath):
        folder = copies.enter_context(TemporaryDirectory(prefix="embq-part-", dir=spool_folder()))
        path.fetch(local := Path(folder) / path.name)
        path = local
    return NpyPart(path, file.column) if file.kind == "vectors" else OPENERS[path.suffix](path)


def check_writable(info: RunInfo) -> None:
    """Raise OutputError if this embq cannot write the format of a run, ConfigError if its library is missing."""
    if info.format not in FORMATS:
        raise _unknown(info.format)
    if info.format == "hdf5":
        h5py_module()


def write_part(info: RunInfo, table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
    """Write rows as the files of one part, closed and hashed but not synced, in the order of publication.

    Args:
        info: the run, or an export with the format and the rows that were asked for.
        table: the rows, at least one, in pieces of any size; columns are id, ordinal, key, fixed-size lists for the
            vectors, and what else the rows of a result have.
        notes: metadata of the files, such as the id of the run and its fingerprint.

    OutputError leaves nothing behind; it is also raised where this embq cannot write the format.
    """
    match info.format:
        case "parquet":
            return write_rows(table, name, notes)
        case "hdf5":
            return write_hdf5(table, name, notes, info.rows)
        case "npy":
            return write_npy(table, name, notes, info.model)
        case "arrow":
            return write_arrow(table, name, notes)
    raise _unknown(info.format)


SAMPLE_COLUMNS = ("ordinal", "chunk", "chunks")
"""Columns that tell which sample, and which piece of it, a row is of."""

UNIT_FORMATS = ("parquet", "arrow")
"""Formats of which a worker may write the part of a unit."""


def write_unit(format_: str, table: pa.Table, file: HashingFile, notes: Mapping[str, str]) -> None:
    """Write the rows of one unit as a part in one of `UNIT_FORMATS`, without ids; see `write_part`."""
    noted = with_notes(table, notes)
    if format_ == "parquet":
        write_table(noted, file, encoding(noted.schema))
    else:
        write_batches(noted, file)


def read_unit(format_: str, file: IO[bytes], expected: pa.Schema, *, most_rows: int) -> tuple[pa.Schema, pa.Table]:
    """The schema of a part of one unit, and the columns of it that tell which samples its rows are.

    Args:
        file: an open part in one of `UNIT_FORMATS`, as `write_unit` makes it.
        expected: its schema; lengths of vectors are not compared.
        most_rows: columns are not read if it has more.

    Raises one of `FORMAT_ERRORS` if the file is damaged, has other columns, or more rows.
    """
    names = [name for name in SAMPLE_COLUMNS if name in expected.names]
    schema, table = (unit_of_parquet if format_ == "parquet" else unit_of_arrow)(file, names, most_rows)
    if differing := unlike(schema.remove_metadata(), expected):
        raise ValueError(f"its columns are not those of the run: {', '.join(differing)[:200]}")
    table.validate(full=True)
    if any(table[name].null_count for name in names):
        raise ValueError("it has rows without an ordinal")
    return schema, table


def join_parts(info: RunInfo, layout: Layout, files: Iterable[CommittedFile]) -> None:
    """Bring the file that joins the parts for readers up to date, durably, where the format has one: `dataset.h5`.

    Args:
        files: the committed files of rows, in the order of their records.

    Called before a log is closed, and if a closed one is opened. Raises OutputError.
    """
    if info.format == "hdf5":
        join_hdf5(layout, files)


def _unknown(format_: str) -> OutputError:
    return OutputError(
        f"the run's format is {format_!r}, which this embq cannot write",
        next_step="use the embq version that made the run",
    )
