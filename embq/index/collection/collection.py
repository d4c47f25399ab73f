"""A collection: rows with dense ids from 0, each with a vector and an identity, read from its parts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from embq.core.errors import InputError
from embq.core.storage.paths import Place
from embq.core.units import content_hash
from embq.core.wire import FileName, RelativePath
from embq.index.collection.columns import Columns
from embq.index.collection.parts import Block, PartReader, PartRef, blocks_of, check_all, check_unchanged, rows_at
from embq.index.collection.plain import FORMATS, PlainReader
from embq.index.collection.run import RunReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Rows, and where their vectors and identity are read from.

    Attributes:
        root: folder or URL that the paths of the parts' files are relative to.
        kind: "run", or for plain folders "npy", "parquet", "hdf5" or "clip-retrieval".
        column: the column of vectors that is indexed.
        output: what it is called, as the name of a folder.
        dim: numbers of a vector as it is restored to floats.
        unit_length: whether the vectors have length 1, by the record of the run or by a sample.
        parts: in order of their ids, without gaps.
        complete: False for a run that is still under way.
        rows_spec: `embq.core.rows.spec.RowSpec.describe()` of a run, else {}.
        model: what made the vectors, if that is known: `embq.core.models.ModelConfig.describe()`, and under "output"
            the name, spec and modality of the output that is indexed.
        fingerprint: of the model that made the vectors, if that is known.
        run: id of the run.
        id_columns: columns of metadata in the identity.
        query_columns: modality -> column of other vectors of the same rows that the same joint model made of it.
        id_types: their types in a plain folder, by the names that `embq.core.rows.spec.COLUMN_TYPES` has for them.
        named: "key" and "caption" -> the column that they are, where a plain folder has such columns.
        empty: files that are passed over: they hold no rows, or show those of others.
        folders: where the collection is several folders, their paths below `root`, sorted; else ().
    """

    root: str
    kind: str
    column: str
    output: FileName
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
    folders: tuple[RelativePath, ...] = ()

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.parts[-1].first_id + self.parts[-1].rows if self.parts else 0

    @property
    def digest(self) -> str:
        """Hash of all that an index of it depends on; where the folder stands is no part of that."""
        described = msgspec.to_builtins(self)
        for name in ("root", "complete", "empty", "folders"):
            del described[name]
        return content_hash(described)

    @property
    def roots(self) -> list[str]:
        """The folders that it was opened from."""
        return [f"{self.root.rstrip('/')}/{folder}" for folder in self.folders] or [self.root]

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
        name = self._vector_column(column)
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
            column: as in `read_vectors`, which documents the errors as well.
        """
        name = self._vector_column(column)
        rows = np.empty((len(ids), self.dim), np.float32)
        if not len(ids):
            return rows
        if ids[0] < 0 or ids[-1] >= self.n or (np.diff(ids) < 0).any():
            raise ValueError(f"ids of {self.n} rows must be ascending: {ids}")
        reader, numbers = self._reader(), np.searchsorted([part.first_id for part in self.parts], ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            part, here = self.parts[number], numbers == number
            check_unchanged(self.root, part)
            rows[here] = rows_at(reader, part, name, ids[here] - part.first_id, self.dim)
        return rows

    def read_identity(self, first_id: int, stop_id: int) -> Iterator[pa.Table]:
        """id, key, caption, source, unit_id and the columns of metadata of these rows, in order; one schema for all.

        Raises as `read_vectors` does.
        """
        first = first_id
        for table in self._reader().identity(list(self._pieces(first_id, stop_id))):
            ids = pa.array(np.arange(first, first + table.num_rows))
            yield table.add_column(0, pa.field("id", pa.int64(), nullable=False), ids)
            first += table.num_rows

    def run_of(self, id_: int) -> Place | None:
        """Output folder of the run that a row is of; None if the collection is of plain files."""
        if self.kind != "run":
            return None
        return self._run_reader().run_of(self._part(id_))

    def ordinal_of(self, id_: int) -> int:
        """Position of a row of a run in its unit. Raises as `read_vectors` does."""
        part = self._part(id_)
        check_unchanged(self.root, part)
        return self._run_reader().ordinal(part, id_ - part.first_id)

    def check(self) -> None:
        """Raise InputError if a file is missing, or is not what it was; none is read."""
        check_all(self.root, self.parts)

    def _part(self, id_: int) -> PartRef:
        """The part in which a row stands."""
        if not 0 <= id_ < self.n:
            raise ValueError(f"id {id_} of {self.n}")
        return self.parts[bisect_right(self.parts, id_, key=lambda part: part.first_id) - 1]

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
        if self.kind == "run":
            return self._run_reader()
        columns = Columns(types=self.id_types, named=self.named)
        format_ = FORMATS["npy" if self.kind == "clip-retrieval" else self.kind]
        return PlainReader(format=format_, root=self.root, dim=self.dim, columns=columns)

    def _run_reader(self) -> RunReader:
        return RunReader(root=self.root, folders=self.folders, rows_spec=self.rows_spec, id_columns=self.id_columns)

    def _vector_column(self, column: str | None) -> str:
        if column is not None and column not in (self.column, *self.query_columns.values()):
            raise ValueError(f"no column of vectors {column!r}")
        return column or self.column

    # --- growth ---

    def grown_from(self, old: Collection) -> list[PartRef]:
        """The parts that were added since, with the ids behind the old ones.

        Raises InputError if an old part is gone or is another one now, or where these are other vectors.
        """
        self._check_kind(old)
        by_files = {part.files: part for part in self.parts}
        check_all(self.root, old.parts)
        for part in old.parts:
            if part.files not in by_files or by_files[part.files].rows != part.rows:
                raise InputError(
                    f"{part.files[0].path} is in the index and is no part of {self.root} any more",
                    next_step="bring it back, or build the index anew",
                    code="part_missing",
                )
        old_files = {part.files for part in old.parts}
        added, first = [], old.n
        for part in self.parts:
            if part.files not in old_files:
                added.append(replace(part, first_id=first))
                first += part.rows
        return added

    def continuing(self, old: Collection) -> Collection:
        """The same rows with the ids that the old ones had: its parts in their order, and behind them the new ones.

        Columns of metadata are those that the index has already. Raises as `grown_from` does.
        """
        parts = (*old.parts, *self.grown_from(old))
        return replace(self, parts=parts, id_columns=old.id_columns, id_types=old.id_types, named=old.named)

    def _check_kind(self, old: Collection) -> None:
        """Raise InputError if these are other vectors, or where metadata would not fit the old columns."""
        same = ["kind", "column", "dim", "rows_spec", "fingerprint"]
        if self.kind != "clip-retrieval":  # of which all columns are taken that there are
            same.append("id_columns")
        changed: dict[str, tuple[Any, Any]] = {name: (getattr(old, name), getattr(self, name)) for name in same}
        if bool(self.folders) != bool(old.folders):  # paths of parts begin with the folder if there are several
            changed["number of folders"] = (len(old.roots), len(self.roots))
        for name, type_ in old.id_types.items():
            if type_ != "string":  # which holds anything
                changed[f"column {name!r}"] = (type_, self.id_types.get(name))
        for name, (was, is_) in changed.items():
            if was != is_:
                raise InputError(
                    f"{self.root}: its {name} was {was} when the index was built, and is {is_}",
                    next_step="build the index anew",
                    code="other_embeddings",
                )


def faults(vectors: np.ndarray, metric: str = "cosine", largest: float = math.inf) -> np.ndarray:
    """Vectors that cannot be indexed: bool (n,), True if one is not finite, has no direction for the cosine, or has a
    number beyond the largest.

    Args:
        vectors: float32 (n, d).
        metric: "cosine", "l2" or "ip"; the distance and the inner product of a vector of zeros are numbers.
        largest: absolute value of a number that the index can keep.
    """
    squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)  # neither overflows nor vanishes there
    bad: np.ndarray = ~np.isfinite(squares) | ((squares == 0.0) & (metric == "cosine"))
    if len(long := np.flatnonzero(~bad & (squares > largest**2))):
        bad[long] = np.abs(vectors[long]).max(axis=1) > largest
    return bad
