"""Part formats, one file each. A store writes the closed files of one part and says what it wrote."""

from __future__ import annotations

from core.errors import OutputError
from core.layout import RunInfo
from writer.stores.base import Store
from writer.stores.parquet import ParquetStore


def for_format(info: RunInfo) -> Store:
    """The store for a run's format; OutputError where this embq has none."""
    if info.format == "parquet":
        return ParquetStore()
    raise OutputError(
        f"the run's format is {info.format!r}, which this embq cannot write",
        next_step="use the embq version that made the run",
    )
