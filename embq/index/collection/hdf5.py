"""Collections of HDF5 files: a dataset of vectors, (rows, numbers), and others with a value for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embq.core.errors import InputError
from embq.core.formats.base import FORMAT_ERRORS, READ_ROWS
from embq.core.formats.hdf5 import linked_dataset, own_dataset, read_rows, rows_at_once
from embq.core.formats.hdf5 import opened as open_hdf5
from embq.index.collection.columns import without_columns
from embq.index.collection.listing import NOTES, Shape, Summary, choose_column, noted
from embq.index.collection.parts import PartRef, damaged
from embq.index.collection.remote import FilePath


def inspect_file(path: FilePath, column: str | None) -> Summary:
    """Content of an HDF5 file; InputError if it has no dataset of vectors, or not the one that is named."""
    with opened(path) as file:
        if column is None:
            column = choose_column(path, [name for name in file if _is_vectors(linked_dataset(file, name))], list(file))
        dataset = _vectors(path, file, column)
        rows = len(dataset)
        if not rows:
            return Summary(rows=0, column=column)
        # A list may be one text many times.
        notes = {name: file.attrs[name] for name in NOTES if name in file.attrs and not file.attrs.get_id(name).shape}
        shape = Shape(path=path, dim=dataset.shape[1], dtype=str(dataset.dtype), **noted(notes))
        if not dataset.is_virtual:
            own_dataset(file, column)
        sources = dataset.virtual_sources() if dataset.is_virtual else ()
        shown = frozenset(path.parent / source.file_name for source in sources)
        return Summary(rows=rows, column=column, shape=shape, schema=_schema(file, rows), shown=shown)


@contextmanager
def opened(path: FilePath) -> Iterator[Any]:
    """An open file for the length of the block; InputError if it cannot be read, also in the block."""
    assert isinstance(path, Path), "remote files are refused when they are listed"
    try:
        with open_hdf5(path) as file:
            yield file
    except FORMAT_ERRORS as error:
        raise damaged(path, error) from error


def _is_vectors(dataset: Any) -> bool:
    return getattr(dataset, "ndim", 0) == 2 and dataset.dtype.kind == "f"


def _vectors(path: FilePath, file: Any, column: str) -> Any:
    dataset = linked_dataset(file, column)
    if dataset is None:
        raise InputError(
            f"{path} has no dataset {column!r} of its own",
            next_step=f"it has {', '.join(file) or 'none'}",
            code="no_column",
        )
    if not _is_vectors(dataset) or not dataset.shape[1]:
        raise InputError(
            f"{path}: {column!r} holds {dataset.shape} of {dataset.dtype}, and not rows of floats",
            next_step="name the dataset of vectors",
            code="not_vectors",
        )
    return dataset


def _schema(file: Any, rows: int) -> pa.Schema:
    """The datasets that have a value for each row."""
    fields = []
    for name in file:
        dataset = linked_dataset(file, name)
        of_this_file = dataset is not None and not dataset.is_virtual and not dataset.external
        if of_this_file and dataset.ndim == 1 and len(dataset) == rows:
            text = dataset.dtype.kind not in "biuf"
            fields.append(pa.field(name, pa.string() if text else pa.from_numpy_dtype(dataset.dtype)))
    return pa.schema(fields)


def vectors(path: FilePath, part: PartRef, column: str, dim: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """See `embq.index.collection.plain.PlainFormat`."""
    with opened(path) as file:
        dataset = _vectors(path, file, column)
        if dataset.shape != (part.rows, dim):
            raise damaged(path, f"it holds {dataset.shape}, and held {(part.rows, dim)}")
        at_once = rows_at_once(own_dataset(file, column))
        for first in range(start, stop, at_once):
            yield dataset[first : min(first + at_once, stop)].astype(np.float32)


def rows_of(path: FilePath, part: PartRef, columns: Sequence[str], start: int, stop: int) -> Iterator[pa.Table]:
    """The rows from `start` up to `stop` of those datasets that the file has, a bounded number at a time."""
    with opened(path) as file:
        datasets = _schema(file, part.rows).names
        present = [name for name in columns if name in datasets]
        if not present:
            yield from without_columns(start, stop)
            return
        for first in range(start, stop, READ_ROWS):
            last = min(first + READ_ROWS, stop)
            yield pa.table({name: _values(read_rows(own_dataset(file, name), first, last)) for name in present})


def _values(values: np.ndarray) -> pa.Array:
    if values.dtype.kind in "biuf":
        return pa.array(values)
    texts = [value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value) for value in values]
    return pa.array(texts, pa.string())
