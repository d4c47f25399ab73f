"""Manifest: the list of a run's units, as parquet segments. The index `u` of a unit is its position in the list.

The list only grows: further generations (see `embq.core.run.generations`) are added at its end.
"""

from __future__ import annotations

import hashlib
import secrets
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embq.core.errors import OutputError
from embq.core.run.generations import PREFIX, read_generations
from embq.core.run.layout import Layout
from embq.core.run.run_info import first_segments
from embq.core.run.unit_sizes import COLUMNS, UnitSize, UnitSizes
from embq.core.storage import beneath
from embq.core.storage.durable import names_in, publish, writing
from embq.core.storage.paths import Place, opened
from embq.core.units import Unit, canonical_json, id_of
from embq.core.wire import malformed, read

T = TypeVar("T")

SEGMENT_UNITS = 50_000
SEGMENT_BYTES = 64 * 1024 * 1024
"""A segment ends at whichever comes first, so that reading one takes bounded memory."""

CACHED_SEGMENTS = 2
CACHED_BYTES = 32 * 1024 * 1024
"""A manifest holds the segments that were used last: two of any size, as units in flight span a boundary, and more
while all of them stay within this size. 50,000 units are about 12 MB."""

SCHEMA = pa.schema(
    [
        pa.field("unit_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("samples", pa.int64()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("description", pa.binary(), nullable=False),
    ]
)
"""`description` is the unit as canonical JSON (surrogate escapes kept as bytes); the rest is for people and tools."""

REQUIRED = [SCHEMA.field(name) for name in ("unit_id", "kind", "source", "description")]
"""Columns that every version of embq wrote, without nulls."""

MOST_UNIT_BYTES = 1 << 28
"""Limit of one unit's description, which names all samples of a retry."""

DICTIONARY = ["kind", "source", "etag"]
"""Columns whose values repeat, so that a dictionary is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSummary:
    """Counts of a manifest that was written, and the digest that identifies it."""

    units: int
    samples: int | None
    digest: str


def first_segment_writer(layout: Layout) -> SegmentWriter:
    """Writer of the segments of a new run, which are committed once run.json names them.

    In a folder the caller holds the plan lock, so existing segments are orphans, and are removed. On an object store
    another process may be planning, so each gives its segments unique names.
    """
    if not isinstance(layout.root, Path):
        return SegmentWriter(layout, f"{PREFIX}0000-{secrets.token_hex(4)}-")
    for leftover in names_in(layout.manifest):
        beneath.unlink(layout.root, f"{layout.manifest.name}/{leftover}", missing_ok=True)
    return SegmentWriter(layout, "")


class SegmentWriter:
    """Writes units as segments, holding at most one of them.

    Args:
        prefix: of the segments' names.

    Attributes:
        names: of the segments that were written, in order.
    """

    def __init__(self, layout: Layout, prefix: str) -> None:
        self.layout = layout
        self.prefix = prefix
        self.names: list[str] = []

    def write(self, units: Iterable[Unit]) -> ManifestSummary:
        """Write all of them durably."""
        digest = hashlib.sha256()
        count = samples = size = 0
        exact = True
        columns: list[list[Any]] = [[] for _ in SCHEMA]
        for unit in units:
            description = canonical_json(unit.describe()).encode("utf-8", "surrogateescape")
            unit_id = id_of(description)
            digest.update(unit_id.encode())
            source = unit.source.encode("utf-8", "backslashreplace").decode()
            fields = (unit.kind, source, unit.start, unit.stop, unit.first, unit.samples, unit.etag)
            for column, value in zip(columns, (unit_id, *fields, unit.size, description), strict=True):
                column.append(value)
            count += 1
            size += len(description)
            exact = exact and unit.samples is not None
            samples += unit.samples or 0
            if len(columns[0]) == SEGMENT_UNITS or size >= SEGMENT_BYTES:
                self._write(columns)
                size, columns = 0, [[] for _ in SCHEMA]
        if columns[0]:
            self._write(columns)
        return ManifestSummary(units=count, samples=samples if exact else None, digest=digest.hexdigest()[:32])

    def _write(self, columns: list[list[Any]]) -> None:
        name = f"{self.prefix}{len(self.names):05d}.parquet"
        path, temporary = self.layout.manifest / name, self.layout.temporary / f"manifest-{name}"
        table = pa.table([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA)
        with writing(path):
            pq.write_table(table, temporary, compression="zstd", use_dictionary=DICTIONARY, write_statistics=False)
            publish(temporary, path)
        self.names.append(name)


class SegmentCache(Generic[T]):
    """The segments of a manifest that were used last, bounded by `CACHED_BYTES`.

    Args:
        load: reads a segment, by its number; returns it and its size in bytes.
    """

    def __init__(self, load: Callable[[int], tuple[T, int]]) -> None:
        self._load = load
        self._segments: OrderedDict[int, tuple[T, int]] = OrderedDict()

    def __iter__(self) -> Iterator[int]:
        """The numbers of the segments in memory, the one that was used last first."""
        return iter([*reversed(self._segments)])

    @property
    def bytes(self) -> int:
        """Size of the segments in memory."""
        return sum(size for _, size in self._segments.values())

    def get(self, segment: int) -> T:
        """The segment, read if it is not in memory."""
        if segment not in self._segments:
            self._segments[segment] = self._load(segment)
            while len(self._segments) > CACHED_SEGMENTS and self.bytes > CACHED_BYTES:
                self._segments.popitem(last=False)
        self._segments.move_to_end(segment)
        return self._segments[segment][0]


class Manifest:
    """Random access to the units of a run, as they are when it is opened, holding a few segments in memory."""

    def __init__(self, layout: Layout) -> None:
        self.generations = tuple(read_generations(layout.manifest))
        names = [*first_segments(layout), *(name for generation in self.generations for name in generation.segments)]
        self._paths = [beneath.below(layout.root, f"{layout.manifest.name}/{name}") for name in names]
        self._starts: list[int] = []
        total = 0
        for path in self._paths:
            self._starts.append(total)
            try:
                metadata = pq.read_metadata(opened(path))
                if metadata.num_rows < 0:
                    raise ValueError(f"it says that it has {metadata.num_rows} units")
                total += metadata.num_rows
                fields = list(metadata.schema.to_arrow_schema())
            except UNREADABLE as error:
                raise _unreadable(path, error) from error
            if missing := [field.name for field in REQUIRED if field not in fields]:
                raise OutputError(f"{path} is no segment of a manifest: it lacks the column {', '.join(missing)}")
        self.units = total
        self._units = SegmentCache(self._read_units)
        self._sizes = SegmentCache(self._read_sizes)

    def __len__(self) -> int:
        return self.units

    def unit(self, u: int) -> Unit:
        """The unit with index `u`."""
        what = f"unit {u} of the manifest"
        text = self._at(u, ids=False).decode("utf-8", "surrogateescape")
        try:
            return Unit.from_description(read(dict[str, Any], text, what=what, most_bytes=MOST_UNIT_BYTES))
        except (KeyError, TypeError, ValueError) as error:
            raise malformed(what, error) from error

    def unit_id(self, u: int) -> str:
        """The id of unit `u`, without building the unit."""
        return str(self._at(u, ids=True))

    def __iter__(self) -> Iterator[Unit]:
        return (self.unit(u) for u in range(self.units))

    def find(self, unit_id: str) -> Unit | None:
        """The unit with this id; None if it is not in the list. Looks at the segments in memory first."""
        cached = list(self._units)
        for segment in [*cached, *(n for n in range(len(self._starts)) if n not in cached)]:
            ids = (
                self._units.get(segment)[0]
                if segment in cached
                else _read_table(self._paths[segment], ["unit_id"])["unit_id"]
            )
            at = pc.index(ids, unit_id).as_py()
            if at >= 0:
                return self.unit(self._starts[segment] + at)
        return None

    def ids(self) -> Iterator[tuple[str, str]]:
        """(unit id, kind) of each unit in order, without building the units."""
        for path in self._paths:
            table = _read_table(path, ["unit_id", "kind"])
            for batch in table.to_batches(max_chunksize=1_000):
                yield from zip(batch["unit_id"].to_pylist(), batch["kind"].to_pylist(), strict=True)

    def sources(self, unit_ids: Iterable[str]) -> dict[str, str]:
        """Unit id -> its source, for the ids that are in the list; one pass over it."""
        ids = pa.array(sorted(unit_ids), pa.string())
        sources: dict[str, str] = {}
        for path in self._paths:
            table = _read_table(path, ["unit_id", "source"])
            table = table.filter(pc.is_in(table["unit_id"], ids))
            sources.update(zip(table["unit_id"].to_pylist(), table["source"].to_pylist(), strict=True))
        return sources

    def files(self, kinds: Collection[str]) -> Iterator[tuple[int, str]]:
        """(index of a unit, source) of the files of some kinds, each once for its units that follow each other.

        A source is as the column has it: with escapes for bytes that are not UTF-8.
        """
        for start, path in zip(self._starts, self._paths, strict=True):
            table = _read_table(path, ["kind", "source"])
            previous = ""
            pairs = zip(table["kind"].to_pylist(), table["source"].to_pylist(), strict=True)
            for u, (kind, source) in enumerate(pairs, start):
                if kind in kinds and source != previous:
                    yield u, source
                previous = source

    def is_retry(self, u: int) -> bool:
        """True if the generation of unit `u` is one of retries."""
        return any(gen.is_retry and gen.first <= u < gen.first + gen.units for gen in self.generations)

    def retries(self) -> Iterator[tuple[int, Unit]]:
        """(index, unit) of each unit of a generation of retries, in order."""
        for generation in self.generations:
            if generation.is_retry:
                yield from ((u, self.unit(u)) for u in range(generation.first, generation.first + generation.units))

    def unit_size(self, u: int) -> UnitSize:
        """Size of unit `u`."""
        segment = self._segment(u)
        return self._sizes.get(segment).at(u - self._starts[segment])

    def sizes_left(self, done: bytes) -> dict[str, UnitSize]:
        """Kind -> size of its units that are not done together, in one pass over the list.

        Args:
            done: bitmap of units, as the log has it.
        """
        import numpy as np

        totals: dict[str, UnitSize] = {}
        waits = np.unpackbits(np.frombuffer(done, np.uint8)) == 0
        for segment, start in enumerate(self._starts):
            sizes = self._sizes_of(segment)
            for size in sizes.sums(waits[start : start + len(sizes.kinds)]):
                totals[size.kind] = totals.get(size.kind, UnitSize(size.kind, 0, 0)) + size
        return totals

    def _sizes_of(self, segment: int) -> UnitSizes:
        start = self._starts[segment]
        if self.is_retry(start):
            return UnitSizes.of_units(self.unit(u) for u in range(start, [*self._starts, self.units][segment + 1]))
        path = self._paths[segment]
        table = _read_table(path, COLUMNS)
        if missing := sorted({*COLUMNS} - {"size", *table.column_names}):
            raise _unreadable(path, f"it lacks the column {', '.join(missing)}")
        return UnitSizes.of_table(table)

    def _segment(self, u: int) -> int:
        if not 0 <= u < self.units:
            raise IndexError(f"unit {u} of {self.units}")
        return bisect_right(self._starts, u) - 1

    def _at(self, u: int, *, ids: bool) -> bytes:
        segment = self._segment(u)
        column = self._units.get(segment)[0 if ids else 1]
        value: bytes = column[u - self._starts[segment]].as_py()
        return value

    def _read_units(self, segment: int) -> tuple[tuple[pa.Array, pa.Array], int]:
        """(ids, descriptions) of a segment, and their size."""
        table = _read_table(self._paths[segment], ["unit_id", "description"])
        return (table["unit_id"].combine_chunks(), table["description"].combine_chunks()), table.nbytes

    def _read_sizes(self, segment: int) -> tuple[UnitSizes, int]:
        sizes = self._sizes_of(segment)
        return sizes, sizes.kinds.nbytes + sizes.samples.nbytes + sizes.bytes.nbytes


UNREADABLE = (OSError, ValueError, pa.ArrowException)
"""Errors of pyarrow for a damaged file; for a name that is not UTF-8, a UnicodeDecodeError."""


def _read_table(path: Place, columns: Sequence[str]) -> pa.Table:
    """The columns of `columns` that a segment has; OutputError if it cannot be read."""
    try:
        with pq.ParquetFile(opened(path)) as file:
            table, rows = file.read([*columns]), file.metadata.num_rows
        table.validate(full=True)
        for field, column in zip(table.schema, table.columns, strict=True):
            expected = SCHEMA.field(field.name)
            if field.type != expected.type or (column.null_count and not expected.nullable):
                raise ValueError(f"its column {field.name} is none of a manifest")
        if table.num_rows != rows:
            raise ValueError(f"it has {table.num_rows} units, and says {rows}")
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    return table


def _unreadable(path: Place, error: Exception | str) -> OutputError:
    return OutputError(f"{path} cannot be read: {error}")
