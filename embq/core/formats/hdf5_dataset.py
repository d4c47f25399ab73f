"""`dataset.h5`: shows the committed HDF5 parts of a run as one file, whose datasets are views of theirs.

It is derived from the commit log: it may be missing, or know fewer parts than are committed, while a run is at work.
Its parts stand beside it, by relative names, so that the folder can be moved as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from embq.core.errors import OutputError
from embq.core.formats.base import FORMAT_ERRORS
from embq.core.formats.hdf5 import LIBVER, NUL, VALID, columns_of, h5py_module, linked_dataset, opened, own_dataset
from embq.core.run.commits import CommittedFile
from embq.core.run.layout import Layout
from embq.core.storage.beneath import below
from embq.core.storage.durable import drop, output_error, publish, reserve, trim
from embq.core.storage.objects import ObjectPath

NAME = "dataset.h5"

ROWS = "embq.rows"
"""Attribute: how many rows the joined parts have together."""

FIXED_BYTES, VIEW_BYTES = 256 * 1024, 1024
"""Room reserved for `dataset.h5`, and for each view of a column of a part: see `embq.core.formats.hdf5.write_hdf5`."""


def join_parts(layout: Layout, parts: Iterable[CommittedFile]) -> None:
    """Write `dataset.h5` durably if it is not there or does not know all of `parts`; they are the HDF5 files in the
    order of their rows. Without parts there is none. OutputError if it cannot be written or a part cannot be read.
    """
    if isinstance(layout.root, ObjectPath):
        return  # the library opens the parts by their names on a disk
    files = list(parts)
    path, temporary = layout.root / NAME, layout.temporary / f"{NAME}.unfinished"
    if not files or _rows_of(path) == files[-1].first_id + files[-1].rows:
        return
    try:
        _write_joined(layout.root, files, temporary)
        publish(temporary, path)
    except FORMAT_ERRORS as error:
        drop(temporary)
        if isinstance(error, OSError) and error.errno:
            raise output_error(error, path) from error
        raise OutputError(
            f"{path} cannot be made of the parts: {error}",
            next_step="`embq verify` says which part is damaged; restore it from a backup",
            code="part_damaged",
        ) from error


def _rows_of(path: Path) -> int:
    """Rows of a joined file; -1 if there is none that can be read."""
    if path.exists():
        with suppress(*FORMAT_ERRORS), opened(path) as file:
            return int(file.attrs[ROWS])
    return -1


def _write_joined(root: Path, files: list[CommittedFile], temporary: Path) -> None:
    h5py = h5py_module()
    with opened(below(root, files[0].path)) as first:
        views = _Views(first, sum(file.rows for file in files))
        notes = {**first.attrs, ROWS: views.rows}
    start = 0
    for file in files:
        with opened(below(root, file.path)) as part:
            views.add(part, file, start)
        start += file.rows
    with h5py.File(temporary, "w", libver=LIBVER) as joined:
        reserve(temporary, FIXED_BYTES + views.most_bytes(len(files)))
        joined.attrs.update(notes)
        views.write(joined)
    trim(temporary)


class _Views:
    """The datasets of a joined file while its parts are gone through; the columns are those of the first part.

    Attributes:
        rows: of all parts together.
    """

    def __init__(self, first: Any, rows: int) -> None:
        self.rows = rows
        self._h5py = h5py_module()
        self._columns = columns_of(first)
        self._layouts: dict[str, Any] = {}
        for column in self._columns:
            source = own_dataset(first, column.path)
            self._layouts[column.path] = self._h5py.VirtualLayout((rows, *source.shape[1:]), source.dtype)
        self._nul: dict[str, list[np.ndarray]] = {}

    def add(self, part: Any, file: CommittedFile, start: int) -> None:
        """Show a part's rows from row `start` on."""
        for column in self._columns:
            self._show(column.path, file, start)
            if (valid := linked_dataset(part, path := f"{VALID}/{column.path}")) is not None:
                self._layouts.setdefault(path, self._h5py.VirtualLayout((self.rows,), valid.dtype))
                self._show(path, file, start)
            if linked_dataset(part, path := f"{NUL}/{column.path}") is not None:
                self._nul.setdefault(path, []).append(own_dataset(part, path)[:] + np.array([start, 0]))

    def _show(self, path: str, file: CommittedFile, start: int) -> None:
        layout = self._layouts[path]
        shape = (file.rows, *layout.shape[1:])
        # The library takes a percent sign in a name for the beginning of a pattern.
        source = self._h5py.VirtualSource(file.path, path.replace("%", "%%"), shape, layout.dtype)
        layout[start : start + file.rows] = source

    def most_bytes(self, parts: int) -> int:
        """Upper bound of the bytes that `write` needs."""
        return VIEW_BYTES * len(self._layouts) * (parts + 16) + sum(
            a.nbytes for arrays in self._nul.values() for a in arrays
        )

    def write(self, joined: Any) -> None:
        """Write all views into an open file. A part without a record of nulls has none."""
        for path, layout in self._layouts.items():
            joined.create_virtual_dataset(path, layout, fillvalue=True if path.startswith(f"{VALID}/") else None)
        for path, arrays in self._nul.items():
            joined.create_dataset(path, data=np.concatenate(arrays))
