"""Standing failures: the committed failures, less those that a later retry has replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.core.errors import OutputError
from embq.core.rows.results import FAILURE_SCHEMA
from embq.core.run.checkpoint import committed
from embq.core.run.commit_log import CommitLog
from embq.core.run.commits import Commit
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.reader import part_tables
from embq.core.storage.paths import Place
from embq.core.units import SAMPLES_TOLD, Retry

_KEY_COLUMNS = ("u", "ordinal", "key")

_COUNTED = SAMPLES_TOLD.replace("{file}", "[^;]+").replace("{samples:,}", "(?P<samples>[0-9,]{1,13})")


def missing_samples(failures: pa.Table) -> int:
    """Samples behind the failures of shards, as far as their messages tell: of a shard that was kept in part, the rest.

    Args:
        failures: of `standing_failures`, or some of them.
    """
    counts = pc.struct_field(pc.extract_regex(failures["message"], _COUNTED), "samples")
    samples = pc.cast(pc.replace_substring(counts, ",", ""), pa.int64())
    kept_samples = pc.cast(pc.fill_null(failures["ordinal"], 0), pa.int64())
    return pc.sum(pc.max_element_wise(pc.subtract(samples, kept_samples), 0, skip_nulls=False)).as_py() or 0


class Retries:
    """Which retries there are of each unit; holds their descriptions, not their samples.

    Retries of the same sample follow each other: one is planned only when what it retries is committed.

    Args:
        manifest: of the run.
        counts: whether a retry, by its index, is taken into account.
    """

    def __init__(self, manifest: Manifest, counts: Callable[[int], bool]) -> None:
        self._of: dict[int, list[tuple[int, Retry]]] = {}
        self._planned: dict[int, int] = {}
        for u, unit in manifest.retries():
            if unit.retry is not None:
                self._planned[u] = unit.retry.unit
                if counts(u):
                    self._of.setdefault(unit.retry.unit, []).append((u, unit.retry))

    def planned(self, u: int) -> int:
        """The original unit of which `u` is a retry; `u` itself if it is none."""
        return self._planned.get(u, u)

    def of(self, u: int) -> list[tuple[int, Retry]]:
        """(index, retry) of each later unit that retries samples of unit `u`, in order."""
        return [(later, retry) for later, retry in self._of.get(self.planned(u), ()) if later > u]

    def covered(self, u: int, ordinals: np.ndarray) -> np.ndarray:
        """Mask of the failures of unit `u` that a later unit retries. The ordinal -1 stands for the whole unit."""
        mask = np.zeros(len(ordinals), dtype=bool)
        for _, retry in self.of(u):
            mask |= np.isin(ordinals, retry.ordinals) if retry.only else np.ones(len(ordinals), dtype=bool)
        return mask


def standing_failures(root: Place) -> Iterator[pa.Table]:
    """The failures that stand, in commit order.

    Columns: ordinal (null: the whole unit), key, code, message, attempt, unit_id, u. Raises as `committed` does, and
    OutputError if a file is missing or cannot be read.
    """
    for _, table in standing_by_record(root):
        yield table


def standing_by_record(root: Place) -> Iterator[tuple[Commit, pa.Table]]:
    """(commit record, failures of it that stand); as `standing_failures`."""
    _, state = committed(root)
    # Later records are ignored: they may hold retries of these failures.
    retries = Retries(Manifest(Layout(root)), lambda u: u < state.units and state.is_done(u))
    for commit in CommitLog(Layout(root)).numbered(state.failed):
        for file in commit.files:
            for table in part_tables(root, [file]) if file.kind == "failures" else ():
                standing = with_attempts(table.filter(pa.array(~covered_by(retries, table))))
                if standing.num_rows:
                    yield commit, standing


def with_attempts(failures: pa.Table) -> pa.Table:
    """Failures with the column of attempts; 1 in files that were written before attempts were counted."""
    if "attempt" in failures.column_names:
        return failures
    at = failures.schema.get_field_index("message") + 1
    return failures.add_column(at, FAILURE_SCHEMA.field("attempt"), pa.array([1] * failures.num_rows, pa.int32()))


def covered_by(retries: Retries, failures: pa.Table) -> np.ndarray:
    """Mask of the rows of a table of failures that a later unit retries."""
    masks = [
        retries.covered(u, pc.fill_null(unit_failures["ordinal"], -1).to_numpy())
        if retries.of(u)
        else np.zeros(unit_failures.num_rows, dtype=bool)
        for u, unit_failures in by_unit(failures)
    ]
    return np.concatenate(masks) if masks else np.zeros(0, dtype=bool)


def by_unit(failures: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """(index of the unit, its failures) in order; those of a unit follow each other."""
    units = failures["u"].to_numpy()
    borders = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), len(units)]
    for start, stop in pairwise(borders):
        if start < stop:
            yield int(units[start]), failures.slice(start, stop - start)


def record_failures(root: Place, number: int) -> pa.Table:
    """All failures that one commit record names, standing or not.

    Raises OutputError if the record, or its file, is damaged or gone.
    """
    commit = next(CommitLog(Layout(root)).read(after=number - 1), None)
    files = [file for file in commit.files if file.kind == "failures"] if commit is not None else []
    tables = [table for file in files for table in part_tables(root, [file], _KEY_COLUMNS)]
    return pa.concat_tables(tables) if tables else pa.table({name: [] for name in _KEY_COLUMNS})


def failed_keys(failures: pa.Table, retry: Retry) -> dict[int | None, str]:
    """Ordinal (None: the whole unit) -> key of the failures that a retry retries.

    Args:
        failures: those of the record that the retry names.

    Raises OutputError if one of them is missing.
    """
    of_unit = failures.filter(pc.equal(failures["u"], retry.failed))
    keys = dict(zip(of_unit["ordinal"].to_pylist(), of_unit["key"].to_pylist(), strict=True))
    ordinals: list[int | None] = [*retry.ordinals] or [None]
    if missing := [ordinal for ordinal in ordinals if ordinal not in keys]:
        what = "the whole of" if missing[0] is None else f"sample {missing[0]} of"
        raise OutputError(
            f"record {retry.record} holds no failure of {what} unit {retry.failed}, which is retried",
            next_step="`embq verify` lists everything that is missing",
            code="part_missing",
        )
    return keys
