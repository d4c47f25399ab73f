"""The map of an index: a parquet file beside its versions, made from the current one, and its reader.

```
INDEX/map.parquet     id, x, y, cluster, label, key, caption, source, metadata; one row per point, by id
```

The file's metadata has a `MapInfo` as JSON below the key "embq". A later map replaces it as a whole. It is derived: no
record names it, and no search needs it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embq.core import wire
from embq.core.errors import InputError, MalformedError, command_line
from embq.core.formats.part import is_plain
from embq.core.storage.beneath import require_regular
from embq.core.storage.durable import denied, drop, publish
from embq.index.atlas.labels import CAPTIONS, labels
from embq.index.atlas.projection import clusters, plane, reduce
from embq.index.change.deletes import deleted_bits
from embq.index.index_files.files import MAP, disk_error, index_lock
from embq.index.index_files.identity import Identity
from embq.index.index_files.lists import is_set
from embq.index.index_files.rows import RowsFiles
from embq.index.index_files.version import Version, open_current, read_current

NOTE = b"embq"
SCHEMA = 1

MOST_ROWS = 2_000_000
"""Points of a map. More would hide each other."""

MOST_TEXT = 300
"""Characters of a caption, and of each other text."""

MOST_VALUE_BYTES = 4 * MOST_TEXT + 16
"""Limit of a value: a text in UTF-8, with what the format adds."""

PAGE_BYTES = 1 << 20
"""Bytes that the format may add to a column of few rows."""

NOTE_BYTES = 1 << 20

OWN = ("id", "x", "y", "cluster", "label", "key", "caption", "source")
"""Columns of every map; those of metadata follow, under another name if one is taken."""

Say = Callable[[str], None]
"""Called with the name of a step when it begins."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster.

    Attributes:
        label: its words; "" if it has none.
        x, y: its point where most of its others are.
        rows: how many.
    """

    label: str
    x: float
    y: float
    rows: int


class MapInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Origin and summary of a map.

    Attributes:
        version: of the index, such as v0003.
        created: time of its publication.
        build: of the index; maps of another build have other ids.
        fingerprint: of the model that made the vectors; None if it is not known.
        method: one of `projection.METHODS`.
        sample: most rows that were asked for.
        seed: of sample, clusters and UMAP.
        rows: points of the map.
        of: rows of the index that can be found.
        shares: of the variance that the first two principal axes hold.
        clusters: by number.
    """

    schema: int
    version: str
    created: str
    build: str
    fingerprint: str | None
    method: str
    sample: int
    seed: int
    rows: int
    of: int
    shares: tuple[float, float]
    clusters: tuple[Cluster, ...]

    def fits(self, version: Version, options: MapOptions) -> bool:
        """True if a map of this version with these options would be the same."""
        mine = (self.version, self.created, self.build, self.fingerprint, self.method, self.sample, self.seed)
        origin = (version.name, version.created, version.build, version.collection.fingerprint)
        return mine == (*origin, options.method, options.sample, options.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapOptions:
    """Options of a map, as in `MapInfo`."""

    method: str = "umap"
    sample: int = MOST_ROWS
    seed: int = 1234


def map_path(index: Path) -> Path:
    """The map of an index, which may be missing."""
    return index / MAP


def read_info(path: Path) -> MapInfo:
    """Origin and summary of a map. Raises InputError `no_map` if there is none, `bad_map` if it is damaged."""
    try:
        with pq.ParquetFile(require_regular(path)) as file:
            data = (file.schema_arrow.metadata or {}).get(NOTE, b"")
            info = wire.read(MapInfo, data, what="metadata of the map", most_bytes=NOTE_BYTES)
            if info.schema != SCHEMA or tuple(file.schema_arrow.names[: len(OWN)]) != OWN:
                raise ValueError("it is of another version of embq")
            if file.metadata.num_rows != info.rows:
                raise ValueError(f"it has {file.metadata.num_rows:,} rows and not {info.rows:,}")
            _refuse_large(file)
    except FileNotFoundError as error:
        raise InputError(
            f"there is no map {path}", next_step=command_line("atlas", path.parent), code="no_map"
        ) from error
    except (OSError, ValueError, pa.ArrowException, MalformedError) as error:
        raise denied(error, path) or _damaged(path, error) from error
    return info


def _refuse_large(file: pq.ParquetFile) -> None:
    """ValueError if a file has other columns than a map, or such that take more memory than those of a map can."""
    rows = file.metadata.num_rows
    if rows > MOST_ROWS:
        raise ValueError(f"it has {rows:,} rows, a map has at most {MOST_ROWS:,}")
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_floating, pa.types.is_integer)
    for number, field in enumerate(file.schema_arrow):
        is_kind = kinds[number] if number < len(kinds) else is_plain
        if not is_kind(field.type):
            raise ValueError(f"its column {field.name} is of type {field.type}")
    for group in map(file.metadata.row_group, range(file.num_row_groups)):
        most = MOST_VALUE_BYTES * group.num_rows + PAGE_BYTES
        for column in map(group.column, range(group.num_columns)):
            if column.total_uncompressed_size > most or "DELTA" in " ".join(column.encodings):
                raise ValueError(f"its column {column.path_in_schema} is not one of a map")


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Some columns of a map, texts as dictionaries; InputError `bad_map` if they cannot be read.

    A text that many rows share is in memory once.
    """
    try:
        with pq.ParquetFile(require_regular(path), memory_map=True, read_dictionary=columns) as file:
            table = file.read(list(columns))
        for chunk in (chunk for column in table.columns for chunk in column.chunks):
            is_text = pa.types.is_dictionary(chunk.type)
            if is_text and (pc.max(pc.binary_length(chunk.dictionary)).as_py() or 0) > MOST_VALUE_BYTES:
                raise ValueError(f"it has texts of more than {MOST_TEXT} characters")
        return table
    except (OSError, ValueError, pa.ArrowException) as error:
        raise denied(error, path) or _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} cannot be read: {error}", next_step=command_line("atlas", path.parent), code="bad_map")


def make_map(index: Path, options: MapOptions, say: Say = lambda _step: None) -> tuple[MapInfo, bool]:
    """The map of the current version of an index, and whether it was made now: one that fits is kept.

    Memory: 250 bytes for each point, and a block of vectors.

    Raises TryLaterError if another process is at work on the index; InputError if it is missing or has no rows;
    OutputError if the map cannot be written.
    """
    with suppress(InputError):
        if (info := read_info(map_path(index))).fits(read_current(index), options):
            return info, False
    with index_lock(index):
        return open_current(index, lambda version: _make(version, options, say)), True


def _make(version: Version, options: MapOptions, say: Say) -> MapInfo:
    spans = [(file.check(version.index), file.first_id, file.rows) for file in version.identity]
    identity = Identity.open(spans)
    read = RowsFiles(version, version.plan.dim).read if version.rows else version.collection.read_rows_at
    say("reading vectors")
    reduced = reduce(read, _sampled(version, options), version.plan.dim)
    if not len(reduced.ids):
        raise InputError(f"{version.index} has no row to show", next_step="add rows: embq index OUT", code="no_rows")
    say("clusters")
    cluster = clusters(reduced.points, options.seed)
    say("coordinates")
    at = plane(reduced.points, options.method, options.seed)
    say("labels")
    names = labels(_texts(identity, reduced.ids, cluster, options.seed))
    middles = [_densest(at[cluster == number], np.ptp(at, axis=0) / 16) for number in range(len(names))]
    sizes = np.bincount(cluster, minlength=len(names))
    info = MapInfo(
        schema=SCHEMA,
        version=version.name,
        created=version.created,
        build=version.build,
        fingerprint=version.collection.fingerprint,
        method=options.method,
        sample=options.sample,
        seed=options.seed,
        rows=len(reduced.ids),
        of=version.n,
        shares=(float(reduced.shares[0]), float(reduced.shares[1]) if len(reduced.shares) > 1 else 0.0),
        clusters=tuple(
            Cluster(label=name, x=float(x), y=float(y), rows=int(rows))
            for name, (x, y), rows in zip(names, middles, sizes, strict=True)
        ),
    )
    say("writing")
    _write(version.index, info, identity, reduced.ids, at, cluster)
    return info


def _densest(at: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """The point nearest to the median of those in the fullest cell: a cluster may be a ring, or islands."""
    cells, where = np.unique(np.floor(at / np.maximum(cell, 1e-12)), axis=0, return_inverse=True)
    in_fullest = at[where.ravel() == np.bincount(where.ravel(), minlength=len(cells)).argmax()]
    return np.asarray(in_fullest[((in_fullest - np.median(in_fullest, axis=0)) ** 2).sum(axis=1).argmin()])


def _sampled(version: Version, options: MapOptions) -> np.ndarray:
    """Ids of the rows that can be an answer, all or a sample of them, ascending."""
    ids = np.arange(version.next_id, dtype=np.int64)
    if version.deleted:
        ids = ids[~is_set(deleted_bits(version), ids)]
    most = min(options.sample, MOST_ROWS)
    if len(ids) <= most:
        return ids
    return np.sort(np.random.default_rng(options.seed).choice(ids, most, replace=False))


def _texts(identity: Identity, ids: np.ndarray, cluster: np.ndarray, seed: int) -> list[list[str]]:
    """Captions of a sample of each cluster; if there is none at all, their texts of metadata, without which none."""
    random = np.random.default_rng(seed)
    chosen = np.zeros(len(ids), bool)
    for number in range(int(cluster.max()) + 1):
        members = np.flatnonzero(cluster == number)
        chosen[random.permutation(members)[:CAPTIONS]] = True
    ids, cluster = ids[chosen], cluster[chosen]
    captions: list[list[str]] = [[] for _ in range(int(cluster.max()) + 1)]
    metadata_texts: list[list[str]] = [[] for _ in captions]
    for table, start in _rows(identity, ids):
        fields = [field.name for field in table.schema if pa.types.is_string(field.type) and field.name not in OWN]
        fields = [name for name in fields if name != "unit_id"]
        for row, number in zip(table.to_pylist(), cluster[start:].tolist(), strict=False):
            if row["caption"]:
                captions[number].append(row["caption"])
            elif fields:
                metadata_texts[number].append(" ".join(row[name] or "" for name in fields))
    return captions if any(captions) else metadata_texts


def _rows(identity: Identity, ids: np.ndarray) -> Iterator[tuple[pa.Table, int]]:
    """(rows with some of the ids, position of the first) in the order of the ids, which are ascending; texts are cut
    to `MOST_TEXT`."""
    start = first = 0
    for table in identity.tables():
        stop = int(np.searchsorted(ids, table["id"][table.num_rows - 1].as_py(), side="right"))
        if stop > start:
            first = table["id"][0].as_py()
            places = pa.array(ids[start:stop] - first)
            # Column by column: texts that are cut are small, whatever they were.
            yield pa.table({name: _cut(table[name].take(places)) for name in table.column_names}), start
        start = stop


def _write(
    index: Path, info: MapInfo, identity: Identity, ids: np.ndarray, at: np.ndarray, cluster: np.ndarray
) -> None:
    names = pa.array([entry.label or f"cluster {number}" for number, entry in enumerate(info.clusters)], pa.string())
    renamed = _renamed([name for name in identity.schema.names if name not in ("id", "unit_id", *OWN[5:])])
    note = {NOTE: json.dumps(msgspec.to_builtins(info)).encode()}
    path = map_path(index)
    temporary = index / f".{MAP}.{secrets.token_hex(4)}"
    writer: pq.ParquetWriter | None = None
    try:
        for table, start in _rows(identity, ids):
            here = slice(start, start + table.num_rows)
            columns: dict[str, Any] = {
                "id": table["id"],
                "x": pa.array(at[here, 0]),
                "y": pa.array(at[here, 1]),
                "cluster": pa.array(cluster[here]),
                "label": names.take(pa.array(cluster[here])),
                **{name: table[name] for name in OWN[5:]},
                **{renamed[name]: table[name] for name in renamed},
            }
            block = pa.table(columns).replace_schema_metadata(note)
            if writer is None:
                writer = pq.ParquetWriter(temporary, block.schema, compression="zstd")
            writer.write_table(block)
        assert writer is not None
        writer.close()
        publish(temporary, path)
    except OSError as error:
        drop(temporary)
        raise disk_error(error, path) from error


def _cut(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.utf8_slice_codeunits(column, 0, MOST_TEXT) if pa.types.is_string(column.type) else column


def _renamed(columns: Sequence[str]) -> dict[str, str]:
    """Column of metadata -> its name in the map. Names that differ by case only are one name to DuckDB."""
    taken = {name.casefold() for name in OWN}
    new_names = {}
    for name in columns:
        new = name
        while new.casefold() in taken:
            new = f"metadata_{new}"
        taken.add(new.casefold())
        new_names[name] = new
    return new_names
