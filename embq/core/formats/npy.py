"""Parts in the layout of clip-retrieval: a .npy file for each column of vectors, and a parquet file for the rest.

Row i of the files of a part is one sample. The parquet file comes first in the record and is published first, so that
vectors are never visible without their metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np
import pyarrow as pa

from embq.core.formats.base import COLUMNS, READ_ROWS, Draft, PartName, vectors, whole_or_none
from embq.core.formats.folders import METADATA, vector_folders
from embq.core.formats.parquet import ROW_GROUP_ROWS, with_notes, write_parquet
from embq.core.models import ModelConfig
from embq.core.run.commits import CommittedFile
from embq.core.storage.beneath import require_regular
from embq.core.storage.hashing import HashingFile

SLICE_ROWS = 16_384
"""Rows of vectors that are written at once."""

LAST = ("id", "key", "unit_id", "ordinal", "metadata", "document", "chunk", "chunks", "char_start", "char_end")
"""Columns that stand behind those which clip-retrieval writes."""


class NpyPart:
    """See `embq.core.formats.base.PartFile`; a matrix of shape (rows, dim) is one column of vectors.

    Args:
        column: its name, which is not in the file.
    """

    def __init__(self, path: Path, column: str) -> None:
        self._path = path
        self._matrix = mapped(path)
        if self._matrix.ndim != 2 or np.isfortran(self._matrix):
            raise ValueError(f"{path.name} holds an array of shape {self._matrix.shape}, which is no list of vectors")
        self.rows, dim = self._matrix.shape
        self.schema = pa.schema([pa.field(column, pa.list_(pa.from_numpy_dtype(self._matrix.dtype), dim))])

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `embq.core.formats.base.PartFile`."""
        (field,) = [self.schema.field(name) for name in columns]
        for rows in read_matrix(self._path, self._matrix, start, self.rows if stop is None else min(stop, self.rows)):
            flat = pa.array(rows.reshape(-1), field.type.value_type)
            yield pa.Table.from_arrays([pa.FixedSizeListArray.from_arrays(flat, type=field.type)], schema=self.schema)

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `embq.core.formats.base.PartFile`; it has none."""
        return []

    def close(self) -> None:
        """See `embq.core.formats.base.PartFile`."""
        del self._matrix


def mapped(path: Path) -> np.ndarray:
    """The array in a file, of which only the header is read; ValueError or OSError if it is damaged.

    Nothing that the file holds is executed.
    """
    try:
        array: np.ndarray = np.load(require_regular(path), mmap_mode="r", allow_pickle=False)
    except TokenError as error:  # numpy reads the header with Python's own tokeniser
        raise ValueError(f"{path.name} has a damaged header: {error}") from error
    return array


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran order, and type of the array in an open file, which is at its first number afterwards.

    ValueError if the header is damaged. Nothing that the file holds is executed.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"the version of its header is {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(file)
    except TokenError as error:
        raise ValueError(f"a damaged header: {error}") from error
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"it holds {dtype} of shape {shape}")
    return shape, fortran, dtype


def read_matrix(path: Path, matrix: np.ndarray, start: int, stop: int) -> Iterator[np.ndarray]:
    """The rows of a file from `start` up to `stop`, at most `READ_ROWS` at a time; ValueError at its end.

    They are read and not taken from the map: mapped pages would count as memory of the process.

    Args:
        matrix: what `mapped` gave for the file.
    """
    dim, dtype = matrix.shape[1], matrix.dtype
    with open(path, "rb") as file:
        file.seek((int(getattr(matrix, "offset", 0)) if len(matrix) else 0) + start * dim * dtype.itemsize)
        for first in range(start, stop, READ_ROWS):
            rows = min(READ_ROWS, stop - first)
            numbers = np.fromfile(file, dtype, rows * dim)
            if len(numbers) != rows * dim:
                raise ValueError(f"{path.name} ends too early")
            yield numbers.reshape(rows, dim)


def write_npy(table: pa.Table, name: PartName, notes: Mapping[str, str], model: ModelConfig) -> list[Draft]:
    """Write rows as `metadata/metadata_N.parquet`, `img_emb/img_emb_N.npy`, ...; see `formats.part.write_part`.

    Args:
        model: of the run; its vectors have folders of their own, those of texts before those of images.
    """
    folders = sorted(vector_folders(model).items(), key=lambda item: item[1], reverse=True)
    unfinished = {folder: name.unfinished(folder) for folder in (METADATA, *(folder for _, folder in folders))}
    with whole_or_none(list(unfinished.values()), name.layout.root / METADATA):
        rest = table.drop_columns([column for column, _ in folders])
        drafts = [_write_metadata(rest, table.column_names, name, unfinished[METADATA], notes, model)]
        for column, folder in folders:
            path = f"{folder}/{folder}_{name.number:08d}.npy"
            drafts.append(_write_vectors(table, column, path, unfinished[folder]))
    return drafts


def _write_metadata(
    rest: pa.Table,
    names: Sequence[str],
    name: PartName,
    temporary: Path,
    notes: Mapping[str, str],
    model: ModelConfig,
) -> Draft:
    ordered = clip_retrieval_columns(rest, images="image" in model.modalities)
    options = {"compression": "snappy", "row_group_size": ROW_GROUP_ROWS, "use_dictionary": ["unit_id"]}
    path = f"{METADATA}/{METADATA}_{name.number:08d}.parquet"
    noted = with_notes(ordered, {**notes, COLUMNS: json.dumps(names)})
    return write_parquet(noted, temporary, options, path=path, kind="rows", first_id=name.first_id)


def clip_retrieval_columns(rows: pa.Table, *, images: bool) -> pa.Table:
    """Rows with the columns in the order of clip-retrieval, `image_path` first if there are images: the key."""
    last = [column for column in LAST if column in rows.column_names]
    first = [column for column in rows.column_names if column not in last]
    ordered = rows.select([*first, *last])
    return ordered.add_column(0, "image_path", ordered["key"]) if images else ordered


def _write_vectors(table: pa.Table, column: str, path: str, temporary: Path) -> Draft:
    """Write a column of vectors as `numpy.save` writes a matrix in C order, a slice at a time; OSError."""
    type_ = table.schema.field(column).type
    dtype = np.dtype(type_.value_type.to_pandas_dtype()).newbyteorder("<")
    header = {"descr": dtype.str, "fortran_order": False, "shape": (table.num_rows, type_.list_size)}
    with open(temporary, "wb") as raw:
        file = HashingFile(raw)
        np.lib.format.write_array_header_1_0(file, header)
        for batch in table.select([column]).to_batches(max_chunksize=SLICE_ROWS):
            file.write(vectors(pa.Table.from_batches([batch]), column).data)
    written = CommittedFile(
        path=path, kind="vectors", rows=table.num_rows, bytes=file.size, sha256=file.hexdigest(), column=column
    )
    return Draft(temporary=temporary, file=written)
