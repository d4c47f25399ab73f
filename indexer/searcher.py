"""Opens a version of an index and finds the rows nearest to a vector."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from core.errors import EmbqError, InputError
from indexer.faiss_module import faiss, set_threads
from indexer.index_files.identity import Identity
from indexer.index_files.lists import Stack, empty_lists, read_lists
from indexer.index_files.rows import RowsFiles
from indexer.index_files.template import Template, packed
from indexer.index_files.version import Version, open_current, read_version

MEMORIES = ("ram", "mmap")
"""Storage of lists: loaded into memory, or memory-mapped from their files."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Answers, best first.

    Attributes:
        ids: int64 (queries, k); -1 where there are no more.
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
        # Several groups are copied into one where they are loaded: read from their files, they are in memory once.
        in_files = mapped or len(version.groups) > 1
        groups = [
            [
                read_lists(one.check(index), mapped=in_files)
                if at in _of_piece(len(group), piece)
                else empty_lists(one.last - one.first, self._template.code_size)
                for at, one in enumerate(group)
            ]
            for group in version.groups
        ]
        stack = Stack(groups, code_size=self._template.code_size, merged=not mapped)
        self._template.hold(stack.lists, version.next_id - version.excluded, owner=stack)
        if not mapped:
            packed(self._template)
        self._rows = RowsFiles(version, self.dim) if version.rows else None
        # Opened here and not when it is first asked for: by then its files may have been swept away.
        self._identity = Identity.open([(one.check(index), one.first_id, one.rows) for one in version.identity])
        self._bits = None
        self._selector = None
        if version.deleted_file is not None and version.deleted > version.dropped:
            self._bits = np.fromfile(version.deleted_file.check(index), np.uint8)
            inner = faiss().IDSelectorBitmap(self._bits)
            self._selector = faiss().IDSelectorNot(inner)
            self._inner = inner  # the outer one only points to it

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

        Raises InputError where there is none, OutputError where a file of it is missing or damaged.
        """
        if version is not None:
            return cls(read_version(index, version), memory=memory, threads=threads, piece=piece)
        return open_current(index, lambda found: cls(found, memory=memory, threads=threads, piece=piece))

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
        """True where it can re-rank by the vectors themselves."""
        return self._rows is not None

    def search(
        self,
        vectors: np.ndarray,
        k: int,
        *,
        nprobe: int | None = None,
        k_factor: int | None = None,
        refine: bool | None = None,
    ) -> SearchResult:
        """The k best rows for each query.

        Args:
            vectors: float32 (queries, dim); for cosines of length 1.
            nprobe: lists to look at; None for what tuning chose.
            k_factor: how many times k candidates are re-ranked by their vectors; None for what tuning chose.
            refine: False re-ranks nothing, None what can be.

        Raises InputError `wrong_dimension` where the vectors have another length than the rows.
        """
        queries = np.ascontiguousarray(vectors, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise InputError(
                f"the index holds vectors of {self.dim} numbers, the query has shape {queries.shape}",
                next_step="embed the query with the index's own model",
                code="wrong_dimension",
            )
        defaults = self.version.search
        probes = min(self.nlist, nprobe or defaults.get("nprobe", 1))
        factor = k_factor or defaults.get("k_factor", 1)
        reranks = self._rows is not None and refine is not False and factor > 1
        wanted = max(1, min(k * factor if reranks else k, self.version.next_id))
        set_threads(self.threads)
        parameters = faiss().SearchParametersIVF(nprobe=probes, sel=self._selector)
        seen = self._template.transformed(queries)
        distances, ids = self._template.ivf.search(seen, wanted, params=parameters)
        if reranks and self._rows is not None:
            return _padded(*self._reranked(queries, ids, k), k, self._worst)
        return _padded(ids, self._scores(distances), k, self._worst)

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

    def rows(self, ids: np.ndarray, columns: list[str] | None = None) -> pa.Table:
        """Identity of rows: id, key, caption, source, unit_id and metadata, in the order of the ids; -1 is left out."""
        return self._identity.rows(ids, columns)

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """Vectors of rows, float32 (n, dim): what re-ranking uses, or what the code of a row stands for.

        Raises InputError where the index keeps neither.
        """
        wanted = np.asarray(ids, np.int64)
        if self._rows is not None:
            return self._rows.read(wanted)
        try:
            return self._template.decoded(wanted)
        except RuntimeError as error:
            raise InputError(
                "the index keeps no vectors of its rows", next_step="build it with --refine fp16", code="no_vectors"
            ) from error

    def vector_of(self, id_: int) -> np.ndarray:
        """The vector of a row, float32 (dim,): of the index where it keeps it, else of what was indexed.

        Raises InputError `no_vectors` where neither has it any more.
        """
        ids = np.array([id_], np.int64)
        try:
            return np.asarray(self.vectors(ids)[0])
        except InputError as error:
            if error.code != "no_vectors":
                raise
            try:
                return np.asarray(self.version.collection.read_rows_at(ids)[0])
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
