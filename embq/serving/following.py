"""Folders below which every index is served: those that are there, and those that are published later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from core.errors import EmbqError, UsageError
from core.service.log import Events
from embq.serving.indices import Indices
from embq.serving.names import Named
from embq.serving.served_index import ServedIndex

LOOK_S = 5.0
"""Between walks through the folders."""

SHARE = 50
"""A walk that takes long is not done again before this many times as long: one through a slow mount costs 2 %."""

RETRY_S = 10.0
"""After an index could not be opened: to open one may mean to read all of it."""

DEPTH = 6
"""Folders below the one that is followed in which an index is looked for: FOLDER/team/project/run/index/text has 5."""

PLAIN_OUTPUTS = ("image", "text")
"""What the vectors of a run of one model are called. Its indices have the run's name, those of others RUN/OUTPUT."""

_log = Events("serve")


def published_below(folder: Path) -> Iterator[Path]:
    """The folders of all indices at or below a folder, in order. Of a run only its `index` is looked at."""
    seen: set[tuple[int, int]] = set()

    def walk(at: Path, depth: int) -> Iterator[Path]:
        try:
            status = at.stat()
            with os.scandir(at) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            return  # not ours to read, or gone meanwhile
        if (status.st_dev, status.st_ino) in seen:
            return  # a link to where we have been
        seen.add((status.st_dev, status.st_ino))
        names = {entry.name for entry in inside}
        if "CURRENT" in names:
            yield at
            return
        for entry in inside:
            below = entry.name == "index" if "run.json" in names else entry.name[0] not in "._"
            if below and depth < DEPTH and _is_folder(entry):
                yield from walk(at / entry.name, depth + 1)

    yield from walk(folder, 0)


def followed_name(index: Path, folder: Path) -> str:
    """The name of an index below a folder that is followed: its run's path from there, which no other one has."""
    of_run = index.parent.name == "index" and index != folder
    run = index.parent.parent if of_run else index
    way = run.relative_to(folder).as_posix() if run.is_relative_to(folder) else "."
    name = run.name if way == "." else way
    return f"{name}/{index.name}" if of_run and index.name not in PLAIN_OUTPUTS else name


class Following:
    """Takes up the indices below some folders as they are published, and drops those that were removed.

    Args:
        folders: absolute.
        opened: opens an index under a name.
        modality_of: what an index folder holds.
        appeared, gone: called with an index that is served from now on, or no more.

    Attributes:
        failed: index folder -> its name, and why it could not be opened. Replaced, never changed: others read it.
    """

    def __init__(
        self,
        folders: list[Path],
        indices: Indices,
        *,
        opened: Callable[[Named], ServedIndex],
        modality_of: Callable[[Path], str],
        appeared: Callable[[ServedIndex], None],
        gone: Callable[[ServedIndex], None],
    ) -> None:
        self.folders = folders
        self._indices, self._opened, self._modality_of = indices, opened, modality_of
        self._appeared, self._gone = appeared, gone
        self._served: dict[Path, ServedIndex] = {}
        self._not_before: dict[Path, float] = {}
        self._due = 0.0
        self.failed: dict[Path, tuple[str, str]] = {}

    def look_when_due(self) -> None:
        """`look`, unless the last one was just now."""
        if time.monotonic() >= self._due:
            self.look()

    def look(self) -> None:
        """Walk through the folders once."""
        began = time.monotonic()
        there = {path: folder for folder in reversed(self.folders) for path in published_below(folder)}
        walked_s = time.monotonic() - began
        for path in [path for path in self._served if _is_gone(path)]:
            self._drop(path)
        self.failed = {path: told for path, told in self.failed.items() if path in there}
        for path, folder in there.items():
            if path not in self._served and time.monotonic() >= self._not_before.get(path, 0.0):
                self._take_up(path, followed_name(path, folder))
        self._due = time.monotonic() + max(LOOK_S, SHARE * walked_s)

    def _take_up(self, path: Path, name: str) -> None:
        try:
            named = Named(name=name, modality=self._modality_of(path), path=path)
            if self._indices.has(named.name, named.modality):
                raise UsageError("another index has its name and modality", next_step=f"--name OTHER={path}")
            index = self._opened(named)
        except (EmbqError, OSError) as error:
            self._fail(path, name, str(error))
            return
        except Exception:  # noqa: BLE001 - one index that embq has a bug with must not end the watch
            _log.bug("bug", index=name)
            self._fail(path, name, "embq has a bug; its log holds the details")
            return
        self.failed = {other: told for other, told in self.failed.items() if other != path}
        self._served[path] = index
        self._indices.add(index)
        self._appeared(index)
        _log.info("index_taken_up", index=name, modality=index.modality, version=index.version.name)

    def _drop(self, path: Path) -> None:
        index = self._served.pop(path)
        self._indices.remove(index)
        self._gone(index)
        index.retire()
        _log.info("index_gone", index=index.name, modality=index.modality)

    def _fail(self, path: Path, name: str, why: str) -> None:
        self._not_before[path] = time.monotonic() + RETRY_S
        if self.failed.get(path) != (name, why):
            self.failed = {**self.failed, path: (name, why)}
            _log.warning("index_not_taken_up", index=name, why=why)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_gone(index: Path) -> bool:
    """Whether an index was removed; storage that does not answer removes nothing."""
    try:
        (index / "CURRENT").stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
