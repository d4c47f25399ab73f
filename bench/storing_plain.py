"""The plain library calls that the benchmark of storing measures against: the same rows, on the same disk, no fsync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embq.core.formats.base import vectors
from embq.core.formats.parquet import encoding

Plain = Callable[[pa.Table, Path], None]


def parquet(table: pa.Table, folder: Path) -> None:
    """With the library's defaults, which try a dictionary on the embeddings."""
    pq.write_table(table, folder / "plain.parquet")


def parquet_as_ours(table: pa.Table, folder: Path) -> None:
    """With the encoding of embq's parts."""
    pq.write_table(table, folder / "plain.parquet", **encoding(table.schema))


def arrow(table: pa.Table, folder: Path) -> None:
    """One IPC file."""
    with pa.ipc.new_file(folder / "plain.arrow", table.schema) as writer:
        writer.write_table(table)


def hdf5(table: pa.Table, folder: Path) -> None:
    """One dataset for each column, as `create_dataset` makes it of an array."""
    with h5py.File(folder / "plain.h5", "w") as file:
        for name, values in _arrays(table).items():
            if values.dtype == object:
                file.create_dataset(name, data=values, dtype=h5py.string_dtype())
            else:
                file.create_dataset(name, data=values)


def npy(table: pa.Table, folder: Path) -> None:
    """`numpy.save` for the vectors, and `write_table` with pandas' compression for the rest."""
    np.save(folder / "plain.npy", vectors(table))
    pq.write_table(table.drop_columns(["embedding"]), folder / "plain.parquet")


def _arrays(table: pa.Table) -> dict[str, np.ndarray]:
    arrays = {"embedding": vectors(table)}
    for name in table.column_names:
        if name == "embedding":
            continue
        column = table[name].to_numpy()
        arrays[name] = np.where(column == None, "", column) if column.dtype == object else column  # noqa: E711
    return arrays


PLAIN: dict[str, dict[str, Plain]] = {
    "parquet": {"write_table, its defaults": parquet, "write_table, the same encoding": parquet_as_ours},
    "arrow": {"ipc.new_file": arrow},
    "hdf5": {"create_dataset": hdf5},
    "npy": {"numpy.save and write_table": npy},
}
"""Format -> what writes the same rows. The last one of each is what embq's writer is compared with."""
