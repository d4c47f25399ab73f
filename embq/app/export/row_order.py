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


@dataclass(slots=True)
class Places:
    """Positions of rows in parts; one entry of twenty bytes for each unit with rows.

    Attributes:
        parts: the files of each part.
        unit: index in the manifest of the unit that was planned first, also for rows of a retry.
        part: index in `parts`.
        first: the first row, within the part.
        rows: number of consecutive rows.
    """

    parts: list[tuple[CommittedFile, ...]] = field(default_factory=list)
    unit: array[int] = field(default_factory=lambda: array("q"))
    part: array[int] = field(default_factory=lambda: array("i"))
    first: array[int] = field(default_factory=lambda: array("i"))
    rows: array[int] = field(default_factory=lambda: array("i"))

    def take(self, commit: Commit, manifest: Manifest) -> None:
        """Add the rows of one record."""
        if not commit.parts:
            return
        starts = list(accumulate((files[0].rows for files in commit.parts), initial=0))
        for unit in commit.units:
            if unit.rows:
                part = bisect_right(starts, unit.first_row) - 1
                self.unit.append(_planned_first(unit.u, unit.supersedes, manifest))
                self.part.append(len(self.parts) + part)
                self.first.append(unit.first_row - starts[part])
                self.rows.append(unit.rows)
        self.parts += commit.parts

    def only_parts_with(self, ids: np.ndarray) -> Places:
        """The places in the parts that have a row with one of the ids, which ascend."""
        firsts = np.array([max(file.first_id for file in files) for files in self.parts])
        # Ids are dense, and parts in their order: the next part begins where one ends.
        kept = np.unique(np.searchsorted(firsts, ids, side="right") - 1)
        number = {int(part): new for new, part in enumerate(kept)}
        found = Places(parts=[self.parts[part] for part in number])
        for unit, part, first, rows in zip(self.unit, self.part, self.first, self.rows, strict=True):
            if part in number:
                found.unit.append(unit)
                found.part.append(number[part])
                found.first.append(first)
                found.rows.append(rows)
        return found


def sorted_tables(root: Place, places: Places, *, window_rows: int) -> Iterator[pa.Table]:
    """The rows by unit, ordinal and chunk, in windows of at most `window_rows`, or of one larger unit.

    Raises OutputError where a file is missing or cannot be read.
    """
    units, rows = np.asarray(places.unit), np.asarray(places.rows)
    order = np.argsort(units, kind="stable")
    for start, stop in _windows(units[order], rows[order], window_rows):
        yield _in_order(*_gather(root, places, order[start:stop]))


def _planned_first(u: int, supersedes: int, manifest: Manifest) -> int:
    retry = manifest.unit(u).retry if supersedes else None
    return u if retry is None else retry.unit


def _windows(units: np.ndarray, rows: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of entries of at most `most` rows together, of which none ends between two entries of one unit."""
    start, held, at = 0, 0, 0
    while at < len(units):
        end = int(np.searchsorted(units, units[at], side="right"))
        more = int(rows[at:end].sum())
        if held and held + more > most:
            yield start, at
            start, held = at, 0
        held, at = held + more, end
    if held:
        yield start, at


def _gather(root: Place, places: Places, entries: np.ndarray) -> tuple[pa.Table, np.ndarray]:
    """The rows of some entries in the order of their parts, and the unit of each that was planned first."""
    parts = np.asarray(places.part)[entries]
    tables: list[pa.Table] = []
    units: list[np.ndarray] = []
    for part in np.unique(parts):
        here = entries[parts == part]
        here = here[np.argsort(np.asarray(places.first)[here])]
        first, rows = np.asarray(places.first)[here], np.asarray(places.rows)[here]
        with closing(part_tables(root, places.parts[part])) as of_part:
            tables += _picked(of_part, first, rows)
        units.append(np.repeat(np.asarray(places.unit)[here], rows))
    return pa.concat_tables(tables), np.concatenate(units)


def _picked(tables: Iterator[pa.Table], first: np.ndarray, rows: np.ndarray) -> Iterator[pa.Table]:
    """The rows of ascending ranges. Copies where little of a table is wanted, so that the rest of it can go."""
    wanted = np.concatenate([np.arange(start, start + count) for start, count in zip(first, rows, strict=True)])
    position = done = 0
    for table in tables:
        end = int(np.searchsorted(wanted, position + table.num_rows))
        if end - done == table.num_rows:
            yield table
        elif end > done:
            yield table.take(wanted[done:end] - position)
        position, done = position + table.num_rows, end
        if done == len(wanted):
            return


def _in_order(table: pa.Table, units: np.ndarray) -> pa.Table:
    keys: Sequence[np.ndarray] = [table["ordinal"].to_numpy(), units]
    if "chunk" in table.column_names:
        keys = [table["chunk"].to_numpy(), *keys]
    order = np.lexsort(keys)
    return table if np.array_equal(order, np.arange(len(order))) else table.take(order)
