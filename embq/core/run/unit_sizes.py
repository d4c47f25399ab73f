"""Sizes of units as far as planning knows them, from which the time of the remaining ones is estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from embq.core.units import Unit

if TYPE_CHECKING:
    # Planning reads no sizes, and does not need numpy.
    import numpy as np

COLUMNS = ["kind", "start", "stop", "samples", "size"]
"""Columns of a segment of the manifest; segments of earlier versions have no `size`."""


class UnitSize(NamedTuple):
    """Size of one or more units of one kind.

    `samples` counts 1 for a unit where only reading tells; `bytes` are those of the slice of a text file, of a shard,
    or about those of some rows of a table, and 0 for other kinds.
    """

    kind: str
    samples: int
    bytes: int

    def __add__(self, other: object) -> UnitSize:
        assert isinstance(other, UnitSize)
        return UnitSize(self.kind, self.samples + other.samples, self.bytes + other.bytes)

    def __sub__(self, other: UnitSize) -> UnitSize:
        return UnitSize(self.kind, self.samples - other.samples, self.bytes - other.bytes)


def size_of(unit: Unit) -> UnitSize:
    """Size of one unit; of a retry, its share of the unit that it retries."""
    size = max(unit.size, unit.stop - unit.start)
    if unit.retry is not None and unit.retry.only and (of_all := unit.samples or unit.retry.samples):
        size = size * len(unit.retry.ordinals) // of_all
    return UnitSize(unit.kind, max(1, unit.expected or 1) if unit.samples else 1, size)


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Sizes of the units of a segment, in order: `kinds`, `samples` and `bytes` are arrays of one length."""

    kinds: pa.Array
    samples: np.ndarray
    bytes: np.ndarray

    @classmethod
    def of_table(cls, table: pa.Table) -> UnitSizes:
        """From the columns `COLUMNS` of a segment, which must not be one of retries."""
        import numpy as np
        import pyarrow.compute as pc  # not above: workers need but `size_of`, and it is a tenth of their start

        samples = pc.max_element_wise(pc.fill_null(table["samples"], 1), 1).to_numpy()
        size = np.maximum(0, table["stop"].to_numpy() - table["start"].to_numpy())
        if "size" in table.column_names:
            size = np.maximum(size, table["size"].to_numpy())
        return cls(table["kind"].combine_chunks(), samples, size)

    @classmethod
    def of_units(cls, units: Iterator[Unit]) -> UnitSizes:
        """From the units themselves."""
        import numpy as np

        each = [size_of(unit) for unit in units]
        kinds = pa.array([size.kind for size in each], pa.string())
        return cls(kinds, np.array([size.samples for size in each]), np.array([size.bytes for size in each]))

    def at(self, position: int) -> UnitSize:
        """Size of one unit."""
        return UnitSize(self.kinds[position].as_py(), int(self.samples[position]), int(self.bytes[position]))

    def sums(self, chosen: np.ndarray) -> Iterator[UnitSize]:
        """Size of the units that a mask selects, kind by kind."""
        import pyarrow.compute as pc

        for kind in self.kinds.unique().to_pylist():
            these = chosen & pc.equal(self.kinds, kind).to_numpy(zero_copy_only=False)
            yield UnitSize(kind, int(self.samples[these].sum()), int(self.bytes[these].sum()))
