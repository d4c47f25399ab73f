"""`dataset.h5`: the committed HDF5 parts as one file, whose datasets are views of theirs.

It is derived from the commit log and no truth: it may be missing, or know fewer parts than are committed, while a run
is at work. Its parts stand beside it, by relative names, so that the folder can be moved as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from core.commits import CommittedFile
from core.durable import drop, output_error, publish, reserve, trim
from core.errors import OutputError
from core.layout import Layout
from core.objects import ObjectPath
from core.parts.base import FORMAT_ERRORS
from core.parts.hdf5 import NUL, VALID, H5Column, columns_of, h5py_module

NAME = "dataset.h5"
ROWS = "embq.rows"
"""Attribute: how many rows the joined parts have together."""

FIXED_BYTES, VIEW_BYTES = 256 * 1024, 1024
"""What is set aside for the file, and for each part that a column is seen in; see `writer.stores.hdf5` for why."""


def join_parts(layout: Layout, parts: Iterable[CommittedFile], *, libver: tuple[str, str]) -> None:
    """Write `dataset.h5` durably where it is not there or does not know all of `parts`; they are the HDF5 files in the
    order of their rows. Without parts there is none. OutputError where it cannot be written or a part cannot be read.
    """
    if isinstance(layout.root, ObjectPath):
        return  # the library opens the parts by their names on a disk
    files = list(parts)
    path, temporary = layout.root / NAME, layout.temporary / f"{NAME}.unfinished"
    if not files or _rows_of(path) == files[-1].first_id + files[-1].rows:
        return
    try:
        _write(layout.root, files, temporary, libver)
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
    """How many rows a joined file knows; -1 where there is none that can be read."""
    if path.exists():
        with suppress(*FORMAT_ERRORS), h5py_module().File(path, "r") as file:
            return int(file.attrs[ROWS])
    return -1


def _write(root: Path, files: list[CommittedFile], temporary: Path, libver: tuple[str, str]) -> None:
    h5py = h5py_module()
    rows = sum(file.rows for file in files)
    with h5py.File(temporary, "w", libver=libver) as joined:
        views: dict[str, Any] = {}
        nul: dict[str, list[np.ndarray]] = {}
        for start, file in _with_starts(files):
            with h5py.File(root / file.path, "r") as part:
                columns = columns_of(part)
                if not views:
                    joined.attrs.update({**part.attrs, ROWS: rows})
                for path in _views(part, columns):
                    source = part[path]
                    view = views.setdefault(path, h5py.VirtualLayout((rows, *source.shape[1:]), source.dtype))
                    view[start : start + file.rows] = h5py.VirtualSource(
                        file.path, path.replace("%", "%%"), source.shape, source.dtype
                    )
                for column in columns:
                    if (path := f"{NUL}/{column.path}") in part:
                        nul.setdefault(path, []).append(part[path][:] + np.array([start, 0]))
        found = sum(array.nbytes for arrays in nul.values() for array in arrays)
        reserve(temporary, FIXED_BYTES + found + VIEW_BYTES * len(views) * (len(files) + 16))
        for path, view in views.items():
            joined.create_virtual_dataset(path, view, fillvalue=True if path.startswith(f"{VALID}/") else None)
        for path, arrays in nul.items():
            joined.create_dataset(path, data=np.concatenate(arrays))
    trim(temporary)


def _views(part: Any, columns: Iterable[H5Column]) -> Iterator[str]:
    """The datasets of a part that become views."""
    for column in columns:
        yield column.path
        if (path := f"{VALID}/{column.path}") in part:
            yield path


def _with_starts(files: Iterable[CommittedFile]) -> Iterator[tuple[int, CommittedFile]]:
    """Each part with the number of its first row."""
    start = 0
    for file in files:
        yield start, file
        start += file.rows
