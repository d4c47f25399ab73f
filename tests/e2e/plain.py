"""Reading the parts of an output folder with the plain library of its format alone: by what the folder holds, as a user
would, and with nothing of embq's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Columns = dict[str, Any]
"""Column -> its values in order; an array of shape (rows, dim) for vectors, a list for the rest."""


def read_parquet(root: Path) -> Columns:
    """With pyarrow.parquet."""
    return _of_table(pa.concat_tables(pq.read_table(path) for path in sorted((root / "parts").iterdir())))


def read_arrow(root: Path) -> Columns:
    """With pyarrow.ipc, mapped into memory."""
    tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in sorted((root / "parts").iterdir())]
    return _of_table(pa.concat_tables(tables))


def read_npy(root: Path) -> Columns:
    """With numpy and pyarrow: files of a folder in the order of their names, row i of all is one sample."""
    folders = sorted(path for path in root.iterdir() if path.name.endswith("_emb"))
    vectors = {
        folder.name: [np.load(path, allow_pickle=False) for path in sorted(folder.glob("*.npy"))] for folder in folders
    }
    tables = [pq.read_table(path) for path in sorted((root / "metadata").glob("*.parquet"))]
    for matrices in vectors.values():
        assert [len(matrix) for matrix in matrices] == [len(table) for table in tables]
    columns = _of_table(pa.concat_tables(tables))
    names = {"img_emb": "image_embedding", "text_emb": "text_embedding"}
    columns |= {names[folder]: np.concatenate(matrices) for folder, matrices in vectors.items()}
    if len(folders) == 1:
        columns["embedding"] = columns.pop(names[folders[0].name])
    return columns


def read_hdf5(root: Path) -> Columns:
    """With h5py, part by part."""
    parts = [_of_hdf5(path) for path in sorted((root / "parts").iterdir())]
    return {
        name: np.concatenate([part[name] for part in parts])
        if isinstance(parts[0][name], np.ndarray)
        else [value for part in parts for value in part[name]]
        for name in parts[0]
    }


def read_joined_hdf5(root: Path) -> Columns:
    """With h5py, from the file that joins the parts."""
    return _of_hdf5(root / "dataset.h5")


READERS: dict[str, Callable[[Path], Columns]] = {
    "parquet": read_parquet,
    "arrow": read_arrow,
    "npy": read_npy,
    "hdf5": read_hdf5,
}


def _of_table(table: pa.Table) -> Columns:
    columns: Columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_fixed_size_list(column.type):
            flat = pa.concat_arrays([chunk.flatten() for chunk in column.chunks])
            columns[name] = flat.to_numpy(zero_copy_only=False).reshape(len(table), -1)
        else:
            columns[name] = column.to_pylist()
    return columns


def _of_hdf5(path: Path) -> Columns:
    columns: Columns = {}
    with h5py.File(path) as file:
        datasets = {name: file[name] for name in file if isinstance(file[name], h5py.Dataset)}
        datasets |= dict(file.get("metadata", {}).items())
        for name, dataset in datasets.items():
            if dataset.ndim == 2:
                columns[name] = dataset[:]
                continue
            values = dataset.asstr()[:] if h5py.check_string_dtype(dataset.dtype) else dataset[:]
            valid = file.get(f"valid{dataset.name}")
            there = np.ones(len(values), bool) if valid is None else valid[:]
            columns[name] = [value if ok else None for value, ok in zip(values.tolist(), there.tolist(), strict=True)]
    if "metadata_json" in columns:
        columns["metadata"] = columns.pop("metadata_json")
    return columns
