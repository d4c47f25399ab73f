"""Query sets: the searches that an index is tuned with and its recall is measured by.

Rows of the collection itself (`data`) are not enough where other queries come: those of another modality lie elsewhere
and need several times the probes. So a run that embedded texts beside its images gives a set `text`, and further sets
come from files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from embq.core.errors import InputError, OutputError, UsageError
from embq.index.collection.collection import faults
from embq.index.collection.opening import Collection, open_collection
from embq.index.index_files.files import read_arrays
from embq.index.plan.costs import LARGE_ROWS, MOST, MOST_OF_LARGE

DATA = "data"
SHARE = 10
"""At most one row in this many is a query: a small collection needs its rows for training."""
SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPlan:
    """Plan of the query sets of a build; equal plans of equal collections give equal sets.

    Attributes:
        counts: queries in each set at most, by its name.
        columns: set -> column of other vectors of the same rows.
        files: set -> path of a .npy file or of the output of a run.
    """

    counts: Mapping[str, int]
    columns: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    seed: int = SEED

    def held_out(self, n: int) -> np.ndarray:
        """int64, ascending: the rows of a collection of n that are the set `data`, and are not to be trained on."""
        return _drawn(n, self.counts.get(DATA, 0), self.seed, DATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySet:
    """Queries of one kind.

    Attributes:
        name: "data", "text" or what the user called it.
        vectors: float32 (q, d); of length 1 where the metric is "cosine".
        own: int64 (q,): the row that a query is itself, and that is no answer to it; -1 if it is none.
        source: where they come from, for the report.
        left_out: queries that were drawn and are no vectors (`embq.index.collection.collection`).
    """

    name: str
    vectors: np.ndarray
    own: np.ndarray
    source: str
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.vectors)


def plan_queries(
    collection: Collection, *, files: Mapping[str, str] | None = None, count: int | None = None, seed: int = SEED
) -> QueryPlan:
    """Plan the query sets of a collection.

    Args:
        files: name -> .npy file of floats (q, dim), or output folder of a run with the same model.
        count: queries in all; None chooses by the size of the collection.

    Raises UsageError if a name is taken, and what `draw` raises for files: they are opened here, so that a mistake
    is reported before any work is done.
    """
    files = dict(files or {})
    for name in files:
        if name == DATA or name in collection.query_columns or not name:
            raise UsageError(f"--queries {name}=...: there is a query set {name!r} already; choose another name")
    names = [DATA, *collection.query_columns, *files]
    in_all = count or (MOST if collection.n <= LARGE_ROWS else MOST_OF_LARGE)
    # Of several sets each gets more than its part: the smaller a set, the less sure is its recall.
    each = in_all if len(names) == 1 else max(in_all // len(names), in_all * 6 // 10)
    counts = {name: each if name in files else min(each, max(2, collection.n // SHARE)) for name in names}
    if collection.n < 2:
        counts[DATA] = 0  # the only row has no neighbour
    plan = QueryPlan(counts=counts, columns=dict(collection.query_columns), files=files, seed=seed)
    for name in files:
        _from_file(collection, plan, name)
    return plan


def draw(collection: Collection, plan: QueryPlan, *, metric: str) -> list[QuerySet]:
    """The query sets. Raises InputError if a file cannot be read, holds other vectors, or those of another model."""
    source = f"rows of the collection, drawn with seed {plan.seed}, each without itself"
    sets = [of_rows(collection, plan.held_out(collection.n), name=DATA, source=source, metric=metric)]
    for name, column in plan.columns.items():
        rows = _drawn(collection.n, plan.counts[name], plan.seed, name)
        vectors = collection.read_rows_at(rows, column=column)
        sets.append(_query_set(name, vectors, None, f"{column} of rows drawn with seed {plan.seed}", metric))
    for name in plan.files:
        vectors, source = _from_file(collection, plan, name)
        sets.append(_query_set(name, vectors, None, source, metric))
    return [query_set for query_set in sets if len(query_set)]


def of_rows(collection: Collection, ids: np.ndarray, *, name: str, source: str, metric: str) -> QuerySet:
    """A set of rows of the collection itself, int64, ascending; those that are no vectors are left out."""
    return _query_set(name, collection.read_rows_at(ids), ids, source, metric)


def write_queries(sets: Sequence[QuerySet], path: Path) -> None:
    """Write query sets to one file, which holds the same bytes for the same sets."""
    about = [{"name": query_set.name, "source": query_set.source, "left_out": query_set.left_out} for query_set in sets]
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for number, query_set in enumerate(sets):
        arrays |= {f"vectors{number}": query_set.vectors, f"own{number}": query_set.own}
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_queries(path: Path) -> list[QuerySet]:
    """The sets that `write_queries` wrote; OutputError if the file is another one."""
    try:
        stored = read_arrays(path)
        about = json.loads(stored["about"].tobytes())
        return [
            QuerySet(vectors=stored[f"vectors{number}"], own=stored[f"own{number}"], **fields)
            for number, fields in enumerate(about)
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OutputError(f"{path} cannot be read: {error}", code="index_damaged") from error


def _drawn(n: int, count: int, seed: int, name: str) -> np.ndarray:
    """Different rows for each set."""
    random = np.random.default_rng([seed, *name.encode()])
    return np.sort(random.choice(n, size=min(n, count), replace=False)).astype(np.int64)


def _query_set(name: str, vectors: np.ndarray, own: np.ndarray | None, source: str, metric: str) -> QuerySet:
    """A set without the queries that are no vectors.

    Args:
        own: ids of the rows that the queries are; None if they are none.
    """
    good = ~faults(vectors)
    own = np.full(len(vectors), -1, np.int64) if own is None else own
    return QuerySet(
        name=name,
        vectors=_prepared(vectors[good], metric),
        own=own[good],
        source=source,
        left_out=int((~good).sum()),
    )


def _prepared(vectors: np.ndarray, metric: str) -> np.ndarray:
    vectors = np.ascontiguousarray(vectors, np.float32)
    if metric != "cosine" or not len(vectors):
        return vectors
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    scaled: np.ndarray = (vectors / lengths[:, None]).astype(np.float32)
    return scaled


def _from_file(collection: Collection, plan: QueryPlan, name: str) -> tuple[np.ndarray, str]:
    """(vectors, what they are) of a set that the user gives."""
    path, count = plan.files[name], plan.counts[name]
    vectors, source = _of_npy(Path(path)) if path.endswith(".npy") else _of_run(collection, plan, name)
    if vectors.ndim != 2 or vectors.shape[1] != collection.dim or not len(vectors):
        raise InputError(
            f"--queries {name}={path}: an array of shape {vectors.shape}, the collection's vectors have "
            f"{collection.dim} numbers",
            next_step="give queries that the model of the collection embedded",
            code="wrong_dimension",
        )
    if len(vectors) > count:
        vectors = vectors[_drawn(len(vectors), count, plan.seed, name)]
    return vectors, source


def _of_npy(path: Path) -> tuple[np.ndarray, str]:
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"the queries in {path} cannot be read: {error}",
            next_step="give a .npy file of floats with one row for each query, or the output folder of a run",
            code="bad_queries",
        ) from error
    if vectors.dtype.kind != "f":
        raise InputError(
            f"the queries in {path} are of type {vectors.dtype}, not floats",
            next_step="give a .npy file of floats with one row for each query",
            code="bad_queries",
        )
    return vectors, f"{path}, {len(vectors):,} vectors"


def _of_run(collection: Collection, plan: QueryPlan, name: str) -> tuple[np.ndarray, str]:
    path = plan.files[name]
    other = open_collection(path)
    if collection.fingerprint != other.fingerprint and collection.fingerprint and other.fingerprint:
        raise InputError(
            f"--queries {name}={path}: these are vectors of another model than those of the collection",
            next_step="embed the queries with the collection's own model",
            code="other_model",
        )
    if other.dim != collection.dim:
        return np.empty((other.n, other.dim), np.float32), path
    ids = _drawn(other.n, plan.counts[name], plan.seed, name)
    # Of a run of images with texts, the set called "text" is its texts.
    vectors = other.read_rows_at(ids, column=other.query_columns.get(name))
    return vectors, f"{path}, {len(ids):,} of {other.n:,} vectors"
