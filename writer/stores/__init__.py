"""Part formats, one file each. A store writes the closed files of one part and says what it wrote."""

from __future__ import annotations

from core.errors import OutputError
from core.run.run_info import RunInfo
from writer.stores.arrow import ArrowStore
from writer.stores.base import Store
from writer.stores.hdf5 import Hdf5Store
from writer.stores.npy import NpyStore
from writer.stores.parquet import ParquetStore


def for_format(info: RunInfo) -> Store:
    """The store for a run's format; OutputError where this embq has none."""
    match info.format:
        case "parquet":
            return ParquetStore()
        case "hdf5":
            return Hdf5Store(info.rows)
        case "npy":
            return NpyStore(info.model)
        case "arrow":
            return ArrowStore()
    raise OutputError(
        f"the run's format is {info.format!r}, which this embq cannot write",
        next_step="use the embq version that made the run",
    )
