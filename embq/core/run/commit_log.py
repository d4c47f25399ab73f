"""The commit log: numbered records, each created exclusively and complete, chained by their hashes.

The log is the truth about a run: what no record names is not done, and does not exist.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Annotated, TypeVar

from msgspec import Meta

from embq.core.errors import OutputError
from embq.core.run.commits import MOST_BYTES, Commit, CommitFiles, CommittedFile, CommittedUnit, damaged, parts_of
from embq.core.run.layout import Layout
from embq.core.run.run_info import load_run
from embq.core.storage.beneath import read_bytes
from embq.core.storage.durable import denied, names_in, output_error, write_new
from embq.core.storage.paths import Place
from embq.core.wire import Count, ShortText, UnitCount, Word

Record = TypeVar("Record", Commit, CommitFiles)

PathsDigest = Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{32})?\Z")]


@dataclass(slots=True)
class LogState:
    """State after a record of the log; `apply` adds the next record. Also the form of a checkpoint.

    Attributes:
        units: number of units of the run.
        failures, quarantined: those that stand; a committed retry replaces those that it retries.
        unread: samples of all units whose metadata, or captions that are not embedded, could not be read.
        retries: units among the committed ones that replaced failures.
        ended: whether the last record closes the log; units added since open it again.
        widths: of the vectors, by column; empty before the first rows.
        failed: numbers of the records with a file of failures, ascending.
        named: digest of the paths of all files that records name, see `digest_of`.
        done: bitmap of committed units, laid out as Redis lays out bits (unit 0 is the highest bit of byte 0).
    """

    units: UnitCount
    n: Count = 0
    prev: Word = ""
    epoch: Count = 0
    next_id: Count = 0
    rows: Count = 0
    failures: Count = 0
    quarantined: Count = 0
    truncated: Count = 0
    tokens: Count = 0
    unread: Count = 0
    retries: Count = 0
    count: Count = 0
    fingerprint: ShortText = ""
    ended: bool = False
    widths: dict[str, Count] = field(default_factory=dict)
    failed: list[Count] = field(default_factory=list)
    named: PathsDigest = ""
    done: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if not self.done:
            self.done = bytearray((self.units + 7) // 8)

    @property
    def closed(self) -> bool:
        """True if the last record closes the log, and no unit was added since."""
        return self.ended and self.count == self.units

    def grow(self, units: int) -> None:
        """Raise the number of units to `units`."""
        if units > self.units:
            self.units = units
            self.done.extend(bytes((units + 7) // 8 - len(self.done)))

    def is_done(self, u: int) -> bool:
        """True if unit `u` is committed."""
        return bool(self.done[u >> 3] & (0x80 >> (u & 7)))

    def apply(self, commit: Commit) -> None:
        """Add the next record; OutputError if it does not follow the last one."""
        name = f"{commit.n:08d}.json"
        if commit.n != self.n + 1 or commit.prev != self.prev:
            raise damaged(name, f"it does not follow record {self.n}")
        if commit.epoch < self.epoch:
            raise damaged(name, f"writer epoch {commit.epoch} comes after epoch {self.epoch}")
        for unit in commit.units:
            if not 0 <= unit.u < self.units or self.is_done(unit.u):
                raise damaged(name, f"unit {unit.u} is committed twice or is not of this run")
            self.done[unit.u >> 3] |= 0x80 >> (unit.u & 7)
        for what, count in added_by(commit.units).items():
            setattr(self, what, getattr(self, what) + count)
        self.unread += sum(unit.unread for unit in commit.units)
        self.retries += sum(unit.supersedes > 0 for unit in commit.units)
        self.count += len(commit.units)
        if any(file.kind == "failures" for file in commit.files):
            self.failed.append(commit.n)
        self.named = digest_of((file.path for file in commit.files), self.named)
        self.next_id = max([self.next_id, *(f.first_id + f.rows for f in commit.files if f.kind == "rows")])
        self.n, self.prev, self.epoch = commit.n, commit.sha256, commit.epoch
        self.fingerprint = commit.fingerprint or self.fingerprint
        self.widths = dict(commit.widths) or self.widths
        self.ended = commit.kind == "close"

    def totals(self, units: Sequence[CommittedUnit] = ()) -> dict[str, int]:
        """The cumulative counts as a record holds them: the last one, or a next one that commits `units`."""
        added = {what: getattr(self, what) + count for what, count in added_by(units).items()}
        return {"units": self.count + len(units), **added}


def added_by(units: Iterable[CommittedUnit]) -> dict[str, int]:
    """Additions of units to the cumulative counts; retries subtract the failures that they replace."""
    counts = {"rows": 0, "failures": 0, "quarantined": 0, "truncated": 0, "tokens": 0}
    for unit in units:
        counts["rows"] += unit.rows
        counts["failures"] += unit.failures - unit.supersedes
        counts["quarantined"] += bool(unit.quarantined) - unit.lifts
        counts["truncated"] += unit.truncated
        counts["tokens"] += unit.tokens
    return counts


def digest_of(paths: Iterable[str], digest: PathsDigest = "") -> PathsDigest:
    """A digest of a set of paths, whatever their order; "" for none.

    Args:
        digest: that of other paths, to which these are added.
    """
    hashes = (int.from_bytes(hashlib.sha256(path.encode(errors="surrogatepass")).digest()[:16]) for path in paths)
    total = sum(hashes, int(digest or "0", 16)) % 2**128
    return f"{total:032x}" if total else ""


class CommitLog:
    """Reading and appending the records of one output folder."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def read(self, after: int = 0) -> Iterator[Commit]:
        """The records after number `after`, in order, up to the first number that is not there."""
        return self._parsed(Commit, itertools.count(after + 1))

    def numbered(self, numbers: Sequence[int]) -> Iterator[Commit]:
        """The records of some numbers, in order; OutputError if one is missing or damaged."""
        count = 0
        for commit in self._parsed(Commit, numbers):
            yield commit
            count += 1
        if count < len(numbers):
            raise damaged(f"{numbers[count]:08d}.json", "it is missing, though later records are there")

    def without_units(self, after: int = 0, prev: str = "") -> Iterator[CommitFiles]:
        """The records after number `after`, without their units; OutputError if one is damaged or missing.

        Args:
            prev: hash of record `after`.
        """
        for record in self._parsed(CommitFiles, itertools.count(after + 1)):
            if record.prev != prev:
                raise damaged(f"{record.n:08d}.json", f"it does not follow record {after}")
            yield record
            after, prev = record.n, record.sha256
        self.ends_with(after)

    def _parsed(self, form: type[Record], numbers: Iterable[int]) -> Iterator[Record]:
        numbers, named = itertools.tee(numbers)
        names = (f"{self.layout.commits.name}/{n:08d}.json" for n in named)
        files = contents(self.layout.root, names, most_bytes=MOST_BYTES)
        try:
            for n, (path, data) in zip(numbers, files, strict=False):
                name = PurePath(path).name
                commit = form.parse(data, name)
                if commit.n != n:
                    raise damaged(name, f"it says that it is record {commit.n}")
                yield commit
        except OSError as error:
            where = error.filename or self.layout.commits
            raise denied(error, where) or OutputError(f"{where} cannot be read: {error.strerror}") from error

    def replay(self, units: int, *, start: LogState | None = None) -> LogState:
        """The state after the last record; OutputError if a record is missing before one that is there.

        Args:
            start: the state after an earlier record (see `embq.core.run.checkpoint`), which is moved on; or None.
        """
        state = start if start is not None else LogState(units=units)
        while True:
            for commit in self.read(after=state.n):
                self.advance(state, commit)
            if self.ends_with(state.n):
                return state

    def ends_with(self, n: int) -> bool:
        """True if there is no record after number `n`; OutputError if the next one is missing before later ones."""
        names = {name for name in names_in(self.layout.commits) if name.endswith(".json")}
        if max(names, default="") <= f"{n:08d}.json":
            return True
        if (following := f"{n + 1:08d}.json") not in names:
            raise damaged(following, "it is missing, though later records are there")
        return False

    def advance(self, state: LogState, commit: Commit) -> None:
        """Move `state` one record on; raises as `LogState.apply` does.

        A record may name units of a generation that was added after the reader counted them.
        """
        if any(unit.u >= state.units for unit in commit.units):
            state.grow(load_run(self.layout.root).units)
        state.apply(commit)

    def append(self, commit: Commit) -> Commit:
        """Create record `commit.n` durably; FileExistsError if another writer took the number."""
        data, digest = commit.seal()
        path = self.layout.commits / f"{commit.n:08d}.json"
        temporary = self.layout.temporary / f"commit-{commit.n:08d}.{commit.writer}.json"
        try:
            write_new(path, data, temporary=temporary)
        except FileExistsError:
            raise
        except OSError as error:
            raise output_error(error, path) from error
        return replace(commit, sha256=digest)


def row_files(commits: Iterable[Commit | CommitFiles]) -> Iterator[CommittedFile]:
    """The files with rows that the records name, in order of their ids."""
    for commit in commits:
        yield from (file for file in commit.files if file.kind == "rows")


AT_ONCE = 16
"""Most objects that are requested at a time."""


def contents(root: Place, names: Iterator[str], *, most_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Each name below `root` with its content, in order, up to the first that is not there.

    OSError if one cannot be read; raises as `embq.core.storage.beneath.read_bytes` does, too.

    On an object store the number of requests at a time grows with the log, so that reading its end is one request, and
    a long log is not read one answer after the other.
    """

    def content(name: str) -> bytes | None:
        try:
            return read_bytes(root, name, most_bytes=most_bytes)
        except FileNotFoundError:
            return None

    with ExitStack() as stack:
        pool, size = ThreadPoolExecutor(AT_ONCE), 1
        stack.callback(pool.shutdown, cancel_futures=True)
        while batch := list(islice(names, size)):
            payloads = map(content, batch) if size == 1 else pool.map(content, batch)
            for name, data in zip(batch, payloads, strict=True):
                if data is None:
                    return
                yield name, data
            size = 1 if isinstance(root, Path) else min(AT_ONCE, 2 * size)


def committed_parts(root: Place) -> Iterator[tuple[CommittedFile, ...]]:
    """The files of each part in the order of their records, one or several of them.

    Raises as `embq.core.run.checkpoint.committed` does.
    """
    load_run(root)
    for record in CommitLog(Layout(root)).without_units():
        yield from parts_of(record.files)
