"""What nobody will use any more: files that no record names, and what a finished run left in the broker."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from rq.utils import as_text

from core.broker import connect, reach
from core.commit_log import CommitLog, LogState
from core.durable import output_error
from core.embedded import EmbeddedServer, kept_off
from core.errors import BrokerError, ConfigError
from core.formats import row_folders
from core.generations import leftovers
from core.hints import HintJob, hint_queue
from core.layout import PLANNED, Layout, record_number
from core.objects import ObjectPath, Status
from core.places import Place
from core.protocol import RUN_PARTS, RUNS, run_key
from core.registry import registered
from core.run_info import RunInfo, load_run
from core.settings import Settings
from core.unfinished import Unfinished, unfinished
from embq.rights import require

NONCE = ".shared"
PLANNING_S = 24 * 3600.0
"""Segments on an object store that nothing names are of a plan that is at work, for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed, or would be.

    Attributes:
        broker: what the run had in the broker; None where it stays there, or no broker was asked.
        notes: what a user should know, one sentence each.
    """

    run: str
    found: Found
    broker: Forgotten | None
    notes: tuple[str, ...]


def collect(root: Place, settings: Settings, *, asked: bool, older_than_s: float, dry_run: bool) -> Collected:
    """Remove the litter of an output folder and, once its run is finished, what the broker keeps of it.

    Safe while others work on the run.

    Args:
        settings: with the broker that may know the run.
        asked: the user named that broker, so it must answer.
    """
    layout = Layout(root)
    info = load_run(root)
    notes: list[str] = []
    with kept_off(layout.broker) as alone:
        client = _resident(settings, notes, asked=asked) if alone else _embedded(layout)
        state = CommitLog(layout).replay(info.units)

        def live() -> set[str] | None:
            if client is not None:
                return live_tokens(client, info.run)
            # The leases of `embq run` end with its server; of others nothing is known.
            return set() if alone and layout.broker.exists() else None

        found = find(layout, info, state, live=live, older_than_s=older_than_s)
        if not dry_run:
            remove(layout, found)
        if found.uploads:
            notes.append(f"{len(found.uploads):,} uploads that were begun and never completed are among what goes")
        if found.in_use and live() is None:
            notes.append("no broker was asked whose they are, so staged results stay until the run is finished")
        forgotten = None
        if client is not None and alone and state.closed:
            if client.exists(run_key(info.run, "writer")):
                notes.append("a writer holds the run, so the broker keeps it: stop that writer, and repeat this")
            else:
                forgotten = forget(client, info, dry_run=dry_run)
    return Collected(run=info.run, found=found, broker=forgotten, notes=tuple(notes))


def _embedded(layout: Layout) -> redis.Redis | None:
    """A client of the server of the `embq run` that is at work on the folder."""
    url = EmbeddedServer.find(layout.broker)
    return connect(url) if url else None


def _resident(settings: Settings, notes: list[str], *, asked: bool) -> redis.Redis | None:
    if not settings.broker_url:
        return None
    client = connect(settings.broker_url, password=settings.broker_password)
    try:
        reach(client, settings.broker_url)
        require(client, "gc")
    except (BrokerError, ConfigError) as error:
        if asked or (isinstance(error, ConfigError) and error.code != "role"):
            raise
        notes.append(error.message)
        return None
    return client


# --- the folder ---


@dataclass(frozen=True, slots=True)
class Litter:
    """A file that no record names.

    Attributes:
        path: relative to the output folder; absolute where it is a file of this machine for an object store.
        bytes: its size.
        age_s: by the clock of the storage.
    """

    path: str
    bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """What no record names.

    Attributes:
        litter: what may go.
        young: number of files that are not old enough.
        in_use: number of files that a writer or a worker may still need.
        uploads: what was begun to be sent to an object store and never completed, and may go.
    """

    litter: tuple[Litter, ...]
    young: int
    in_use: int
    uploads: tuple[Unfinished, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of all of the litter."""
        return sum(item.bytes for item in self.litter)


def find(
    layout: Layout, info: RunInfo, state: LogState, *, live: Callable[[], set[str] | None], older_than_s: float
) -> Found:
    """The litter of an output folder.

    Args:
        state: the log as it was before.
        live: gives what `live_tokens` gives, or None where nobody can say. Asked, like the log, after the files are
            listed, so that what gets its lease or its record meanwhile is seen to have it.
        older_than_s: files younger than this stay.
    """
    rows = row_folders(layout, info)
    folders = (*rows, layout.failures, layout.temporary, layout.staging, layout.manifest)
    listed = {folder: list(_files(folder)) for folder in folders}
    abandoned: list[Unfinished] = []
    uploads = unfinished(layout.root) if isinstance(layout.root, ObjectPath) else []
    unnamed = set(leftovers(layout.manifest, load_run(layout.root).segments))
    planning = _is_planned(layout)
    named = {layout.root / file.path for commit in CommitLog(layout).read() for file in commit.files}
    tokens = live()
    litter: list[Litter] = []
    young = in_use = 0
    for folder, files in listed.items():
        now = _storage_time(folder) if files else 0.0
        for path, status in files:
            if path in named or path == layout.staging / NONCE:
                continue
            if folder == layout.manifest and path not in unnamed:
                continue
            age_s = max(0.0, now - status.st_mtime)
            if folder == layout.manifest or (folder == layout.temporary and path.name.startswith(PLANNED)):
                # No lock says whether another machine plans for an object store.
                used = planning or (isinstance(path, ObjectPath) and age_s < PLANNING_S)
            elif folder == layout.staging:
                used = _token_part(path.name) in tokens if tokens is not None else not state.closed
            else:
                # The record to come may name a file that has its number.
                used = not state.closed and record_number(path.name) > state.n
            if used:
                in_use += 1
            elif age_s < older_than_s:
                young += 1
            else:
                litter.append(Litter(layout.relative(path), status.st_size, age_s))
    for upload in uploads:
        if not state.closed and record_number(upload.path.name) > state.n:
            in_use += 1
        elif (age_s := max(0.0, _storage_time(layout.writer) - upload.began)) < older_than_s:
            young += 1
        else:
            abandoned.append(upload)
    return Found(tuple(litter), young, in_use, tuple(abandoned))


def _is_planned(layout: Layout) -> bool:
    """Whether somebody adds units to the run now."""
    try:
        with open(layout.plan_lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def remove(layout: Layout, found: Found) -> None:
    """Delete files and unfinished uploads; one that is gone already is no error."""
    for upload in found.uploads:
        upload.abort()
    for item in found.litter:
        path = Path(item.path) if os.path.isabs(item.path) else layout.root / item.path
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise output_error(error, path) from error


def _files(folder: Place) -> Iterator[tuple[Place, os.stat_result | Status]]:
    try:
        if isinstance(folder, ObjectPath):
            yield from folder.listing()
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        return
    except OSError as error:
        raise output_error(error, folder) from error


def _storage_time(folder: Place) -> float:
    """What time it is for the storage of a folder, whose clock may not be that of this machine."""
    probe = folder / f".gc-{secrets.token_hex(4)}"
    try:
        if isinstance(probe, ObjectPath):
            probe.create(b"")
        else:
            probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise output_error(error, probe) from error


def _token_part(name: str) -> str:
    """What the name of a staging file, finished or not, says of the token of its lease."""
    return name.removeprefix(".").partition(".")[2].removesuffix(".arrow")


# --- the broker ---


def live_tokens(client: redis.Redis, run: str) -> set[str]:
    """The tokens of leases and of results that wait for the writer, as they stand in names of staging files."""
    values = [value for part in ("owner", "spare", "pub") for value in client.hvals(run_key(run, part))]
    # A published result stands as its token and, behind a blank, its place in the stream.
    return {as_text(value).partition(" ")[0].replace(":", "_") for value in values}


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a run had in the broker: keys of its ledger and its entry in the list of runs; and hints."""

    keys: int
    hints: int


def forget(client: redis.Redis, info: RunInfo, *, dry_run: bool) -> Forgotten:
    """Remove what a finished run left in the broker; workers and other runs stay as they are.

    The run is taken off the list first, so that no service takes it up again while its keys go.
    """
    queue = hint_queue(client, info.model.queue_key)
    lists = (queue.key, queue.intermediate_queue.key)
    keys = [run_key(info.run, part) for part in (*RUN_PARTS, "writer", "asked")]
    there = int(client.hexists(RUNS, info.run)) + int(client.exists(*keys))
    prefix = f"{info.run}-"
    hints = {as_text(raw) for key in lists for raw in client.lrange(key, 0, -1) if as_text(raw).startswith(prefix)}
    # A popped hint that its worker did not live to drop is in no list once RQ has cleaned up.
    jobs = client.scan_iter(match=HintJob.key_for(f"{prefix}*"), count=5000)
    hints |= {as_text(raw).removeprefix(HintJob.redis_job_namespace_prefix) for raw in jobs}
    if not dry_run:
        client.hdel(RUNS, info.run)
        with client.pipeline() as pipe:
            pipe.delete(*keys, *(HintJob.key_for(job_id) for job_id in hints))
            for job_id in hints:
                for key in lists:
                    pipe.lrem(key, 0, job_id)
            pipe.execute()
        if not client.llen(queue.key) and all(record.model != info.model for record in registered(client).values()):
            queue.delete(delete_jobs=False)  # or `rq info` would list it for ever
    return Forgotten(there, len(hints))
