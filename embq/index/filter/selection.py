"""The rows of an index that satisfy conditions, as a bitmap by id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.core.filter.condition import Condition
from embq.core.filter.evaluation import matches, typed
from embq.core.rows.metadata import column_in_index
from embq.index.index_files.identity import Identity

HIDDEN = ("id", "unit_id")
"""Columns of the identity that no condition is about."""

FEW = 10_000
"""Matches up to which their ids are kept, so that they can be compared one by one: 5 ms for vectors of 384 numbers that
are in memory, less than looking at all lists of a million rows."""

MOST_BYTES = 256 << 20
"""Of the selections that are kept; the newest is kept whatever its size. A bitmap of a million rows has 125 KB."""

_CHUNK = 1 << 20
"""Bytes of a bitmap that are looked at together."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows that may be an answer.

    Attributes:
        bits: uint8 (ids / 8,): a bit for each id, that of id 0 the lowest of the first byte.
        count: of the rows.
        ids: int64 (count,), ascending; None if they are more than `FEW`.
    """

    bits: np.ndarray
    count: int
    ids: np.ndarray | None


class Selections:
    """The selections of one open version; those that were used last are kept. For one thread at a time.

    Args:
        identity: of the rows.
        ids: number of ids.
        deleted: uint8 (ids / 8,): bits of deleted rows; None if there are none.
    """

    def __init__(self, identity: Identity, ids: int, deleted: np.ndarray | None) -> None:
        self._identity, self._ids, self._deleted = identity, ids, deleted
        self._cache: OrderedDict[frozenset[Condition], Selection] = OrderedDict()

    def of(self, conditions: Iterable[Condition]) -> Selection:
        """The rows that satisfy all conditions and are not deleted. A null value satisfies none.

        Raises InputError `no_column` for a column that the index does not have, `bad_filter` for a value or an operator
        that is not of the column's type.
        """
        columns = columns_of(self._identity)
        tests = frozenset(typed(_renamed(condition, columns), columns) for condition in conditions)
        if tests not in self._cache:
            self._cache[tests] = self._selected(sorted(tests, key=lambda test: test.column))
            held = sum(selection.bits.nbytes for selection in self._cache.values())
            while held > MOST_BYTES and len(self._cache) > 1:
                held -= self._cache.popitem(last=False)[1].bits.nbytes
        self._cache.move_to_end(tests)
        return self._cache[tests]

    def _selected(self, tests: Sequence[Condition]) -> Selection:
        bits = np.zeros(-(-self._ids // 8), np.uint8)
        for first_id, columns in self._identity.scan([condition.column for condition in tests]):
            matching = matches(columns[0], tests[0])
            for column, test in zip(columns[1:], tests[1:], strict=True):
                matching = pc.and_(matching, matches(column, test))
            # A file of identities may begin within a byte, which it shares with the file before.
            shifted = np.packbits(np.pad(matching.to_numpy(zero_copy_only=False), (first_id % 8, 0)), bitorder="little")
            bits[first_id // 8 : first_id // 8 + len(shifted)] |= shifted
        if self._deleted is not None:
            bits &= ~self._deleted
        count, ids = 0, [np.empty(0, np.int64)]
        for start in range(0, len(bits), _CHUNK):
            chunk = bits[start : start + _CHUNK]
            count += int.from_bytes(chunk.tobytes(), "little").bit_count()
            if count <= FEW:
                ids.append(8 * start + np.flatnonzero(np.unpackbits(chunk, bitorder="little").view(bool)))
        return Selection(bits, count, np.concatenate(ids) if count <= FEW else None)


def _renamed(condition: Condition, columns: Mapping[str, pa.DataType]) -> Condition:
    """The condition by the index's name of its column: `source` is the field of the user's data if there is one."""
    name = column_in_index(condition.column)
    return replace(condition, column=name) if name in columns else condition


def columns_of(identity: Identity) -> dict[str, pa.DataType]:
    """The columns that conditions may be about, with their types."""
    return {field.name: field.type for field in identity.schema if field.name not in HIDDEN}
