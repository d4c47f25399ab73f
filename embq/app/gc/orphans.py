"""Orphaned files of an output folder: those that no commit record names and no process needs."""

from __future__ import annotations

import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from embq.core.formats.folders import row_folders
from embq.core.queue.result_stream import PART_SUFFIX, RESULT_SUFFIX
from embq.core.run import checkpoint
from embq.core.run.commit_log import CommitLog, LogState, digest_of
from embq.core.run.generations import leftovers
from embq.core.run.layout import PLANNED, Layout, record_number
from embq.core.run.run_info import RunInfo, load_run
from embq.core.storage import beneath
from embq.core.storage.durable import output_error, try_lock, writing
from embq.core.storage.objects import ObjectPath, Status, Unfinished, unfinished
from embq.core.storage.paths import Place

NONCE = ".shared"
PLANNING_S = 24 * 3600.0
"""Segments on an object store that are younger may belong to a plan in progress."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A file that no commit record names.

    Attributes:
        path: relative to the output folder; absolute if it is a file of this machine for an object store.
        bytes: its size.
        age_s: by the clock of the storage.
    """

    path: str
    bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Orphans:
    """The files and uploads that no commit record names.

    Attributes:
        files: to delete.
        young: number of files that are too young.
        in_use: number of files that a writer or worker may still need.
        uploads: incomplete multipart uploads to an object store, to abort.
    """

    files: tuple[Orphan, ...]
    young: int
    in_use: int
    uploads: tuple[Unfinished, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all files to delete."""
        return sum(item.bytes for item in self.files)


def find_orphans(
    layout: Layout, info: RunInfo, state: LogState, *, live: Callable[[], set[str] | None], older_than_s: float
) -> Orphans:
    """The orphans of an output folder.

    Args:
        state: the commit log before.
        live: returns the result of `live_tokens`, or None if it is unknown. Called, like the log is read, after files
            are listed, so that a lease or record of the meantime counts.
        older_than_s: files younger than this stay.
    """
    saved = checkpoint.load(layout, info.units)  # files of its records are listed, unless they are gone
    staged = (layout.staging, layout.staged_parts)
    committed_folders = (*row_folders(layout, info), layout.failures)
    folders = (*committed_folders, layout.temporary, *staged, layout.manifest)
    listed = {folder: list(_files(folder)) for folder in folders}
    uploads = unfinished(layout.root) if isinstance(layout.root, ObjectPath) else []
    unnamed = set(leftovers(layout.manifest, load_run(layout.root).segments))
    planning = _is_planned(layout)
    committed = [layout.relative(path) for folder in committed_folders for path, _ in listed[folder]]
    named = {layout.root / path for path in _named(layout, saved, committed)}
    users = _Users(layout, state, planning, live())
    verdicts: Counter[str] = Counter()

    def is_orphan(folder: Place, path: Place, age_s: float) -> bool:
        verdict = "in use" if users.need(folder, path, age_s) else "young" if age_s < older_than_s else "orphan"
        verdicts[verdict] += 1
        return verdict == "orphan"

    orphans: list[Orphan] = []
    for folder, files in listed.items():
        now = _storage_time(folder) if files else 0.0
        for path, status in files:
            if path in named or (folder in staged and path.name == NONCE):
                continue
            if folder == layout.manifest and path not in unnamed:
                continue
            age_s = max(0.0, now - status.st_mtime)
            if is_orphan(folder, path, age_s):
                orphans.append(Orphan(layout.relative(path), status.st_size, age_s))
    now = _storage_time(layout.writer) if uploads else 0.0
    abandoned = [up for up in uploads if is_orphan(up.path.parent, up.path, max(0.0, now - up.began))]
    return Orphans(tuple(orphans), verdicts["young"], verdicts["in use"], tuple(abandoned))


@dataclass(frozen=True, slots=True)
class _Users:
    """Processes that may still need files without a record.

    Attributes:
        state: the commit log before files were listed.
        planning: whether units are being added to the run.
        tokens: see `embq.app.gc.collect.live_tokens`; None if unknown.
    """

    layout: Layout
    state: LogState
    planning: bool
    tokens: set[str] | None

    def need(self, folder: Place, path: Place, age_s: float) -> bool:
        """True if a file of one of the run's folders may still be needed."""
        layout = self.layout
        if folder == layout.manifest or (folder == layout.temporary and path.name.startswith(PLANNED)):
            # No lock says whether another machine plans for an object store.
            return self.planning or (isinstance(path, ObjectPath) and age_s < PLANNING_S)
        if folder in (layout.staging, layout.staged_parts):
            return _token_part(path.name) in self.tokens if self.tokens is not None else not self.state.closed
        # Of a record to come.
        return not self.state.closed and record_number(path.name) > self.state.n


def _named(layout: Layout, saved: LogState, paths: Iterable[str]) -> set[str]:
    """The files that commit records name, by their paths below the output folder.

    Args:
        saved: a checkpoint. If its digest of files is that of the listed ones up to its number, its records name these,
            and only later records are read.
        paths: of the files that were listed in folders of committed files, since then.
    """
    log, early = CommitLog(layout), {path for path in paths if record_number(PurePath(path).name) <= saved.n}
    if digest_of(early) != saved.named:
        return {file.path for record in log.without_units() for file in record.files}
    return early | {file.path for record in log.without_units(saved.n, saved.prev) for file in record.files}


def _is_planned(layout: Layout) -> bool:
    """True if units are being added to the run."""
    try:
        with beneath.reader(layout.home, f"{layout.plan_lock.parent.name}/{layout.plan_lock.name}") as lock:
            return not try_lock(lock)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def remove_orphans(layout: Layout, orphans: Orphans) -> None:
    """Delete files and abort uploads; missing ones are no error."""
    for upload in orphans.uploads:
        upload.abort()
    for item in orphans.files:
        path = Path(item.path) if os.path.isabs(item.path) else layout.root / item.path
        with writing(path):
            if isinstance(path, ObjectPath):
                path.unlink(missing_ok=True)
            else:  # in one of the run's folders, which are in the output folder, its home or the spool
                beneath.unlink(path.parent.parent, f"{path.parent.name}/{path.name}", missing_ok=True)


def _files(folder: Place) -> Iterator[tuple[Place, os.stat_result | Status]]:
    try:
        if isinstance(folder, ObjectPath):
            yield from folder.listing()
            return
        for name, status in beneath.listing(folder.parent, folder.name):
            if stat.S_ISREG(status.st_mode):
                yield folder / name, status
    except FileNotFoundError:
        return
    except OSError as error:
        raise output_error(error, folder) from error


def _storage_time(folder: Place) -> float:
    """Time by the clock of a folder's storage, which may differ from that of this machine."""
    name = f".gc-{secrets.token_hex(4)}"
    probe = folder / name
    with writing(probe):
        if isinstance(probe, ObjectPath):
            probe.create(b"")
            try:
                return probe.stat().st_mtime
            finally:
                probe.unlink(missing_ok=True)
        with beneath.folder(probe.parent.parent, probe.parent.name) as descriptor:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=descriptor)
            try:
                return os.fstat(file).st_mtime
            finally:
                os.close(file)
                os.unlink(name, dir_fd=descriptor)


def _token_part(name: str) -> str:
    """The token of its lease in the name of a staging file, finished or not."""
    return name.removeprefix(".").partition(".")[2].removesuffix(RESULT_SUFFIX).removesuffix(PART_SUFFIX)
