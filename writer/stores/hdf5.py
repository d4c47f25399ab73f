"""Parts as HDF5 files, each closed for ever once it is written; see `core.formats.hdf5` for what is in one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from core.formats.hdf5 import COLUMNS, NUL, REPLACEMENT, VALID, H5Column, h5py_module
from core.rows.spec import RowSpec
from core.run.commits import CommittedFile
from core.run.layout import Layout
from core.run.reader import vectors
from core.storage.durable import file_sha256, reserve, trim
from writer.stores.base import Draft, PartName, slices, whole_or_none
from writer.stores.virtual import join_parts

LIBVER = ("v110", "v110")
"""Every HDF5 from 1.10 on reads it; earlier ones know no virtual datasets."""

CHUNK_BYTES = 512 * 1024
"""Of vectors: a random row costs one such read, and a whole file is read at the disk's speed."""

CHUNK_ROWS = 16_384
"""Of every other column; so many rows are converted at once."""


class Hdf5Store:
    """Rows as `parts/part-N.h5`; see `writer.stores.base.Store`.

    The library crashes its process where a write fails in mid-file, so that room is set aside before anything is
    written. Vectors and strings are not compressed: the former do not shrink, and of the latter filters see only
    references. The ids of units, which repeat, have a fixed length and are.

    Args:
        rows: what a row holds; its columns stand below `/metadata`.
    """

    def __init__(self, rows: RowSpec) -> None:
        self._h5py = h5py_module()
        self._metadata = {column.name for column in rows.columns}

    def write(self, table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
        """See `writer.stores.base.Store`."""
        temporary, path = name.unfinished("rows"), f"parts/part-{name.number:08d}.h5"
        columns = [H5Column(field.name, self._path(field.name), field.nullable) for field in table.schema]
        with whole_or_none([temporary], name.layout.root / path):
            with self._h5py.File(temporary, "w", libver=LIBVER) as file:
                reserve(temporary, _upper_bound(table))
                for note, value in {**notes, COLUMNS: described(columns)}.items():
                    file.attrs[note] = value
                for column in columns:
                    self._write_column(file, column, table.select([column.name]))
            trim(temporary)
            digest = file_sha256(temporary)
        said = CommittedFile(
            path=path,
            kind="rows",
            rows=table.num_rows,
            bytes=temporary.stat().st_size,
            sha256=digest,
            first_id=name.first_id,
        )
        return [Draft(temporary=temporary, file=said)]

    def join(self, layout: Layout, files: Iterable[CommittedFile]) -> None:
        """See `writer.stores.base.Store`; the parts are joined in `dataset.h5`."""
        join_parts(layout, files, libver=LIBVER)

    def _path(self, column: str) -> str:
        if column in self._metadata:
            return f"metadata/{column}"  # a name that HDF5 takes, see `core.rows.metadata.column_name`
        return "metadata_json" if column == "metadata" else column

    def _write_column(self, file: Any, column: H5Column, table: pa.Table) -> None:
        """Write one column; OSError."""
        type_ = table.schema.field(column.name).type
        if pa.types.is_fixed_size_list(type_):
            _write_vectors(file, column, table)
            return
        dataset = self._dataset(file, column, table)
        nul: list[tuple[int, int]] = []
        for start, piece in _numbered(slices(table, CHUNK_ROWS)):
            array = pa.concat_arrays(piece[column.name].chunks)
            if array.null_count:
                _write_nulls(file, column, table.num_rows, start, array)
            if column.name == "unit_id":
                values = _repeated(array, dataset.dtype)
            elif pa.types.is_string(type_):
                array, found = without_nul(array.fill_null(""), start)
                nul += found
                values = array.to_numpy(zero_copy_only=False)
            else:
                values = array.fill_null(np.zeros((), dataset.dtype).item()).to_numpy(zero_copy_only=False)
            dataset[start : start + len(array)] = values
        if nul:
            file.create_dataset(f"{NUL}/{column.path}", data=np.array(nul, np.int64))

    def _dataset(self, file: Any, column: H5Column, table: pa.Table) -> Any:
        """A new dataset for a column that holds no vectors."""
        rows, type_ = table.num_rows, table.schema.field(column.name).type
        shape: dict[str, Any] = {"shape": (rows,), "chunks": (min(rows, CHUNK_ROWS),)}
        if column.name == "unit_id":
            longest = pc.max(pc.binary_length(table[column.name])).as_py() or 1
            dtype = self._h5py.string_dtype("utf-8", longest)
            return file.create_dataset(column.path, dtype=dtype, compression="gzip", compression_opts=1, **shape)
        dtype = self._h5py.string_dtype() if pa.types.is_string(type_) else np.dtype(type_.to_pandas_dtype())
        return file.create_dataset(column.path, dtype=dtype, **shape)


def described(columns: Sequence[H5Column]) -> str:
    """The attribute that says which dataset is which column."""
    return json.dumps([[column.name, column.path, column.nullable] for column in columns])


def without_nul(strings: pa.Array, start: int) -> tuple[pa.Array, list[tuple[int, int]]]:
    """Strings with U+FFFD for each NUL character, and (row, position) of each; the first string is row `start`."""
    with_nul = pc.match_substring(strings, "\0")
    if not pc.any(with_nul).as_py():
        return strings, []
    texts = strings.to_pylist()
    found = [
        (start + row, position)
        for row in np.flatnonzero(with_nul.to_numpy(zero_copy_only=False)).tolist()
        for position, character in enumerate(texts[row])
        if character == "\0"
    ]
    return pa.array([text.replace("\0", REPLACEMENT) for text in texts], pa.string()), found


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
