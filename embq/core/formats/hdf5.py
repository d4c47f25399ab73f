"""Parts as HDF5 files: a dataset for each column, and datasets for nulls and NUL characters, which HDF5 cannot store.

/id /ordinal /key /embedding /caption /unit_id ...   columns, first dimension = rows; vectors have two dimensions
/metadata/NAME        columns of metadata
/metadata_json        the JSON text of what is in none of them
/valid/PATH           where a column has nulls: False in their rows, in which the column itself holds "", 0 or NaN
/nul/PATH             where strings have NUL characters, which HDF5 cannot hold: (row, position) of each; the column
                      holds U+FFFD there
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from embq.core.extras import missing
from embq.core.formats.base import COLUMNS, READ_ROWS, Draft, PartName, slices, vectors, whole_or_none
from embq.core.formats.parquet import LARGE_BYTES
from embq.core.rows.spec import RowSpec
from embq.core.run.commits import CommittedFile
from embq.core.storage.beneath import require_regular
from embq.core.storage.durable import begin_sync, file_sha256, reserve, trim

VALID, NUL = "valid", "nul"

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

LIBVER = ("v110", "v110")
"""Every HDF5 from 1.10 on reads it; earlier ones know no virtual datasets."""

CHUNK_BYTES = 512 * 1024
"""Size of a chunk of vectors: a random row costs one such read, and a whole file is read at the disk's speed."""

CHUNK_ROWS = 16_384
"""Rows of a chunk of every other column, which are converted at once."""


TEXT_ROWS = 256
"""Texts of a large file that are read at once: 2 us for each row, and 1 us for 16,384 at once."""


def h5py_module() -> ModuleType:
    """h5py; ConfigError if it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise missing("h5py", "HDF5 files are read and written with h5py, which is not installed") from error
    module: ModuleType = h5py
    return module


@dataclass(frozen=True, slots=True)
class H5Column:
    """A column of a row and the path of its dataset."""

    name: str
    path: str
    nullable: bool


def columns_of(file: Any) -> list[H5Column]:
    """The columns of an open file, from its attribute."""
    return [H5Column(str(name), str(path), bool(null)) for name, path, null in json.loads(file.attrs[COLUMNS])]


def read_rows(dataset: Any, start: int, stop: int) -> np.ndarray:
    """Rows of a dataset; ValueError if their texts have more bytes than the file: many rows then share one."""
    if dataset.dtype.kind != "O":
        return np.asarray(dataset[start:stop])
    most = dataset.file.id.get_filesize()
    # Lengths show only when texts are read, and no text is longer than the file.
    at_once = max(TEXT_ROWS, LARGE_BYTES // 16 // most)
    pieces, text_bytes = [], 0
    for first in range(start, stop, at_once):
        pieces.append(dataset[first : min(first + at_once, stop)])
        text_bytes += sum(map(len, pieces[-1]))
        if text_bytes > most:
            raise ValueError(f"rows of {dataset.name} share their texts, and embq writes no such file")
    return np.concatenate(pieces)


def opened(path: Path) -> Any:
    """An open HDF5 file; OSError if it cannot be read, or is no regular file."""
    return h5py_module().File(require_regular(path), "r")


def linked_dataset(file: Any, path: str) -> Any:
    """The dataset at a path, not through a soft or external link, which may lead to another file; None if there is
    none."""
    h5py, node = h5py_module(), file
    for part in path.strip("/").split("/"):
        if not isinstance(node, h5py.Group) or not isinstance(node.get(part, getlink=True), h5py.HardLink):
            return None
        node = node[part]
    return node if isinstance(node, h5py.Dataset) else None


def own_dataset(file: Any, path: str) -> Any:
    """A dataset; ValueError if there is none, it is in another file by a link or its storage, or a row of it takes
    `LARGE_BYTES`."""
    dataset = linked_dataset(file, path)
    if dataset is None:
        raise ValueError(f"{path} is no dataset of the file itself")
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{path} is stored in another file")
    # A chunk is unpacked as a whole, and rows that were never written still take their room.
    at_once = max(READ_ROWS if dataset.ndim == 1 else math.prod(dataset.shape[1:]), math.prod(dataset.chunks or ()))
    if dataset.dtype.itemsize * at_once > LARGE_BYTES:
        raise ValueError(f"{path} takes more than {LARGE_BYTES} bytes to read a row")
    return dataset


def rows_at_once(dataset: Any) -> int:
    """Rows of a dataset of vectors to read at a time."""
    return min(READ_ROWS, max(1, LARGE_BYTES // max(1, int(dataset.dtype.itemsize * dataset.shape[1]))))


class Hdf5Part:
    """See `embq.core.formats.base.PartFile`; tables have at most `READ_ROWS` rows."""

    def __init__(self, path: Path) -> None:
        self._h5py = h5py_module()
        self._file = opened(path)
        try:
            self._columns = {column.name: column for column in columns_of(self._file)}
            lengths = {len(self._dataset(column.path)) for column in self._columns.values()}
            if len(lengths) != 1:
                raise ValueError(f"its datasets have different lengths: {sorted(lengths)}")
            (self.rows,) = lengths
            attributes = self._file.attrs
            # A list may be one text many times.
            notes = {
                key: str(attributes[key]) for key in attributes if key != COLUMNS and not attributes.get_id(key).shape
            }
            self.schema = pa.schema([self._field(column) for column in self._columns.values()], notes)
            self._nul = {name: self._nul_of(column) for name, column in self._columns.items()}
        except BaseException:
            self.close()
            raise

    def _dataset(self, path: str) -> Any:
        return own_dataset(self._file, path)

    def _field(self, column: H5Column) -> pa.Field:
        dataset = self._dataset(column.path)
        if self._h5py.check_string_dtype(dataset.dtype) is not None:
            type_ = pa.string()
        else:
            type_ = pa.from_numpy_dtype(dataset.dtype)
        if dataset.ndim == 2:
            type_ = pa.list_(type_, dataset.shape[1])
        return pa.field(column.name, type_, nullable=column.nullable)

    def _nul_of(self, column: H5Column) -> np.ndarray | None:
        path = f"{NUL}/{column.path}"
        if linked_dataset(self._file, path) is None:
            return None
        if (dataset := self._dataset(path)).nbytes > LARGE_BYTES:
            raise ValueError(f"{path} takes more than {LARGE_BYTES} bytes")
        return np.asarray(dataset[:])

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `embq.core.formats.base.PartFile`."""
        schema = pa.schema([self.schema.field(name) for name in columns], self.schema.metadata)
        end = self.rows if stop is None else min(stop, self.rows)
        vectors = [array for array in (self._dataset(self._columns[name].path) for name in columns) if array.ndim == 2]
        at_once = min(map(rows_at_once, vectors), default=READ_ROWS)
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            yield pa.Table.from_arrays([self._read(field, first, last) for field in schema], schema=schema)

    def _read(self, field: pa.Field, start: int, stop: int) -> pa.Array:
        column = self._columns[field.name]
        values = read_rows(self._dataset(column.path), start, stop)
        if pa.types.is_fixed_size_list(field.type):
            flat = pa.array(values.reshape(-1), field.type.value_type)
            return pa.FixedSizeListArray.from_arrays(flat, type=field.type)
        valid_path = f"{VALID}/{column.path}"
        null = None if linked_dataset(self._file, valid_path) is None else ~self._dataset(valid_path)[start:stop]
        if not pa.types.is_string(field.type):
            return pa.array(values, field.type, mask=null)
        strings = pa.array(values, pa.binary(), mask=null).cast(pa.string())
        nul = self._nul[field.name]
        return strings if nul is None else _with_nul(strings, nul, start)

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `embq.core.formats.base.PartFile`; the first and the last id."""
        ids = self._dataset("id")
        return [(self.rows, (int(ids[0]), int(ids[-1])))] if self.rows else []

    def close(self) -> None:
        """See `embq.core.formats.base.PartFile`."""
        self._file.close()


def _with_nul(strings: pa.Array, nul: np.ndarray, start: int) -> pa.Array:
    """Put the NUL characters back into the strings of rows from `start` on."""
    positions: dict[int, list[int]] = {}
    for row, position in nul:
        if start <= row < start + len(strings):
            positions.setdefault(int(row) - start, []).append(int(position))
    if not positions:
        return strings
    texts = strings.to_pylist()
    for row, places in positions.items():
        characters = list(texts[row])
        for place in places:
            characters[place] = "\0"
        texts[row] = "".join(characters)
    return pa.array(texts, pa.string())


def write_hdf5(table: pa.Table, name: PartName, notes: Mapping[str, str], rows: RowSpec) -> list[Draft]:
    """Write rows as `parts/part-N.h5`; see `embq.core.formats.part.write_part`.

    The library crashes its process where a write fails in mid-file, so that room is set aside before anything is
    written. Vectors and strings are not compressed: the former do not shrink, and of the latter filters see only
    references. The ids of units, which repeat, have a fixed length and are.

    Args:
        rows: what a row holds; its columns stand below `/metadata`.
    """
    metadata = {column.name for column in rows.columns}
    temporary, path = name.unfinished("rows"), f"parts/part-{name.number:08d}.h5"
    columns = [H5Column(field.name, _dataset_path(field.name, metadata), field.nullable) for field in table.schema]
    with whole_or_none([temporary], name.layout.root / path):
        with h5py_module().File(temporary, "w", libver=LIBVER) as file:
            reserve(temporary, _upper_bound(table))
            for note, value in {**notes, COLUMNS: described(columns)}.items():
                file.attrs[note] = value
            for column in columns:
                _write_column(file, column, table.select([column.name]))
        trim(temporary)
        with open(temporary, "rb") as written_file:
            begin_sync(written_file.fileno())
        digest = file_sha256(temporary)
    written = CommittedFile(
        path=path,
        kind="rows",
        rows=table.num_rows,
        bytes=temporary.stat().st_size,
        sha256=digest,
        first_id=name.first_id,
    )
    return [Draft(temporary=temporary, file=written)]


def _dataset_path(column: str, metadata: Container[str]) -> str:
    if column in metadata:
        return f"metadata/{column}"  # a name that HDF5 takes, see `embq.core.rows.metadata.column_name`
    return "metadata_json" if column == "metadata" else column


def _write_column(file: Any, column: H5Column, table: pa.Table) -> None:
    """Write one column; OSError."""
    type_ = table.schema.field(column.name).type
    if pa.types.is_fixed_size_list(type_):
        _write_vectors(file, column, table)
        return
    dataset = _new_dataset(file, column, table)
    nul: list[tuple[int, int]] = []
    for start, piece in _numbered(slices(table, CHUNK_ROWS)):
        array = pa.concat_arrays(piece[column.name].chunks)
        if array.null_count:
            _write_nulls(file, column, table.num_rows, start, array)
        if column.name == "unit_id":
            values = _repeated(array, dataset.dtype)
        elif pa.types.is_string(type_):
            array, positions = without_nul(array.fill_null(""), start)
            nul += positions
            values = array.to_numpy(zero_copy_only=False)
        else:
            values = array.fill_null(np.zeros((), dataset.dtype).item()).to_numpy(zero_copy_only=False)
        dataset[start : start + len(array)] = values
    if nul:
        file.create_dataset(f"{NUL}/{column.path}", data=np.array(nul, np.int64))


def _new_dataset(file: Any, column: H5Column, table: pa.Table) -> Any:
    """A new dataset for a column that holds no vectors."""
    h5py = h5py_module()
    rows, type_ = table.num_rows, table.schema.field(column.name).type
    shape: dict[str, Any] = {"shape": (rows,), "chunks": (min(rows, CHUNK_ROWS),)}
    if column.name == "unit_id":
        import pyarrow.compute as pc

        longest = pc.max(pc.binary_length(table[column.name])).as_py() or 1
        dtype = h5py.string_dtype("utf-8", longest)
        return file.create_dataset(column.path, dtype=dtype, compression="gzip", compression_opts=1, **shape)
    dtype = h5py.string_dtype() if pa.types.is_string(type_) else np.dtype(type_.to_pandas_dtype())
    return file.create_dataset(column.path, dtype=dtype, **shape)


def described(columns: Sequence[H5Column]) -> str:
    """Value of the attribute that maps columns to datasets."""
    return json.dumps([[column.name, column.path, column.nullable] for column in columns])


def without_nul(strings: pa.Array, start: int) -> tuple[pa.Array, list[tuple[int, int]]]:
    """Strings with U+FFFD for each NUL character, and (row, position) of each; the first string is row `start`."""
    import pyarrow.compute as pc

    with_nul = pc.match_substring(strings, "\0")
    if not pc.any(with_nul).as_py():
        return strings, []
    texts = strings.to_pylist()
    positions = [
        (start + row, position)
        for row in np.flatnonzero(with_nul.to_numpy(zero_copy_only=False)).tolist()
        for position, character in enumerate(texts[row])
        if character == "\0"
    ]
    return pa.array([text.replace("\0", REPLACEMENT) for text in texts], pa.string()), positions


def _numbered(pieces: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    """Each piece with the number of its first row."""
    start = 0
    for piece in pieces:
        yield start, piece
        start += piece.num_rows


def _write_vectors(file: Any, column: H5Column, table: pa.Table) -> None:
    """Write vectors chunk by chunk, each as it lies in memory."""
    type_ = table.schema.field(column.name).type
    dtype, dim = np.dtype(type_.value_type.to_pandas_dtype()), type_.list_size
    rows = max(1, min(table.num_rows, CHUNK_BYTES // max(1, dim * dtype.itemsize)))
    shape = (table.num_rows, dim)
    dataset = file.create_dataset(column.path, shape=shape, chunks=(rows, dim), dtype=dtype)
    for start, piece in _numbered(slices(table, rows)):
        matrix = vectors(piece, column.name)
        if len(matrix) < rows:
            matrix = np.concatenate([matrix, np.zeros((rows - len(matrix), dim), dtype)])
        dataset.id.write_direct_chunk((start, 0), matrix)


def _write_nulls(file: Any, column: H5Column, rows: int, start: int, array: pa.Array) -> None:
    """Mark the nulls of a slice; the dataset for that is there from the first null on."""
    path = f"{VALID}/{column.path}"
    if path not in file:
        chunks = (min(rows, CHUNK_ROWS),)
        file.create_dataset(path, shape=(rows,), dtype=bool, fillvalue=True, chunks=chunks, compression="gzip")
    file[path][start : start + len(array)] = array.is_valid().to_numpy(zero_copy_only=False)


def _repeated(array: pa.Array, dtype: np.dtype) -> np.ndarray:
    """Strings, of which few differ, as an array of fixed length."""
    encoded = array.dictionary_encode()
    different = np.array([text.encode() for text in encoded.dictionary.to_pylist()], f"S{dtype.itemsize}").astype(dtype)
    repeated: np.ndarray = different[encoded.indices.to_numpy()]
    return repeated


def _upper_bound(table: pa.Table) -> int:
    """Bytes that a file of these rows does not exceed: strings cost 16 for their place and 16 to 32 around them."""
    chunk = min(table.num_rows, CHUNK_ROWS)
    rows = -(-table.num_rows // chunk) * chunk  # the last chunk is as long as the others
    size = 256 * 1024
    for field in table.schema:
        size += 16 * 1024 + rows  # its description, and whether it is null
        if pa.types.is_fixed_size_list(field.type):
            size += table[field.name].nbytes + min(table[field.name].nbytes, CHUNK_BYTES + field.type.list_size * 8)
        elif pa.types.is_string(field.type):
            size += 2 * table[field.name].nbytes + 64 * rows
        else:
            size += 8 * rows
    return size
