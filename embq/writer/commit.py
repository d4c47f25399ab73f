"""Commits accepted results as one part and one record of the commit log.

The record is the commit point. The files of rows and failures get their final names before it. A crash before the
record leaves orphans, which the next writer removes after its fence; a crash after it leaves entries to acknowledge and
staging files to delete.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from embq.core.errors import OutputError, OutsideError, TryLaterError
from embq.core.formats.base import Draft, PartName
from embq.core.formats.folders import row_folders
from embq.core.formats.parquet import write_failures
from embq.core.formats.part import check_writable, join_parts, write_part
from embq.core.queue.result_stream import LIMIT_BYTES
from embq.core.rows.results import FAILURE_SCHEMA, vector_widths
from embq.core.run import checkpoint
from embq.core.run.commit_log import CommitLog, LogState, row_files
from embq.core.run.commits import Commit, CommittedFile, CommittedUnit
from embq.core.run.layout import PLANNED, Layout, record_number
from embq.core.run.run_info import RunInfo
from embq.core.storage.durable import claim, drop, drop_in, fsync_folder, link, names_in, output_error, publish, writing
from embq.core.storage.objects import ObjectPath, unfinished
from embq.core.storage.paths import Place
from embq.writer.accept import Accepted, Rejected

MAX_BYTES = LIMIT_BYTES // 2
"""Workers stop at LIMIT_BYTES of waiting results; a part above half of it could wait for rows that cannot come."""

MIN_AGE_S, MAX_AGE_S = 2.0, 30.0


class LostPartError(Exception):
    """A part is no more what was accepted.

    Attributes:
        result: its result, without which the others can be committed.
        why: reason for its refusal.
    """

    def __init__(self, result: Accepted, why: Rejected) -> None:
        super().__init__(str(why))
        self.result, self.why = result, why


class Buffer:
    """Results of one run, in order of arrival.

    Args:
        part_rows: most rows of a part.
        clock: monotonic seconds.
    """

    def __init__(self, *, part_rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.part_rows = part_rows
        self._clock = clock
        self._began = clock()
        self._oldest = 0.0
        self.results: list[Accepted] = []
        self.units: set[int] = set()
        self.entries: set[str] = set()
        self.rows = 0
        self.bytes = 0

    def fits(self, result: Accepted) -> bool:
        """True if the result still belongs into the part that is being gathered. One with a part of its own does."""
        if not self.results or result.part is not None:
            return True
        return self.rows + result.rows.num_rows <= self.part_rows and self.bytes + result.bytes <= MAX_BYTES

    def add(self, result: Accepted) -> None:
        """Keep a result; the caller has checked `fits` and that its unit is new."""
        if not self.results:
            self._oldest = self._clock()
        self.results.append(result)
        self.units.add(result.u)
        self.entries.add(result.entry)
        self.rows += result.rows.num_rows
        self.bytes += result.bytes

    def is_due(self) -> bool:
        """True if the oldest result has waited long enough.

        Early parts come soon, so that a user sees committed rows; later ones are larger.
        """
        if not self.results:
            return False
        now = self._clock()
        age_limit = min(MAX_AGE_S, max(MIN_AGE_S, (now - self._began) * 0.1))
        return self.rows >= self.part_rows or self.bytes >= MAX_BYTES or now - self._oldest >= age_limit

    def drain(self) -> list[Accepted]:
        """All results, leaving the buffer empty."""
        results, self.results = self.results, []
        self.units, self.entries, self.rows, self.bytes = set(), set(), 0, 0
        return results


class Committer:
    """Appends records for one writer incarnation.

    Args:
        swept: number of a record up to which earlier writers have left nothing to sweep.
        on_progress: called as a part is sent to an object store, which may take long.
        writer: random id of this process.
        version: embq version, for the record.
    """

    def __init__(
        self,
        layout: Layout,
        info: RunInfo,
        log: CommitLog,
        state: LogState,
        *,
        writer: str,
        version: str,
        swept: int = 0,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout = layout
        self.info = info
        self.log = log
        self.state = state
        self._swept = swept
        self._on_progress = on_progress
        self.writer = writer
        self.version = version
        self.epoch = 0
        self.generation = ""
        self.fingerprint = state.fingerprint
        check_writable(info)

    def take_epoch(self) -> None:
        """Shut out every earlier writer of this folder: take the next epoch and commit a fence record.

        A predecessor that is only paused fails at its next record, because its number is taken. Only after the fence
        may files without a record be removed; before it, the predecessor could still commit one of them.
        """
        self._make_folders()
        self.epoch = max([self.state.epoch, *self._epochs()]) + 1
        while True:
            try:
                claim(self.layout.writer / f"epoch-{self.epoch:06d}", self.writer)
                break
            except FileExistsError:
                self.epoch += 1
            except OSError as error:
                raise output_error(error, self.layout.writer) from error
        while True:
            try:
                self._append("fence")
                break
            except (FileExistsError, OutputError):
                commits = list(self.log.read(after=self.state.n))
                if not commits:
                    raise
                for commit in commits:
                    if commit.epoch > self.epoch:
                        raise self._lost(commit) from None
                    self.log.advance(self.state, commit)
        self.sweep()

    def _make_folders(self) -> None:
        self.layout.make(*row_folders(self.layout, self.info))
        with writing(self.layout.root):
            fsync_folder(self.layout.root)

    def _epochs(self) -> list[int]:
        matches = (re.fullmatch(r"epoch-([0-9]{1,18})", name) for name in names_in(self.layout.writer))
        return [int(match[1]) for match in matches if match is not None]

    def sweep(self) -> None:
        """Remove what no record names, once the log ends with our fence or is closed. Staging files stay: live workers
        own them.

        Every file of a predecessor has a number up to that of our fence. A higher one belongs to a successor: this
        process may have been paused since its fence, for as long as it takes to be succeeded.
        """
        fence = self.state.n
        named = {file.path for commit in self.log.read(after=self._swept) if commit.n <= fence for file in commit.files}
        for folder in (self.layout.temporary, *row_folders(self.layout, self.info), self.layout.failures):
            for name in names_in(folder):
                if folder == self.layout.temporary and name.startswith(PLANNED):
                    continue  # of the process that plans now
                number = record_number(name)
                first = 0 if folder == self.layout.temporary else self._swept
                if number and not first < number <= fence:
                    continue
                if self.layout.relative(folder / name) not in named:
                    drop_in(folder, name)
        if isinstance(self.layout.root, ObjectPath):
            for upload in unfinished(self.layout.root):
                of_worker = upload.path.parent == self.layout.staged_parts
                if not of_worker and record_number(upload.path.name) <= fence:
                    upload.abort()

    def commit(self, results: Sequence[Accepted]) -> Commit:
        """Commit the results by one record; TryLaterError if a later writer has taken over, LostPartError if a part is
        gone or another one by now.

        Parts that workers have written come first, then the rows of all other results as one part.
        """
        results = sorted(results, key=lambda result: result.part is None)
        units: list[CommittedUnit] = []
        first = 0
        for result in results:
            units.append(
                CommittedUnit(
                    u=result.u,
                    unit_id=result.unit_id,
                    token=result.token,
                    first_row=first,
                    rows=result.row_count,
                    failures=result.failures.num_rows,
                    quarantined=result.quarantined,
                    truncated=result.truncated,
                    tokens=result.tokens,
                    unread=result.unread,
                    supersedes=0 if result.retry is None else result.retry.replaces,
                    lifts=0 if result.retry is None else result.retry.lifts,
                )
            )
            first += result.row_count
        files: list[CommittedFile] = []
        with self._unless_taken_over(files):
            rows = [result.rows for result in results if result.rows.num_rows]
            files += self._link_parts(results)
            drafts = self._drafts_of_rows(results, rows) if rows else []
            with self._dropped_on_error(drafts):
                if any(result.failures.num_rows for result in results):
                    drafts += self._drafts_of_failures(results)
                for draft in drafts:
                    self._publish(draft)
                    files.append(draft.file)
            of_parts = (dict(result.widths) for result in results if result.part is not None)
            widths = vector_widths(rows[0].schema) if rows else next(of_parts, {})
            return self._append("data", files=tuple(files), units=tuple(units), widths=widths)

    def close(self, timing: dict[str, float]) -> None:
        """Write the final record: every unit is done. `timing` is kept for information."""
        self.join()
        with self._unless_taken_over([]):
            self._append("close", timing=timing)

    def join(self) -> None:
        """Bring the file that joins the parts up to date, where the format has one."""
        join_parts(self.info, self.layout, row_files(self.log.without_units()))

    @contextmanager
    def _unless_taken_over(self, files: Sequence[CommittedFile]) -> Iterator[None]:
        """Drop `files` and raise TryLaterError if the failure of a commit means that a later writer is at work.

        The later one has taken our number, or swept our temporary file. A failure after our own record has its name
        is not of that kind: the record stands, and so must its files.
        """
        try:
            yield
        except LostPartError:
            for file in files:
                drop(self.layout.root / file.path)
            raise
        except (FileExistsError, OutputError) as error:
            later = next(self.log.read(after=self.state.n), None)
            if later is None or later.writer == self.writer:
                raise
            for file in files:
                drop(self.layout.root / file.path)
            raise self._lost(later) from error

    def _lost(self, commit: Commit) -> TryLaterError:
        return TryLaterError(
            f"another writer (epoch {commit.epoch}) has taken over {self.layout.root}; this one (epoch "
            f"{self.epoch}) stops",
            next_step="nothing: the other writer goes on; run only one `embq writer` for an output",
        )

    def _append(
        self,
        kind: str,
        *,
        files: tuple[CommittedFile, ...] = (),
        units: tuple[CommittedUnit, ...] = (),
        widths: dict[str, int] | None = None,
        timing: dict[str, float] | None = None,
    ) -> Commit:
        commit = self.log.append(
            Commit(
                n=self.state.n + 1,
                run=self.info.run,
                kind=kind,
                prev=self.state.prev,
                epoch=self.epoch,
                writer=self.writer,
                version=self.version,
                generation=self.generation,
                fingerprint=self.fingerprint,
                files=files,
                units=units,
                widths=widths or {},
                totals=self.state.totals(units),
                timing=timing or {},
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            )
        )
        self.state.apply(commit)
        if checkpoint.is_due(self.state, len(units)):
            checkpoint.save(self.layout, self.state)
        return commit

    def _notes(self) -> dict[str, str]:
        return self.info.notes(fingerprint=self.fingerprint, version=self.version)

    def _name(self, first_id: int) -> PartName:
        return PartName(number=self.state.n + 1, first_id=first_id, epoch=self.epoch, layout=self.layout)

    def _drafts_of_rows(self, results: Sequence[Accepted], rows: list[pa.Table]) -> list[Draft]:
        table = pa.concat_tables(rows)
        first_id = self.state.next_id + sum(result.part.rows for result in results if result.part is not None)
        ids = pa.array(np.arange(first_id, first_id + table.num_rows, dtype=np.int64))
        table = table.add_column(0, "id", ids).append_column("unit_id", _repeat_ids(results, "rows"))
        return write_part(self.info, table, self._name(first_id), self._notes())

    def _link_parts(self, results: Sequence[Accepted]) -> Iterator[CommittedFile]:
        """Give the parts that workers have written their final names, durably.

        In the order of names, all parts are in that of their ids. The names in the staging folder stay until the record
        is there: another writer may have to take them again.
        """
        first_id = self.state.next_id
        parts = [(result, result.part) for result in results if result.part is not None]
        for result, part in parts:
            name = f"part-{self.state.n + 1:08d}.{first_id:012d}.{self.info.format}"
            path = self.layout.parts / name
            with writing(path):
                self._link(result, part, path, self._name(first_id).unfinished(str(first_id)))
                self._on_progress()
            yield replace(part, path=self.layout.relative(path), first_id=first_id)
            first_id += part.rows
        if parts:
            fsync_folder(self.layout.parts)

    def _link(self, result: Accepted, part: CommittedFile, path: Place, temporary: Path) -> None:
        """Link a part, or raise LostPartError: a user with write access can change it between its check and its commit.

        A part of another length would be named by a record that does not fit it, and so end every reader.
        """
        staged = self.layout.staged_parts / part.path
        try:
            link(staged, path, temporary)
            size = path.stat().st_size
        except FileNotFoundError as error:
            if staged.exists():
                raise
            raise LostPartError(result, Rejected("lost_result", f"part {part.path} is gone")) from error
        except OutsideError as error:
            raise LostPartError(result, Rejected("bad_result", error.message)) from error
        if size != part.bytes:
            drop(path)
            why = f"part {part.path} has {size:,} bytes, and had {part.bytes:,} when it was checked"
            raise LostPartError(result, Rejected("bad_result", why))

    def _drafts_of_failures(self, results: Sequence[Accepted]) -> list[Draft]:
        table = pa.concat_tables([r.failures for r in results if r.failures.num_rows])
        table = table.append_column("unit_id", _repeat_ids(results, "failures"))
        numbers = np.repeat([r.u for r in results], [r.failures.num_rows for r in results])
        table = table.append_column("u", pa.array(numbers, pa.int64()))
        assert table.schema.field(0).equals(FAILURE_SCHEMA.field(0))
        return write_failures(table, self._name(-1), self._notes())

    @contextmanager
    def _dropped_on_error(self, drafts: list[Draft]) -> Iterator[None]:
        """Remove files that were to be published where one of them could not be; no record names them."""
        try:
            yield
        except BaseException:
            for draft in drafts:
                drop(draft.temporary)
            raise

    def _publish(self, draft: Draft) -> None:
        """Give a finished file its final name, durably; an orphan of that name from a dead writer is replaced."""
        path = self.layout.root / draft.file.path
        with writing(path):
            publish(draft.temporary, path, self._on_progress)


def _repeat_ids(results: Sequence[Accepted], what: str) -> pa.Array:
    """The unit id of each row (or failure) of the results in order, dictionary-encoded."""
    counts = [getattr(result, what).num_rows for result in results]
    indices = np.repeat(np.arange(len(results), dtype=np.int32), counts)
    dictionary = pa.array([result.unit_id for result in results], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(indices), dictionary).cast(pa.string())
