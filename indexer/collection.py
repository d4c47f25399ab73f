"""What is indexed: rows with dense ids from 0, a vector each, and identity; of an embq run or of a plain folder."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from core.errors import InputError, UsageError
from core.objects import Place, place
from core.units import content_hash
from indexer.collections import hdf5, npy, parquet
from indexer.collections.base import Block, FileRef, PartReader, PartRef, blocks_of, check_unchanged, no_embeddings
from indexer.collections.clip_retrieval import LayoutReader, describe_layout, is_layout
from indexer.collections.hdf5 import Hdf5Reader, describe_hdf5
from indexer.collections.npy import NpyReader, describe_npy
from indexer.collections.parquet import ParquetReader, describe_parquet
from indexer.collections.plain import all_below
from indexer.collections.run import RunReader, describe_run

__all__ = ["Block", "Collection", "FileRef", "PartRef", "open_collection"]

READERS: dict[str, Callable[[Collection], PartReader]] = {
    "run": RunReader,
    "npy": NpyReader,
    "parquet": ParquetReader,
    "hdf5": Hdf5Reader,
    "clip-retrieval": LayoutReader,
}
"""Kind of collection -> what reads its parts."""

UNIT_LENGTH_PARTS, UNIT_LENGTH_ROWS = 16, 64
"""Where nobody says how long vectors are, so many of so many parts are looked at."""
UNIT_LENGTH_WITHIN = 1e-2
"""Of length 1: float16 is off by 1e-3, bfloat16 by 4e-3, int8 by a little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Rows, and where their vectors and identity are read from.

    Attributes:
        root: folder or URL that the paths of the parts' files are relative to.
        kind: "run", or for plain folders "npy", "parquet", "hdf5" or "clip-retrieval".
        column: the column of vectors that is indexed.
        output: what it is called, as the name of a folder.
        dim: numbers of a vector as it is restored to floats.
        unit_length: whether the vectors have length 1: the run says so, or those of a sample have.
        parts: in order of their ids, without gaps.
        complete: False for a run that is still under way.
        rows_spec: `core.rows.RowSpec.describe()` of a run, else {}.
        model: what made the vectors, where that is known: `core.models.ModelConfig.describe()`, and under "output" the
            name, spec and modality of the output that is indexed.
        fingerprint: of the model that made the vectors, where that is known.
        run: id of the run.
        id_columns: columns of metadata in the identity.
        query_columns: modality -> column of other vectors of the same rows that the same joint model made of it.
        id_types: their types in a plain folder, by the names that `core.rows.COLUMN_TYPES` has for them.
        named: "key" and "caption" -> the column that they are, where a plain folder has such columns.
        empty: files that hold no rows, and are passed over.
    """

    root: str
    kind: str
    column: str
    output: str
    dim: int
    unit_length: bool
    parts: tuple[PartRef, ...]
    complete: bool = True
    rows_spec: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    fingerprint: str | None = None
    run: str | None = None
    id_columns: tuple[str, ...] = ()
    id_types: dict[str, str] = field(default_factory=dict)
    query_columns: dict[str, str] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    empty: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.parts[-1].first_id + self.parts[-1].rows if self.parts else 0

    @property
    def digest(self) -> str:
        """Hash of all that an index of it depends on; where the folder stands is no part of that."""
        described = self.describe()
        for name in ("root", "complete", "empty"):
            del described[name]
        return content_hash(described)

    def describe(self) -> dict[str, Any]:
        """The collection as JSON-ready values; `from_description` is its inverse."""
        described = {one.name: getattr(self, one.name) for one in fields(self)}
        parts = [part.describe() for part in self.parts]
        for part in parts:
            part["files"] = list(part["files"])
        lists = {name: list(described[name]) for name in ("id_columns", "empty")}
        return {**described, **lists, "parts": parts}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> Collection:
        """The collection that `describe` gave; KeyError or TypeError on any other shape."""
        parts = tuple(PartRef.from_description(part) for part in described["parts"])
        tuples = {name: tuple(described[name]) for name in ("id_columns", "empty")}
        return cls(**{**described, **tuples, "parts": parts})

    # --- reading ---

    def blocks(self, block_rows: int, start_id: int = 0) -> list[Block]:
        """Consecutive ranges of at most `block_rows` rows that cover all from `start_id` on; see `blocks_of`."""
        return blocks_of(self.parts, block_rows, start_id)

    def read_vectors(
        self, first_id: int, stop_id: int, *, column: str | None = None, batch_rows: int = 65_536
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(first id, float32 (m, dim)) of the rows from `first_id` up to `stop_id`, in order.

        All batches but the last have `batch_rows` rows, whatever the parts are. Each is the caller's own.

        Args:
            column: the one that is indexed, or one of `query_columns`.

        Raises InputError `part_missing`, `part_changed` or `part_damaged`.
        """
        name = self._known(column)
        first, filled = first_id, 0
        batch = np.empty((0, self.dim), np.float32)
        reader = self._reader()
        for part, start, stop in self._pieces(first_id, stop_id):
            for rows in reader.vectors(part, name, start, stop):
                while len(rows):
                    if filled == 0:
                        batch = np.empty((min(batch_rows, stop_id - first), self.dim), np.float32)
                    taken = rows[: len(batch) - filled]
                    batch[filled : filled + len(taken)] = taken
                    filled, rows = filled + len(taken), rows[len(taken) :]
                    if filled == len(batch):
                        yield first, batch
                        first, filled = first + filled, 0

    def read_rows_at(self, ids: np.ndarray, *, column: str | None = None) -> np.ndarray:
        """float32 (len(ids), dim): the vectors of these rows.

        Args:
            ids: int64, ascending.
            column: as in `read_vectors`, which says what is raised as well.
        """
        name = self._known(column)
        found = np.empty((len(ids), self.dim), np.float32)
        if not len(ids):
            return found
        if ids[0] < 0 or ids[-1] >= self.n or (np.diff(ids) < 0).any():
            raise ValueError(f"ids of {self.n} rows must be ascending: {ids}")
        reader, numbers = self._reader(), np.searchsorted([part.first_id for part in self.parts], ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            part, here = self.parts[number], numbers == number
            check_unchanged(self.root, part)
            found[here] = reader.rows_at(part, name, ids[here] - part.first_id)
        return found

    def read_identity(self, first_id: int, stop_id: int) -> Iterator[pa.Table]:
        """id, key, caption, source, unit_id and the columns of metadata of these rows, in order; one schema for all.

        Raises as `read_vectors` does.
        """
        reader = self._reader()
        pieces = list(self._pieces(first_id, stop_id))
        reader.prepare(pieces)
        first = first_id
        for part, start, stop in pieces:
            for table in reader.identity(part, start, stop):
                ids = pa.array(np.arange(first, first + table.num_rows))
                yield table.add_column(0, pa.field("id", pa.int64(), nullable=False), ids)
                first += table.num_rows

    def check(self) -> None:
        """Raise InputError where a file is missing, or is not what it was; none is read."""
        for part in self.parts:
            check_unchanged(self.root, part)

    def _pieces(self, first_id: int, stop_id: int) -> Iterator[tuple[PartRef, int, int]]:
        """(part, start, stop) of a range of ids, each part as it was listed."""
        if not 0 <= first_id <= stop_id <= self.n:
            raise ValueError(f"ids {first_id} to {stop_id} of {self.n}")
        number = bisect_right(self.parts, first_id, key=lambda part: part.first_id) - 1
        while first_id < stop_id:
            part = self.parts[number]
            start, stop = first_id - part.first_id, min(stop_id - part.first_id, part.rows)
            check_unchanged(self.root, part)
            yield part, start, stop
            number, first_id = number + 1, part.first_id + stop

    def _reader(self) -> PartReader:
        return READERS[self.kind](self)

    def _known(self, column: str | None) -> str:
        if column is not None and column not in (self.column, *self.query_columns.values()):
            raise ValueError(f"no column of vectors {column!r}")
        return column or self.column

    # --- growth ---

    def grown_from(self, old: Collection) -> list[PartRef]:
        """The parts that were added since, with the ids behind the old ones.

        Raises InputError where an old part is gone or is another one now, or where these are other vectors.
        """
        for name in ("kind", "column", "dim", "rows_spec", "fingerprint", "id_columns"):
            was, is_ = getattr(old, name), getattr(self, name)
            if was != is_:
                raise InputError(
                    f"{self.root}: its {name} was {was} when the index was built, and is {is_}",
                    next_step="build the index anew",
                    code="other_embeddings",
                )
        there = {part.files: part for part in self.parts}
        for part in old.parts:
            check_unchanged(self.root, part)
            if part.files not in there or there[part.files].rows != part.rows:
                raise InputError(
                    f"{part.files[0].path} is in the index and is no part of {self.root} any more",
                    next_step="bring it back, or build the index anew",
                    code="part_missing",
                )
        known = {part.files for part in old.parts}
        added, first = [], old.n
        for part in self.parts:
            if part.files not in known:
                added.append(replace(part, first_id=first))
                first += part.rows
        return added

    def continuing(self, old: Collection) -> Collection:
        """The same rows with the ids that the old ones had: its parts in their order, and behind them the new ones."""
        return replace(self, parts=(*old.parts, *self.grown_from(old)))


def open_collection(
    root: Path | str | Place,
    *,
    output: str | None = None,
    column: str | None = None,
    file_format: str | None = None,
    id_columns: Sequence[str] = (),
) -> Collection:
    """What is to be indexed.

    Args:
        root: output folder of a run, here or on an object store; or a folder of .npy, .parquet or .h5 files, or one
            such file.
        output: whose vectors, where a run has several (its "image" or "text", or the name of a model).
        column: name of the column of vectors; "embedding" for plain folders unless it is given.
        file_format: "npy", "parquet" or "hdf5" for plain folders; None finds out.
        id_columns: columns of metadata of plain folders; a run has its own.

    Raises InputError: `no_embeddings`, `which_output`, `mixed_embeddings`, `not_vectors`, `part_damaged`.
    """
    where = place(root)
    described = _described(where, output=output, column=column, file_format=file_format, id_columns=tuple(id_columns))
    base = where.parent if isinstance(where, Path) and where.is_file() else where
    known = described.pop("unit_length", None)
    collection = Collection(root=str(base), unit_length=bool(known), **described)
    return collection if known is not None else replace(collection, unit_length=_unit_length(collection))


def _described(
    where: Place, *, output: str | None, column: str | None, file_format: str | None, id_columns: tuple[str, ...]
) -> dict[str, Any]:
    if (where / "run.json").exists():
        if file_format is not None or id_columns:
            raise UsageError(f"{where} is the output of a run, which says itself what its files and columns are")
        return describe_run(where, output=output, column=column)
    if not isinstance(where, Path):
        raise InputError(
            f"{where} is no output of a run: other embeddings are read from folders of this machine",
            next_step="copy them to a folder",
            code="no_embeddings",
        )
    if not where.exists():
        raise InputError(f"{where} is not there", next_step="check the path", code="no_embeddings")
    if where.is_dir() and is_layout(where) and file_format in (None, "npy"):
        return describe_layout(where, output=output, id_columns=id_columns)
    format_ = file_format or _format_of(where)
    if format_ == "npy":
        if id_columns or column is not None:
            raise UsageError(f"{where}: .npy files have no columns", next_step="leave the names of columns out")
        described = describe_npy(where)
    elif format_ == "parquet":
        described = describe_parquet(where, column=column, id_columns=id_columns)
    elif format_ == "hdf5":
        described = describe_hdf5(where, column=column, id_columns=id_columns)
    else:
        raise UsageError(f"unknown format of files {format_!r}", next_step=f"use one of {', '.join(SUFFIXES)}")
    return described | ({} if output is None else {"output": output})


SUFFIXES = {"npy": npy.SUFFIXES, "parquet": parquet.SUFFIXES, "hdf5": hdf5.SUFFIXES}
"""Format of the files of a plain folder -> how their names end."""


def _format_of(where: Path) -> str:
    """The format of a plain folder; parquet files without vectors beside others are their metadata."""
    below = [where] if where.is_file() else all_below(where)
    first: dict[str, Path] = {}
    for path in below:
        for format_, suffixes in SUFFIXES.items():
            if path.name.endswith(suffixes):
                first.setdefault(format_, path)
    if len(first) > 1 and "parquet" in first and not parquet.has_vectors(first["parquet"]):
        del first["parquet"]
    if len(first) > 1:
        raise InputError(
            f"{where} holds embeddings in files of {len(first)} formats: {' and '.join(map(str, first.values()))}",
            next_step=f"give --file-format {' or '.join(first)}",
            code="mixed_embeddings",
        )
    if not first:
        everything = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise no_embeddings(
            f"{where} holds no embeddings: it is no output of a run, and there is no file that ends in {everything}",
            "name a folder with embeddings, or the output of a run",
        )
    return next(iter(first))


def _unit_length(collection: Collection) -> bool:
    """Whether the first vectors of parts from everywhere in the collection have length 1."""
    numbers = np.unique(np.linspace(0, len(collection.parts) - 1, UNIT_LENGTH_PARTS).astype(int))
    squares = []
    for part in (collection.parts[number] for number in numbers.tolist()):
        stop = part.first_id + min(part.rows, UNIT_LENGTH_ROWS)
        for _, vectors in collection.read_vectors(part.first_id, stop):
            squares.append(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    lengths = np.sqrt(np.concatenate(squares))
    looked_at = lengths[np.isfinite(lengths) & (lengths > 0.0)]  # others are counted elsewhere
    return bool(len(looked_at)) and bool((np.abs(looked_at - 1.0) < UNIT_LENGTH_WITHIN).all())
