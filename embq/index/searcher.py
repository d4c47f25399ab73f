"""Opens a version of an index and finds the rows nearest to a vector."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from embq.core.errors import EmbqError, InputError
from embq.core.filter.condition import Condition
from embq.index.collection.collection import faults
from embq.index.faiss_module import faiss, set_threads
from embq.index.filter.columns import ColumnValues, column_values
from embq.index.filter.selection import Selection, Selections
from embq.index.index_files.identity import Identity
from embq.index.index_files.lists import Stack, empty_lists, read_lists
from embq.index.index_files.rows import RowsFiles
from embq.index.index_files.template import Template, packed
from embq.index.index_files.version import Version, open_current, read_version

MEMORIES = ("ram", "mmap")
"""Storage of lists: loaded into memory, or memory-mapped from their files."""

MORE_LISTS = 3
"""Factor by which lists grow until the best rows of a filtered search settle. The tuned number, divided by the share of
rows that are searched among, would do for a filter that has nothing to do with the vectors. For one that selects some
of their clusters, far from the query, it gives recalls of 0.8 (1,000,000 rows in 3,000 clusters, 10 %)."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Answers, best first.

    Attributes:
        ids: int64 (queries, k); -1 if there are no more.
        scores: float32 (queries, k). Cosines for vectors of length 1, inner products with metric "ip"; with "l2"
            squared distances, of which the smallest is the best. What belongs to no row is -inf, or inf.
    """

    ids: np.ndarray
    scores: np.ndarray


class Searcher:
    """An open index. One thread at a time searches it; further ones need a `Searcher` of their own.

    Attributes:
        version: what is open; it stays as it is when a later version is published.
    """

    def __init__(
        self, version: Version, *, memory: str = "ram", threads: int = 1, piece: tuple[int, int] = (0, 1)
    ) -> None:
        if memory not in MEMORIES:
            raise ValueError(memory)
        self.version = version
        self.threads = threads
        index = version.index
        self._template = Template.read(version.trained.check(index))
        mapped = memory == "mmap"
        # Several groups are copied into one when they are loaded: read from their files, they are in memory once.
        in_files = mapped or len(version.groups) > 1
        groups = [
            [
                read_lists(file.check(index), mapped=in_files)
                if at in _of_piece(len(group), piece)
                else empty_lists(file.last - file.first, self._template.code_size)
                for at, file in enumerate(group)
            ]
            for group in version.groups
        ]
        stack = Stack(groups, code_size=self._template.code_size, merged=not mapped)
        self._template.hold(stack.lists, version.next_id - version.excluded, owner=stack)
        if not mapped:
            packed(self._template)
        self._rows = RowsFiles(version, self.dim) if version.rows else None
        # Opened here and not when it is first asked for: by then its files may have been swept away.
        self._identity = Identity.open([(file.check(index), file.first_id, file.rows) for file in version.identity])
        self._has_all_lists = piece[1] == 1
        self._bits = None
        self._selector = None
        if version.deleted_file is not None:
            self._bits = np.zeros(-(-version.next_id // 8), np.uint8)
            stored = np.fromfile(version.deleted_file.check(index), np.uint8)[: len(self._bits)]
            self._bits[: len(stored)] = stored
        if self._bits is not None and version.deleted > version.dropped:
            inner = faiss().IDSelectorBitmap(self._bits)
            self._selector = faiss().IDSelectorNot(inner)
            self._inner = inner  # the outer one only points to it
        self._selections = Selections(self._identity, version.next_id, self._bits)
        self._columns: tuple[ColumnValues, ...] | None = None

    @classmethod
    def open(
        cls,
        index: Path,
        *,
        memory: str = "ram",
        threads: int = 1,
        version: str | None = None,
        piece: tuple[int, int] = (0, 1),
    ) -> Searcher:
        """The current version of an index, or the one named.

        Args:
            piece: (i, k): only the i-th of k pieces of the lists, for a machine that has no room for all of them. The
                best answers of all k pieces together are those of the whole.

        Raises InputError if there is none, OutputError if a file of it is missing or damaged.
        """
        if version is not None:
            return cls(read_version(index, version), memory=memory, threads=threads, piece=piece)
        return open_current(index, lambda current: cls(current, memory=memory, threads=threads, piece=piece))

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.version.plan.dim

    @property
    def n(self) -> int:
        """Rows that can be an answer."""
        return self.version.n

    @property
    def nlist(self) -> int:
        """Number of lists."""
        return self._template.nlist

    @property
    def refines(self) -> bool:
        """True if it can re-rank by the vectors themselves."""
        return self._rows is not None

    def search(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        nprobe: int | None = None,
        k_factor: int | None = None,
        refine: bool | None = None,
        among: Selection | None = None,
        fill: bool = False,
    ) -> SearchResult:
        """The k best rows for each query.

        Args:
            vectors: float32 (queries, dim); for cosines of length 1.
            nprobe: lists to look at; None for what tuning chose, and as many more as `among` and `fill` need.
            k_factor: how many times k candidates are re-ranked by their vectors; None for what tuning chose.
            refine: False re-ranks nothing, None what can be.
            among: the rows that may be found, as `select` gives them; None for all.
            fill: look at more lists where fewer than k rows are found and there are more.

        Few rows to choose `among` are compared one by one, where the index has their vectors. For more of them the
        number of lists grows as their share falls, and then until the best rows settle.

        Raises InputError `wrong_dimension` if the vectors have another length than the rows.
        """
        queries, k = np.ascontiguousarray(vectors, dtype=np.float32), int(k)  # faiss takes no number of numpy
        nprobe = None if nprobe is None else int(nprobe)
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise InputError(
                f"the index holds vectors of {self.dim} numbers, the query has shape {queries.shape}",
                next_step="embed the query with the index's own model",
                code="wrong_dimension",
            )
        defaults = self.version.search
        factor = k_factor or defaults.get("k_factor", 1)
        reranks = self._rows is not None and refine is not False and factor > 1
        one_by_one = self._rows is not None and self._has_all_lists and refine is not False and nprobe is None
        if one_by_one and among is not None and among.ids is not None:
            ids = self._with_direction(among.ids)
            return _padded(*self._reranked(queries, np.tile(ids, (len(queries), 1)), k), k, self._worst)
        # The nearest of some rows are farther away than the nearest of all, and codes tell them apart less well.
        factor = factor if among is None or k_factor else 2 * factor
        depth = max(1, min(k * factor if reranks else k, self.version.next_id))
        set_threads(self.threads)
        distances, ids = self._probed(queries, depth, k, nprobe, among, fill)
        if reranks and self._rows is not None:
            return _padded(*self._reranked(queries, ids, k), k, self._worst)
        return _padded(ids, self._scores(distances), k, self._worst)

    def _probed(
        self, queries: np.ndarray, depth: int, k: int, nprobe: int | None, among: Selection | None, fill: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Distances and ids of the `depth` best rows by their codes, and of at least k if there are as many."""
        probes = nprobe or self.version.search.get("nprobe", 1)
        selector, matching, grows = self._selector, self.n, nprobe is None and (fill or among is not None)
        if among is not None:
            selector, matching = faiss().IDSelectorBitmap(among.bits), among.count
            probes = math.ceil(probes * self.n / max(1, matching)) if grows else probes
        transformed = self._template.transformed(queries)
        previous: np.ndarray | None = None
        while True:
            probes = min(self.nlist, probes)
            parameters = faiss().SearchParametersIVF(nprobe=probes, sel=selector)
            distances, ids = self._template.ivf.search(transformed, depth, params=parameters)
            enough = (ids >= 0).sum(axis=1).min(initial=k) >= min(k, matching)
            settled = among is None or (previous is not None and _settled(previous, ids[:, :k]))
            if not grows or probes == self.nlist or (enough and settled):
                return distances, ids
            previous, probes = ids[:, :k], MORE_LISTS * probes

    @property
    def _worst(self) -> float:
        return np.inf if self.version.plan.metric == "l2" else -np.inf

    def _scores(self, distances: np.ndarray) -> np.ndarray:
        if self.version.plan.metric == "cosine":
            return np.asarray(1.0 - distances / 2.0, dtype=np.float32)
        return distances

    def _reranked(self, queries: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The best k of the candidates of each query, by their vectors."""
        assert self._rows is not None
        set_threads(1)  # one query at a time: further threads would only be waited for
        most = min(k, ids.shape[1])
        best_ids = np.full((len(queries), most), -1, np.int64)
        best = np.full((len(queries), most), self._worst, np.float32)
        for at, (query, row) in enumerate(zip(queries, ids, strict=True)):
            candidates = row[row >= 0]
            if not len(candidates):
                continue
            order, scores = self._rows.nearest(query, candidates, most)
            best_ids[at, : len(order)] = candidates[order]
            best[at, : len(order)] = scores
        return best_ids, best

    def _with_direction(self, ids: np.ndarray) -> np.ndarray:
        """The ids without those of rows that are in no list: their vectors are `faults`."""
        if not self.version.excluded or self._rows is None:
            return ids
        valid: np.ndarray = ids[~faults(self._rows.read(ids), self.version.plan.metric)]
        return valid

    def select(self, conditions: Iterable[Condition]) -> Selection:
        """The rows that satisfy all conditions, for `search`. Selections that were made last are kept.

        Raises InputError `no_column` and `bad_filter` if a condition does not fit the columns.
        """
        return self._selections.of(conditions)

    def columns(self) -> tuple[ColumnValues, ...]:
        """The columns that conditions may be about, with the values of those that have few; found at the first call."""
        if self._columns is None:
            self._columns = column_values(self._identity, self._bits)
        return self._columns

    def rows(self, ids: np.ndarray, columns: list[str] | None = None) -> pa.Table:
        """Identity of rows: id, key, caption, source, unit_id and metadata, in the order of the ids; -1 is left out."""
        return self._identity.rows(ids, columns)

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """Vectors of rows, float32 (n, dim): what re-ranking uses, or what the code of a row stands for.

        Raises InputError if the index keeps neither.
        """
        row_ids = np.asarray(ids, np.int64)
        if self._rows is not None:
            return self._rows.read(row_ids)
        try:
            return self._template.decoded(row_ids)
        except RuntimeError as error:
            raise InputError(
                "the index keeps no vectors of its rows", next_step="build it with --refine fp16", code="no_vectors"
            ) from error

    def vectors_of(self, ids: np.ndarray) -> np.ndarray:
        """Vectors of rows, float32 (n, dim): of the index where it keeps them, else of what was indexed.

        Raises InputError `no_vectors` if neither has them any more.
        """
        try:
            return self.vectors(ids)
        except InputError as error:
            if error.code != "no_vectors":
                raise
            try:
                ascending, places = np.unique(np.asarray(ids, np.int64), return_inverse=True)
                vectors: np.ndarray = self.version.collection.read_rows_at(ascending)[places]
                return vectors
            except EmbqError as missing:
                raise InputError(
                    "the index keeps no vectors of its rows, and they cannot be read where they were: "
                    f"{missing.message}",
                    next_step=error.next_step,
                    code="no_vectors",
                ) from missing

    def close(self) -> None:
        """Let the files go."""
        self._rows = None
        self._identity = Identity([])
        self._selections = Selections(self._identity, 0, None)


def _settled(previous: np.ndarray, now: np.ndarray) -> bool:
    """True if more lists have changed one in a hundred of the best rows of a query, or fewer."""
    new = [int(np.isin(ids, previous_ids, invert=True).sum()) for previous_ids, ids in zip(previous, now, strict=True)]
    most_new: int = now.shape[1] // 100
    return max(new, default=0) <= most_new


def _of_piece(ranges: int, piece: tuple[int, int]) -> range:
    """Ranges of lists of a group that belong to the i-th of k pieces."""
    at, pieces = piece
    return range(ranges * at // pieces, ranges * (at + 1) // pieces)


def _padded(ids: np.ndarray, scores: np.ndarray, k: int, worst: float) -> SearchResult:
    scores = np.where(ids < 0, np.float32(worst), scores).astype(np.float32)
    if (short := k - ids.shape[1]) > 0:
        ids = np.pad(ids, ((0, 0), (0, short)), constant_values=-1)
        scores = np.pad(scores, ((0, 0), (0, short)), constant_values=worst)
    return SearchResult(ids=ids, scores=scores)
