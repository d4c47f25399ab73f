"""A map in memory for its page: points, colours by column, and the rows inside a shape."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import Meta

from embq.core.errors import InputError
from embq.index.atlas.map_file import OWN, MapInfo, map_path, read_columns, read_info

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_SHOWN = 200_000
"""Points that a page draws; of larger maps a sample, while a selection is made among all."""

MOST_ENTRIES = 64
"""Different values with a colour of their own; the rarest are "other"."""

FEW, BINS = 12, 8
"""Numbers with up to FEW different values are shown as values, others in BINS ranges with as many rows each."""

NONE = 255
"""Code of a row without a value."""

MOST_HELD = 4
"""Maps, and columns of each, in memory; a map of 2 million rows takes 32 MB."""

MOST_NAME = 120
"""Characters of a value in a legend."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is selected: the inside of a polygon, or the rows with one colour.

    Attributes:
        polygon: corners in the coordinates of the map.
        column: a column of colours; `code` is one of its codes.
    """

    polygon: Annotated[tuple[tuple[float, float], ...], Meta(max_length=1_000)] = ()
    column: Annotated[str, Meta(max_length=1_000)] = ""
    code: Annotated[int, Meta(ge=0, le=NONE)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Colours:
    """The colours of a map by one column.

    Attributes:
        kind: "category", or "number" if the entries are ranges in ascending order.
        entries: (name, rows) of each code.
        codes: uint8 (rows,).
    """

    kind: str
    entries: list[tuple[str, int]]
    codes: NDArray[np.uint8]


class LoadedMap:
    """A map whose coordinates are in memory. Methods may be called by several threads.

    Attributes:
        columns: those that give colours.
    """

    def __init__(self, path: Path, info: MapInfo) -> None:
        self.path, self.info = path, info
        table = read_columns(path, ["id", "x", "y"])
        self._ids = table["id"].to_numpy()
        self._at = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
        shown = np.random.default_rng(0).choice(len(self._ids), min(MOST_SHOWN, len(self._ids)), replace=False)
        self._shown = np.sort(shown)
        own = {*OWN, "metadata"}
        self.columns = ["cluster", "source", *(name for name in pq.read_schema(path).names if name not in own)]
        self._colours = lru_cache(MOST_HELD)(self._read_colours)
        self._lock = threading.Lock()

    def points(self) -> bytes:
        """The points that are drawn: ids as float64, x as float32, y as float32, behind a JSON head.

        The head has the count of points, and [x, y, text] of each label, that of the largest cluster first.
        """
        at = self._at[self._shown]
        arrays = [self._ids[self._shown].astype("<f8"), at[:, 0].astype("<f4"), at[:, 1].astype("<f4")]
        labels = [[cluster.x, cluster.y, cluster.label] for cluster in self.info.clusters if cluster.label]
        return _frame({"points": len(self._shown), "labels": labels}, arrays)

    def colours(self, column: str) -> bytes:
        """The code of each point that is drawn as uint8, behind a JSON head with the legend.

        Raises InputError `no_column` for one that gives no colours.
        """
        colours = self._colours_by(column)
        entries = [{"name": name, "rows": rows} for name, rows in colours.entries]
        return _frame({"kind": colours.kind, "entries": entries}, [colours.codes[self._shown]])

    def select(self, shape: Shape) -> bytes:
        """Ids of the rows in a shape, of all rows of the map: one per line, ascending."""
        if shape.column:
            chosen = self._colours_by(shape.column).codes == shape.code
        else:
            chosen = inside(self._at, np.array(shape.polygon, np.float64).reshape(-1, 2))
        return "".join(f"{id_}\n" for id_ in self._ids[chosen].tolist()).encode()

    def _colours_by(self, column: str) -> Colours:
        if column not in self.columns:
            raise InputError(
                f"the map has no colours by {column[:100]!r}",
                next_step=f"choose one of: {', '.join(self.columns)[:500]}",
                code="no_column",
            )
        with self._lock:
            return self._colours(column)

    def _read_colours(self, column: str) -> Colours:
        values = read_columns(self.path, [column])[column]
        if column != "cluster":
            return _colours(values)
        names = [cluster.label or f"cluster {number}" for number, cluster in enumerate(self.info.clusters)]
        entries = [(name, cluster.rows) for name, cluster in zip(names, self.info.clusters, strict=True)]
        return Colours(kind="category", entries=entries, codes=values.to_numpy().astype(np.uint8))


class LoadedMaps:
    """The maps of some indexes; one whose file was replaced is loaded again."""

    def __init__(self) -> None:
        self._loaded = lru_cache(MOST_HELD)(lambda path, _identity: LoadedMap(path, read_info(path)))
        self._lock = threading.Lock()

    def of(self, index: Path) -> LoadedMap:
        """The map of an index; errors of `read_info`."""
        path = map_path(index)
        identity = None
        with suppress(OSError):
            status = path.stat()
            identity = (status.st_ino, status.st_mtime_ns)
        with self._lock:
            return self._loaded(path, identity)


def inside(at: np.ndarray, polygon: np.ndarray) -> np.ndarray:
    """Which points are inside a polygon, by the even-odd rule: bool (n,).

    Args:
        at: (n, 2).
        polygon: (corners, 2); fewer than three hold nothing.
    """
    mask = np.zeros(len(at), bool)
    if len(polygon) < 3:
        return mask
    near = np.flatnonzero(((at >= polygon.min(axis=0)) & (at <= polygon.max(axis=0))).all(axis=1))
    x, y = at[near, 0].astype(np.float64), at[near, 1].astype(np.float64)
    odd = np.zeros(len(near), bool)
    for (x1, y1), (x2, y2) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        if y1 != y2:
            crosses = (y1 > y) != (y2 > y)
            odd ^= crosses & (x < (x2 - x1) * (y - y1) / (y2 - y1) + x1)
    mask[near] = odd
    return mask


def _colours(values: pa.ChunkedArray) -> Colours:
    type_ = values.type
    if pa.types.is_floating(type_):
        values = pc.if_else(pc.is_finite(values), values, pa.scalar(None, type_))
    if (pa.types.is_floating(type_) or pa.types.is_integer(type_)) and pc.count_distinct(values).as_py() > FEW:
        return _ranges(values)
    values = (values if pa.types.is_dictionary(type_) else values.dictionary_encode()).unify_dictionaries()
    names = values.chunk(0).dictionary if values.num_chunks else pa.array([], pa.string())
    if not pa.types.is_string(names.type):  # of few numbers, or of truth values
        names = pa.array(map(str, names.to_pylist()), pa.string())
    # By their numbers in the dictionary: a text that many rows share is not copied for each.
    numbers = np.concatenate([np.empty(0, np.int64), *(_numbers(chunk) for chunk in values.chunks)])
    counts = np.bincount(numbers + 1, minlength=len(names) + 1)[1:]
    ranked = np.flatnonzero(counts)
    if len(ranked):
        table = pa.table({"rows": counts[ranked], "name": names.take(pa.array(ranked))})
        most = len(ranked) if len(ranked) <= MOST_ENTRIES else MOST_ENTRIES - 1
        keys = [("rows", "descending"), ("name", "ascending")]
        ranked = ranked[pc.select_k_unstable(table, most, sort_keys=keys).to_numpy()]
    codes = np.full(len(names) + 1, len(ranked), np.uint8)
    codes[ranked + 1] = np.arange(len(ranked))
    codes[0] = NONE
    entries = [(names[number].as_py()[:MOST_NAME], int(counts[number])) for number in ranked.tolist()]
    other_rows = int(counts.sum() - counts[ranked].sum())
    return Colours(
        kind="category", entries=[*entries, *([("other", other_rows)] if other_rows else [])], codes=codes[numbers + 1]
    )


def _numbers(chunk: pa.DictionaryArray) -> np.ndarray:
    """The number of each value in the dictionary, -1 for null."""
    numbers: np.ndarray = chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _ranges(values: pa.ChunkedArray) -> Colours:
    numbers = values.cast(pa.float64()).to_numpy()  # NaN for null
    is_number = ~np.isnan(numbers)
    edges = np.unique(np.quantile(numbers[is_number], np.linspace(0.0, 1.0, BINS + 1)))
    codes = np.full(len(numbers), NONE, np.uint8)
    codes[is_number] = np.searchsorted(edges[1:-1], numbers[is_number], side="right")
    counts = np.bincount(codes[is_number], minlength=len(edges) - 1)
    names = [f"{low:.6g} to {high:.6g}" for low, high in pairwise(edges)]
    return Colours(
        kind="number", entries=[(name, int(rows)) for name, rows in zip(names, counts, strict=True)], codes=codes
    )


def _frame(head: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Bytes of the head in 4, the head as JSON padded so that arrays begin at a multiple of 8, the arrays."""
    text = json.dumps(head).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return b"".join([struct.pack("<I", len(text)), text, *(array.tobytes() for array in arrays)])
