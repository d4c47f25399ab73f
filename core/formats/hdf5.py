"""HDF5 files: a dataset for each column, and what tells apart what HDF5 cannot.

/id /ordinal /key /embedding /caption /unit_id ...   columns, first dimension = rows; vectors have two dimensions
/metadata/NAME        columns of metadata
/metadata_json        the JSON text of what is in none of them
/valid/PATH           where a column has nulls: False in their rows, in which the column itself holds "", 0 or NaN
/nul/PATH             where strings have NUL characters, which HDF5 cannot hold: (row, position) of each; the column
                      holds U+FFFD there
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from core.errors import ConfigError
from core.formats.base import READ_ROWS

COLUMNS = "embq.columns"
"""Attribute of the file: JSON list of [column, path of its dataset, whether it can be null], in the order of a row."""
VALID, NUL = "valid", "nul"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def h5py_module() -> ModuleType:
    """h5py; ConfigError where it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(
            "HDF5 files are read and written with h5py, which is not installed", next_step="pip install 'embq[hdf5]'"
        ) from error
    module: ModuleType = h5py
    return module


@dataclass(frozen=True, slots=True)
class H5Column:
    """A column of a row and the path of its dataset."""

    name: str
    path: str
    nullable: bool


def columns_of(file: Any) -> list[H5Column]:
    """The columns that an open file says it has."""
    return [H5Column(str(name), str(path), bool(null)) for name, path, null in json.loads(file.attrs[COLUMNS])]


class Hdf5Part:
    """See `core.formats.base.PartFile`; tables have at most `READ_ROWS` rows."""

    def __init__(self, path: Path) -> None:
        self._h5py = h5py_module()
        self._file = self._h5py.File(path, "r")
        try:
            self._columns = {column.name: column for column in columns_of(self._file)}
            lengths = {len(self._dataset(column.path)) for column in self._columns.values()}
            if len(lengths) != 1:
                raise ValueError(f"its datasets have different lengths: {sorted(lengths)}")
            (self.rows,) = lengths
            notes = {name: str(value) for name, value in self._file.attrs.items() if name != COLUMNS}
            self.schema = pa.schema([self._field(column) for column in self._columns.values()], notes)
            self._nul = {name: self._nul_of(column) for name, column in self._columns.items()}
        except BaseException:
            self.close()
            raise

    def _dataset(self, path: str) -> Any:
        """A dataset; ValueError where its numbers are in another file, as a link or its storage may say."""
        node = self._file
        for part in path.split("/"):
            if not isinstance(node.get(part, getlink=True), self._h5py.HardLink):
                raise ValueError(f"{path} is no dataset of the file itself")
            node = node[part]
        if node.is_virtual or node.external:
            raise ValueError(f"{path} is stored in another file")
        return node

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
        return self._dataset(path)[:] if path in self._file else None

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `core.formats.base.PartFile`."""
        schema = pa.schema([self.schema.field(name) for name in columns], self.schema.metadata)
        end = self.rows if stop is None else min(stop, self.rows)
        for first in range(start, end, READ_ROWS):
            last = min(first + READ_ROWS, end)
            yield pa.Table.from_arrays([self._read(field, first, last) for field in schema], schema=schema)

    def _read(self, field: pa.Field, start: int, stop: int) -> pa.Array:
        column = self._columns[field.name]
        values = self._dataset(column.path)[start:stop]
        if pa.types.is_fixed_size_list(field.type):
            flat = pa.array(values.reshape(-1), field.type.value_type)
            return pa.FixedSizeListArray.from_arrays(flat, type=field.type)
        valid_path = f"{VALID}/{column.path}"
        null = ~self._dataset(valid_path)[start:stop] if valid_path in self._file else None
        if not pa.types.is_string(field.type):
            return pa.array(values, field.type, mask=null)
        strings = pa.array(values, pa.binary(), mask=null).cast(pa.string())
        nul = self._nul[field.name]
        return strings if nul is None else _with_nul(strings, nul, start)

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `core.formats.base.PartFile`; the first and the last id."""
        ids = self._dataset("id")
        return [(self.rows, (int(ids[0]), int(ids[-1])))] if self.rows else []

    def close(self) -> None:
        """See `core.formats.base.PartFile`."""
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
