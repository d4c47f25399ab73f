"""Sorts committed rows into the order of the manifest in bounded memory.

The commit log has the position of each unit's rows in the parts. Consecutive units of the manifest are collected in
windows of a bounded number of rows, and each part is read once for every window with rows in it. Units are committed
roughly in the order of the manifest, so that a part has rows in one window or two.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import pyarrow as pa

from embq.core.run.commits import Commit, CommittedFile
from embq.core.run.manifest import Manifest
from embq.core.run.reader import part_tables
from embq.core.storage.paths import Place

PART = 1
"""Column of `Places.table` with the index in `Places.parts`."""


@dataclass(slots=True)
class Places:
    """Positions of rows in parts; 32 bytes for each unit with rows.

    Attributes:
        parts: the files of each part.
        numbers: four of each unit: its index in the manifest, of a retry that of the unit that was planned first; the
            index in `parts`; its first row, within the part; its rows, which are consecutive.
    """

    parts: list[tuple[CommittedFile, ...]] = field(default_factory=list)
    numbers: array[int] = field(default_factory=lambda: array("q"))

    @property
    def table(self) -> np.ndarray:
        """`numbers` as int64 (units, 4)."""
        return np.array(self.numbers).reshape(-1, 4)

    def add(self, commit: Commit, manifest: Manifest) -> None:
        """Add the rows of one record."""
        if not commit.parts:
            return
        starts = list(accumulate((files[0].rows for files in commit.parts), initial=0))
        for unit in commit.units:
            if unit.rows:
                part = bisect_right(starts, unit.first_row) - 1
                retry = manifest.unit(unit.u).retry if unit.supersedes else None
                planned = unit.u if retry is None else retry.unit
                self.numbers.extend((planned, len(self.parts) + part, unit.first_row - starts[part], unit.rows))
        self.parts += commit.parts

    def only_parts_with(self, ids: np.ndarray) -> Places:
        """The places in the parts that have a row with one of the ids, which ascend."""
        firsts = np.array([max(file.first_id for file in files) for files in self.parts])
        # Ids are dense, and parts in their order: the next part begins where one ends.
        chosen = np.unique(np.searchsorted(firsts, ids, side="right") - 1)
        table = self.table[np.isin(self.table[:, PART], chosen)]
        table[:, PART] = np.searchsorted(chosen, table[:, PART])
        return Places([self.parts[part] for part in chosen], array("q", table.tobytes()))


def sorted_tables(root: Place, places: Places, *, window_rows: int) -> Iterator[pa.Table]:
    """The rows by unit, ordinal and chunk, in windows of at most `window_rows`, or of one larger unit.

    Raises OutputError if a file is missing or cannot be read.
    """
    table = places.table
    table = table[np.argsort(table[:, 0], kind="stable")]
    for window in _windows(table, window_rows):
        yield _in_order(*_gather(root, places, window))


def _windows(table: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """The entries in slices of at most `most` rows together, of which none ends between two entries of one unit."""
    units = table[:, 0]
    start = at = held = 0
    while at < len(table):
        end = int(np.searchsorted(units, units[at], side="right"))
        unit_rows = int(table[at:end, 3].sum())
        if held and held + unit_rows > most:
            yield table[start:at]
            start, held = at, 0
        held, at = held + unit_rows, end
    if held:
        yield table[start:at]


def _gather(root: Place, places: Places, entries: np.ndarray) -> tuple[pa.Table, np.ndarray]:
    """The rows of some entries in the order of their parts, and the unit of each that was planned first."""
    tables: list[pa.Table] = []
    # By part, and by first row within it.
    entries = entries[np.lexsort((entries[:, 2], entries[:, PART]))]
    for of_part in np.split(entries, np.flatnonzero(np.diff(entries[:, PART])) + 1):
        with closing(part_tables(root, places.parts[of_part[0, PART]])) as rows:
            tables += _picked(rows, of_part[:, 2], of_part[:, 3])
    return pa.concat_tables(tables), np.repeat(entries[:, 0], entries[:, 3])


def _picked(tables: Iterator[pa.Table], first: np.ndarray, rows: np.ndarray) -> Iterator[pa.Table]:
    """The rows of ascending ranges. Copies if little of a table is wanted, so that the rest of it can go."""
    row_numbers = np.concatenate([np.arange(start, start + count) for start, count in zip(first, rows, strict=True)])
    position = done = 0
    for table in tables:
        end = int(np.searchsorted(row_numbers, position + table.num_rows))
        if end - done == table.num_rows:
            yield table
        elif end > done:
            yield table.take(row_numbers[done:end] - position)
        position, done = position + table.num_rows, end
        if done == len(row_numbers):
            return


def _in_order(table: pa.Table, units: np.ndarray) -> pa.Table:
    keys: Sequence[np.ndarray] = [table["ordinal"].to_numpy(), units]
    if "chunk" in table.column_names:
        keys = [table["chunk"].to_numpy(), *keys]
    order = np.lexsort(keys)
    return table if np.array_equal(order, np.arange(len(order))) else table.take(order)
