"""Kind "hdf5": datasets of strings in an HDF5 file, such as `batches/0/text`, `batches/1/text`, ... of a notebook.

Nothing outside of the file is read, and no link is followed: a file that has the texts, or those of a batch, behind a
link, in external storage or in a virtual dataset is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from embq.core.errors import InputError, SourceError
from embq.core.extras import missing
from embq.core.process.limits import decoded_bytes
from embq.core.units import UNIT_SPEC_MAX_BYTES, Sample, Unit
from embq.sources.access.files import beyond_memory, beyond_units, open_unchanged, stat_file
from embq.sources.columns import ChosenColumns
from embq.sources.formats.hdf5_datasets import Dataset, beside_of, choose
from embq.sources.formats.tables import table_errors
from embq.sources.interface import FILE_UNITS_MAX, SAMPLE_MAX_BYTES, Moved, Source, unwatched
from embq.sources.reader_options import ReadOptions
from embq.sources.reader_process.client import inspect
from embq.sources.rows import KEYS_BY_DATASET, RowSamples
from embq.sources.unusable import failing_unit, readable_now, refuse_unreadable

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")

_SLICE_ROWS = 256
"""Rows that are read at a time, so that a unit of long texts is not in memory as a whole."""

_CACHE_BYTES = 64 << 20
"""Size of HDF5's cache of chunks; one that does not fit is decompressed again for each slice."""


class Hdf5Source(Source):
    """Strings in units of at most `unit_samples`, each of which names its datasets and its first row.

    The key is the value of a dataset of ids with as many rows beside the texts, else "<file name>:<dataset>:<row>" with
    rows from 1. Units of older runs say "<file name>:<row>", where rows are counted through the whole file.
    """

    kind = "hdf5"
    modalities: tuple[str, ...] = ("text",)

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """Texts; SourceError if it is not clear which, or the file is damaged or cannot be read."""
        unit = self._unit_of_file(path, options)
        choose(_datasets(inspect(unit)), unit)
        return self.modalities

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units that also fit into a hint, however long the paths are.

        A file that is damaged, or lacks the dataset, becomes one unit that fails, and the rest of the run goes on.
        """
        unit = self._unit_of_file(path, options)
        try:
            chosen, ids = choose(_datasets(inspect(unit)), unit)
            if sum(dataset.rows for dataset in chosen) > FILE_UNITS_MAX * options.unit_samples:
                raise beyond_units(path)
        except SourceError as error:
            yield failing_unit(unit, error)
            return
        if not any(dataset.rows for dataset in chosen):
            raise InputError(f"{path}: its datasets of strings are empty", code="empty_input", next_step="leave it out")
        if ids:
            unit = replace(unit, options=tuple(sorted({**dict(unit.options), "ids": ids}.items())))
        yield from _cut(unit, chosen, options.unit_samples)

    def inspect(self, unit: Unit) -> list[list[Any]]:
        """The datasets of a file as JSON-ready values; called in the reader process."""
        with _opened(unit, unwatched) as file:
            return [[dataset.path, dataset.rows, dataset.role, dataset.type] for dataset in _survey(file, unit.source)]

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """One sample per string."""
        refuse_unreadable(unit)
        if unit.samples is None:
            with _opened(unit, on_progress) as file:
                choose(_survey(file, unit.source), unit)
            raise readable_now(unit)
        samples = RowSamples(unit, on_progress)
        named = dict(unit.options)
        with _opened(unit, on_progress) as file:
            start = unit.start
            for path, rows in unit.items:
                text = _dataset(file, path, unit)
                ids = _dataset(file, beside_of(path, named["ids"]), unit) if named.get("ids") else None
                choice = ChosenColumns(text=path, image="", is_link=False, key=named.get("ids", ""), metadata=())
                at_once = min(_rows_at_once(dataset, unit) for dataset in (text, ids) if dataset is not None)
                for at in range(start, start + rows, at_once):
                    on_progress()
                    stop = min(at + at_once, start + rows)
                    with _file_errors(unit.source):
                        texts = text[at:stop]
                        keys = ids[at:stop] if ids is not None else [None] * len(texts)
                    for value, key in zip(texts, keys, strict=True):
                        yield samples.sample(choice, identity=_key(key), text=bytes(value), image=None, fields={})
                start = 0

    def part(self, unit: Unit, first: int, samples: int | None = None) -> Unit:
        """The unit of some of its rows."""
        taken = (unit.samples or 0) - first if samples is None else samples
        items: list[tuple[str, int]] = []
        start = at = unit.start
        to_skip, to_take = first, taken
        for path, rows in unit.items:
            skipped = min(rows, to_skip)
            of_dataset = min(rows - skipped, to_take)
            if of_dataset:
                start = start if items else at + skipped
                items.append((path, of_dataset))
            at, to_skip, to_take = 0, to_skip - skipped, to_take - of_dataset
        return replace(unit, start=start, first=unit.first + first, samples=taken, items=tuple(items))

    def _unit_of_file(self, path: str, options: ReadOptions) -> Unit:
        named = tuple(sorted((*options.columns, KEYS_BY_DATASET)))
        return Unit(kind=self.kind, source=path, etag=stat_file(path).version, options=named)


def _cut(unit: Unit, datasets: Sequence[Dataset], most: int) -> Iterator[Unit]:
    """Units of at most `most` rows of the datasets in their order, which also fit into a hint."""
    overhead = len(json.dumps(unit.describe(), separators=(",", ":"))) + 60
    items: list[tuple[str, int]] = []
    first = start = rows = 0
    length = overhead
    for dataset in datasets:
        at = 0
        while at < dataset.rows:
            size = len(json.dumps([dataset.path, dataset.rows])) + 1
            if items and (rows == most or length + size > UNIT_SPEC_MAX_BYTES):
                yield replace(unit, start=start, first=first, samples=rows, items=tuple(items))
                first, rows, items, length = first + rows, 0, [], overhead
            if not items:
                start = at
            taken = min(dataset.rows - at, most - rows)
            items.append((dataset.path, taken))
            at, rows, length = at + taken, rows + taken, length + size
    if items:
        yield replace(unit, start=start, first=first, samples=rows, items=tuple(items))


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise missing("h5py", "HDF5 files are read with h5py, which is not installed") from error
    module: ModuleType = h5py
    return module


def _file_errors(path: str) -> AbstractContextManager[None]:
    """As `table_errors`; what h5py raises at damage depends on which part of the library saw it."""
    return table_errors(path, RuntimeError, LookupError, TypeError)


@contextmanager
def _opened(unit: Unit, on_progress: Moved) -> Iterator[Any]:
    """The file, open for reading, the version that was planned."""
    h5py = _h5py()
    with open_unchanged(unit, "source_changed", on_progress) as file:
        with _file_errors(unit.source):
            opened = h5py.File(file, "r", rdcc_nbytes=_CACHE_BYTES)
        with opened:
            yield opened


def _survey(file: Any, source: str) -> list[Dataset]:
    """All datasets with one dimension that lie in this file itself, and what is not read, in order."""
    h5py = _h5py()
    datasets: list[Dataset] = []

    def add(path: str | bytes, role: str, kind: str, rows: int = 0) -> None:
        name = path if isinstance(path, str) else path.decode("utf-8", "surrogateescape")
        datasets.append(Dataset(path=name, rows=rows, role=role, type=kind))

    def visit(path: str | bytes, node: Any) -> None:
        if not isinstance(node, h5py.Dataset):
            return
        role, kind = ("integer" if node.dtype.kind in "iu" else "other"), str(node.dtype)
        if h5py.check_string_dtype(node.dtype) is not None:
            role, kind = "text", "strings"
        if len(node.shape or ()) != 1:
            add(path, "unread", f"{kind} with {len(node.shape or ())} dimensions")
        elif node.is_virtual or node.external:
            where = "a virtual dataset" if node.is_virtual else "external storage"
            add(path, "outside" if role == "text" else "unread", f"{kind} in {where}", int(node.shape[0]))
        else:
            add(path, role, kind, int(node.shape[0]))

    def look_at_link(path: str | bytes, link: Any) -> None:
        if not isinstance(link, h5py.HardLink):
            add(path, "unread", "a soft link" if isinstance(link, h5py.SoftLink) else "an external link")

    with _file_errors(source):
        file.visititems(visit)  # it follows no links
        file.visititems_links(look_at_link)
    return sorted(datasets, key=lambda dataset: dataset.order)


def _datasets(listed: list[list[Any]]) -> list[Dataset]:
    return [Dataset(path=path, rows=rows, role=role, type=type_) for path, rows, role, type_ in listed]


def _dataset(file: Any, path: str, unit: Unit) -> Any:
    """A dataset of this very file; SourceError `source_changed` if there is none."""
    h5py = _h5py()
    with _file_errors(unit.source):
        node: Any = file
        for part in path.split("/"):
            if not isinstance(node.get(part, getlink=True) if isinstance(node, h5py.Group) else None, h5py.HardLink):
                node = None
                break
            node = node[part]
        if isinstance(node, h5py.Dataset) and not node.is_virtual and not node.external:
            return node
    raise SourceError(
        f"{unit.source}: has no dataset {path!r} of its own",
        code="source_changed",
        next_step="put the planned file back, or plan a new run",
    )


def _rows_at_once(dataset: Any, unit: Unit) -> int:
    """Rows of a dataset to read at a time; SourceError `too_large` if an item is larger than a sample may be, or a
    chunk larger than a reader may hold."""
    size = int(dataset.dtype.itemsize)
    if size > SAMPLE_MAX_BYTES:
        raise SourceError(
            f"{unit.source}: {dataset.name} has items of {size:,} bytes, more than {SAMPLE_MAX_BYTES:,}",
            code="too_large",
            next_step="write it with strings of variable length",
        )
    if 2 * size * math.prod(dataset.chunks or ()) > decoded_bytes():  # as it is stored, and decompressed
        raise beyond_memory(unit.source, f"reading a chunk of {dataset.name}")
    return max(1, min(_SLICE_ROWS, SAMPLE_MAX_BYTES // max(1, size)))


def _key(value: Any) -> bytes | int | None:
    """An id as bytes or int: numpy has types of its own for both."""
    return value if value is None else bytes(value) if isinstance(value, bytes) else int(value)
