"""Kind of input `hdf5`: the dataset `text` of strings, or `image` of encoded images, of an HDF5 file.

`--text-column` or `--image-column` names another one. Keys are FILE:ROW, counted from 1.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from embq.plugins import (
    SAMPLE_MAX_BYTES,
    InputError,
    Moved,
    ReadOptions,
    Sample,
    Source,
    SourceError,
    Unit,
    base_name,
    open_current,
    open_unchanged,
    unwatched,
)

h5py: Any = import_module("h5py")  # which has no types


class Hdf5Source(Source):
    """See `embq.plugins.Source`. A unit is some rows of a dataset, whose name travels with it."""

    kind = "hdf5"
    modalities: tuple[str, ...] = ("image", "text")
    suffixes = (".h5", ".hdf5")

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """Texts of a dataset of strings, images of another one."""
        with _current(path, options) as (_, dataset):
            return ("image",) if h5py.check_string_dtype(dataset.dtype) is None else ("text",)

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units of `unit_samples` rows."""
        try:
            with _current(path, options) as (version, dataset):
                name, rows = dataset.name.strip("/"), len(dataset)
        except SourceError as error:
            raise InputError(error.message, next_step=error.next_step, code=error.code) from error
        if not rows:
            raise InputError(f"{path}: {name} has no rows", code="empty_input", next_step="leave it out")
        unit = Unit(kind=self.kind, source=path, etag=version, options=(("dataset", name),))
        for first in range(0, rows, options.unit_samples):
            yield replace(unit, first=first, samples=min(options.unit_samples, rows - first))

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """A sample per row."""
        name = dict(unit.options).get("dataset", "")
        with open_unchanged(unit, "source_changed", on_progress) as file, _dataset(unit.source, file, name) as dataset:
            for ordinal in range(unit.samples or 0):
                on_progress()
                key = f"{base_name(unit.source)}:{unit.first + ordinal + 1}"
                yield _sample(ordinal, key, dataset[unit.first + ordinal])


def _sample(ordinal: int, key: str, value: Any) -> Sample:
    data = bytes(value)
    if len(data) > SAMPLE_MAX_BYTES:
        return Sample(ordinal=ordinal, key=key, error=("too_large", f"the row has {len(data):,} bytes"))
    if not isinstance(value, bytes):  # an array of bytes
        return Sample(ordinal=ordinal, key=key, image=data)
    try:
        return Sample(ordinal=ordinal, key=key, text=data.decode())
    except UnicodeDecodeError as error:
        return Sample(ordinal=ordinal, key=key, error=("text_not_utf8", str(error)))


@contextmanager
def _current(path: str, options: ReadOptions) -> Generator[tuple[str, Any], None, None]:
    """The version of a file as it is now, and its dataset."""
    names = [name for name in (options.text_column, options.image_column) if name] or ["text", "image"]
    unit = Unit(kind=Hdf5Source.kind, source=path)
    with open_current(unit, "source_changed", unwatched) as (version, file), _dataset(path, file, *names) as dataset:
        yield version, dataset


@contextmanager
def _dataset(path: str, file: Any, *names: str) -> Generator[Any, None, None]:
    """The first of these datasets that the file itself has: a link could lead to another file of the machine."""
    try:
        with h5py.File(file, "r") as opened:
            own = [name for name in opened if isinstance(opened.get(name, getlink=True), h5py.HardLink)]
            for found in (opened[name] for name in names if name in own):
                if isinstance(found, h5py.Dataset) and found.ndim == 1 and not (found.is_virtual or found.external):
                    yield found
                    return
            what = f"no dataset {' or '.join(names)} with one dimension; it has {', '.join(own)}"
            code = "missing_column"
    except (OSError, RuntimeError, LookupError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the storage
            raise
        what, code = f"it cannot be read: {error}", "table_damaged"
    raise SourceError(f"{path}: {what}", code=code, next_step="name its dataset with --text-column, or write it again")
