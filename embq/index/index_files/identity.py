"""Identity files: key, caption, source and metadata of each row, memory-mapped and found by id.

An Arrow IPC file, not compressed, in which all batches but the last have `BATCH_ROWS` rows. Texts that many rows share
(source, unit_id) are a dictionary, which grows from batch to batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.core.errors import InputError
from embq.core.formats.part import Cursor, is_plain
from embq.core.rows.arrow_messages import listed_blocks, refuse_compressed
from embq.core.storage.durable import denied
from embq.index.collection.parts import IDENTITY, NAMES
from embq.index.index_files.files import disk_error

BATCH_ROWS = 65_536
"""Rows of a batch. A constant of the format: a row is found by it."""


MOST_NAME_BYTES = 1 << 16
"""Limit of a text that many rows share: the path or URL of an input has at most 8,192 characters."""

MOST_TEXT_BYTES = 1 << 28
"""Limit of the shared texts of the rows that are given at once, each with its own copy."""

SAMPLED_BATCHES = 500
"""Batches from which a sample is taken: each is a seek in its file."""


@dataclass(slots=True)
class _Names:
    """A dictionary that only grows."""

    codes: dict[str, int] = field(default_factory=dict)

    def encode(self, column: pa.ChunkedArray) -> pa.DictionaryArray:
        """The column's texts by the dictionary, which has all of them then."""
        pieces = []
        for chunk in column.chunks:
            texts = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
            codes = [self.codes.setdefault(text, len(self.codes)) for text in texts.dictionary.to_pylist()]
            pieces.append(pa.array(codes, pa.int32()).take(texts.indices))
        indices = pa.concat_arrays(pieces) if pieces else pa.array([], pa.int32())
        return pa.DictionaryArray.from_arrays(indices, pa.array(list(self.codes), pa.string()))


def write_identity(tables: Iterable[pa.Table], path: Path) -> None:
    """Write an identity file from the tables of `Collection.read_identity`, holding one batch at a time.

    The caller returns a temporary name, and makes the file durable. OutputError if it cannot be written.
    """
    options = pa.ipc.IpcWriteOptions(compression=None, emit_dictionary_deltas=True)
    names: dict[str, _Names] = {}
    schema: pa.Schema | None = None
    writer: pa.ipc.RecordBatchFileWriter | None = None
    try:
        with pa.OSFile(str(path), "wb") as sink:
            cursor = Cursor(iter(tables))
            while (table := cursor.read(BATCH_ROWS)).num_rows:
                if writer is None:
                    schema = table.schema.remove_metadata()
                    names = {column.name: _Names() for column in schema if pa.types.is_dictionary(column.type)}
                    writer = pa.ipc.new_file(sink, schema, options=options)
                columns = [
                    names[name].encode(column) if name in names else _combined(column)
                    for name, column in zip(table.column_names, table.columns, strict=True)
                ]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            if writer is None:
                writer = pa.ipc.new_file(sink, pa.schema(IDENTITY), options=options)
            writer.close()
    except OSError as error:
        raise disk_error(error, path) from error


def _combined(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)


class _File:
    """One identity file. Batches are opened when they are first needed, and stay open: they are only mapped."""

    def __init__(self, path: Path, first_id: int, rows: int) -> None:
        self.path, self.first_id, self.rows = path, first_id, rows
        try:
            self._file = pa.memory_map(str(path))
            dictionaries, self._blocks, _ = listed_blocks(self._file)
            refuse_compressed(self._file, dictionaries)
            self._reader = pa.ipc.open_file(self._file)
            self.schema: pa.Schema = self._reader.schema
            self.batches = self._reader.num_record_batches
            if odd := [field.name for field in self.schema if field.type != NAMES and not is_plain(field.type)]:
                raise ValueError(f"embq writes no such columns: {', '.join(odd)[:200]}")
            if len(set(self.schema.names)) < len(self.schema):
                raise ValueError("two columns have one name")
        except (OSError, ValueError, pa.ArrowException) as error:
            raise denied(error, path) or _damaged(path, error) from error
        if self.batches != -(-rows // BATCH_ROWS):
            raise _damaged(path, f"it has {self.batches} batches, which do not hold {rows:,} rows")
        if 8 * rows > self._file.size():  # without their ids; batches that share their bytes would be of any number
            raise _damaged(path, f"it has {self._file.size():,} bytes, too few for {rows:,} rows")
        self._open: dict[int, pa.RecordBatch] = {}
        self._validated: set[tuple[int, str]] = set()
        self._names: dict[str, int] = {}

    def batch(self, number: int) -> pa.RecordBatch:
        """A batch; InputError if it cannot be read."""
        if number not in self._open:
            try:
                refuse_compressed(self._file, [self._blocks[number]])
                batch = self._reader.get_batch(number)
                batch.validate()
                for column, field in zip(batch.columns, self.schema, strict=True):
                    if field.type == NAMES and self._names.get(field.name) != len(column.dictionary):
                        self._names[field.name] = _checked_names(column.dictionary)
            except (OSError, ValueError, pa.ArrowException) as error:
                raise denied(error, self.path) or _damaged(self.path, error) from error
            if batch.num_rows != min(BATCH_ROWS, self.rows - number * BATCH_ROWS):
                raise _damaged(self.path, f"batch {number} has {batch.num_rows} rows")
            self._open[number] = batch
        return self._open[number]

    def column(self, number: int, name: str) -> pa.Array:
        """A column of a batch, all of whose values may be read: the first call checks them."""
        column = self.batch(number).column(name)
        if (number, name) not in self._validated:
            try:
                column.validate(full=True)
            except pa.ArrowException as error:
                raise denied(error, self.path) or _damaged(self.path, error) from error
            self._validated.add((number, name))
        return column


def _checked_names(dictionary: pa.Array) -> int:
    """The number of texts of a dictionary; ValueError or ArrowException if they cannot be read or one is too long."""
    dictionary.validate(full=True)
    if (longest := pc.max(pc.binary_length(dictionary)).as_py() or 0) > MOST_NAME_BYTES:
        raise ValueError(f"a text of {longest:,} bytes is shared by rows, at most {MOST_NAME_BYTES:,} are read")
    return len(dictionary)


class Identity:
    """Identity of the rows of an index, from the files that hold it."""

    def __init__(self, files: Sequence[_File]) -> None:
        self._files = [file for file in files if file.rows]
        self._firsts = [file.first_id for file in self._files]
        schema = self._files[0].schema if self._files else pa.schema(IDENTITY)
        self.schema = pa.schema([column.with_type(_plain(column.type)) for column in schema])
        """Schema of the tables that `rows` gives: dictionaries are plain texts there."""

    @classmethod
    def open(cls, files: Sequence[tuple[Path, int, int]]) -> Identity:
        """Open (file, first id, rows) of each file, in order of their ids.

        Raises InputError `index_damaged` if one cannot be read, or holds other columns than the first.
        """
        opened = [_File(path, first_id, rows) for path, first_id, rows in files]
        for file in opened[1:]:
            if file.schema != opened[0].schema:
                raise _damaged(file.path, f"its columns are not those of {opened[0].path}")
        return cls(opened)

    def rows(self, ids: np.ndarray, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows with these ids, in the order of the ids; -1, which stands for none, is passed over.

        Args:
            ids: integers of any shape; ids may repeat.
            columns: None for all.

        Raises InputError `no_such_id` if there is no such row, `index_damaged` if a file cannot be read.
        """
        names = list(self.schema.names if columns is None else columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        slices: list[list[pa.Array]] = [[] for _ in names]
        for row in np.asarray(ids).ravel().tolist():
            if row < 0:
                continue
            file, batch, at = self._find(row)
            for number, name in enumerate(names):
                piece = batch.column(name).slice(at, 1)
                if not pa.types.is_dictionary(piece.type):
                    try:
                        piece.validate(full=True)
                    except pa.ArrowException as error:
                        raise _damaged(file.path, error) from error
                slices[number].append(piece)
        return pa.Table.from_arrays(
            [_joined(pieces, column.type) for pieces, column in zip(slices, schema, strict=True)], schema=schema
        )

    def ids_of(self, keys: Iterable[str]) -> dict[str, list[int]]:
        """Key -> the ids of all rows that have it, ascending; [] if there is none. All keys are looked at."""
        by_key: dict[str, list[int]] = {key: [] for key in keys}
        key_array = pa.array(list(by_key), pa.string())
        for file in self._files:
            for number in range(file.batches):
                batch = file.batch(number)
                for at in np.flatnonzero(
                    pc.is_in(file.column(number, "key"), key_array).to_numpy(zero_copy_only=False)
                ):
                    by_key[batch.column("key")[int(at)].as_py()].append(batch.column("id")[int(at)].as_py())
        return by_key

    def tables(self) -> Iterator[pa.Table]:
        """All rows in the order of their ids, `BATCH_ROWS` or fewer at a time.

        Raises InputError `index_damaged` as `scan`.
        """
        for file in self._files:
            for number in range(file.batches):
                table = pa.table({name: file.column(number, name) for name in file.schema.names})
                for piece in _pieces(table):
                    yield piece.cast(self.schema)

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, list[pa.Array]]]:
        """(id of the first row, the columns) of each batch, in the order of ids; nothing is copied.

        Raises InputError `index_damaged` if a file holds no such values.
        """
        for file in self._files:
            for number in range(file.batches):
                yield file.first_id + number * BATCH_ROWS, [file.column(number, name) for name in columns]

    def sample(self, rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(id of the first row, rows) from everywhere: about `rows` in all, all if there are no more.

        Raises InputError `index_damaged` as `scan`.
        """
        batches = [(file, number) for file in self._files for number in range(file.batches)]
        batches = batches[:: max(1, -(-len(batches) // SAMPLED_BATCHES))]
        total = sum(file.batch(number).num_rows for file, number in batches)
        for file, number in batches:
            batch = file.batch(number)
            piece = batch.slice(0, -(-batch.num_rows * min(rows, total) // total))
            try:
                piece.validate(full=True)
            except pa.ArrowException as error:
                raise _damaged(file.path, error) from error
            yield file.first_id + number * BATCH_ROWS, piece

    def _find(self, row: int) -> tuple[_File, pa.RecordBatch, int]:
        number = bisect_right(self._firsts, row) - 1
        file = self._files[number] if number >= 0 else None
        if file is None or row >= file.first_id + file.rows:
            raise InputError(f"there is no row with id {row}", next_step="ids begin with 0", code="no_such_id")
        batch, at = divmod(row - file.first_id, BATCH_ROWS)
        return file, file.batch(batch), at


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    """Slices of a table, with at most `MOST_TEXT_BYTES` of shared texts if each row has its own copy."""
    shared = [column.chunk(0) for column in table.columns if pa.types.is_dictionary(column.type)]
    lengths = [pc.binary_length(column.dictionary).take(column.indices).fill_null(0) for column in shared]
    own_bytes = (length.to_numpy(zero_copy_only=False).astype(np.int64) for length in lengths)
    ends = np.cumsum(sum(own_bytes, np.zeros(table.num_rows, np.int64)))
    start = 0
    while start < table.num_rows:
        most = MOST_TEXT_BYTES + (ends[start - 1] if start else 0)
        stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
        yield table.slice(start, stop - start)
        start = stop


def _joined(pieces: Sequence[pa.Array], type_: pa.DataType) -> pa.Array:
    if not pieces:
        return pa.array([], type_)
    if pa.types.is_dictionary(pieces[0].type):
        return pa.array([piece[0].as_py() for piece in pieces], type_)
    return pa.concat_arrays(pieces)


def _plain(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _damaged(path: Path, why: object) -> InputError:
    return InputError(
        f"{path} cannot be read: {why}",
        next_step="build the index anew: what is left of it is used",
        code="index_damaged",
    )
