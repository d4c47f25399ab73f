"""Folders below which every index is served: those that are there, and those that are published later."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import EmbqError, InputError, UsageError
from core.service.log import Events
from core.storage.paths import refuse_unnameable
from embq.serving.indices import Indices
from embq.serving.metrics import Metrics
from embq.serving.query_models import Models
from embq.serving.served_index import ServedIndex


class Changes:
    """Called by who notices: `watching` of versions, `following` of whole indices."""

    def __init__(self, metrics: Metrics, models: Models) -> None:
        self._metrics, self._models = metrics, models

    def opened(self, index: ServedIndex) -> None:
        """An index is served in a version. Its model is left to the start of the application."""
        version = index.version
        self._metrics.gauge("embq_index_rows").labels(index.name, index.modality).set(version.rows)
        info = self._metrics.gauge("embq_index_info")
        info.remove_by_labels({"index": index.name, "modality": index.modality})
        info.labels(index.name, index.modality, version.name).set(1)

    def appeared(self, index: ServedIndex) -> None:
        """An index is there that was not, while others are served."""
        self.opened(index)
        self._models.want(index.version)

    def taken_up(self, index: ServedIndex, result: str) -> None:
        """There was a new version; `result` is "done" or "failed"."""
        self._metrics.counter("embq_index_reloads_total").labels(index.name, index.modality, result).inc()
        if result == "done":
            self.appeared(index)

    def gone(self, index: ServedIndex) -> None:
        """An index is served no more."""
        for name in ("embq_index_rows", "embq_index_info"):
            self._metrics.gauge(name).remove_by_labels({"index": index.name, "modality": index.modality})


LOOK_S = 1.0
"""Between looks at CURRENT: one stat of one small file."""

"""After a version could not be opened: to open one may mean to read all of it."""


class Watcher:
    """Takes up new versions of all indices, in a thread of its own.

    Args:
        tell: called with an index and "done" or "failed" when there was a new version.
        following: looked at as well; None where no folder is followed.
    """

    def __init__(
        self,
        indices: Indices,
        tell: Callable[[ServedIndex, str], None],
        following: Following | None = None,
        every_s: float = LOOK_S,
    ) -> None:
        self._indices, self._tell, self._following, self._every_s = indices, tell, following, every_s
        self._not_before: dict[ServedIndex, float] = {}
        self._counted: set[ServedIndex] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; returns when the last look is over."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            if self._following is not None:
                try:
                    self._following.look_when_due()
                except Exception:  # noqa: BLE001 - a folder that embq has a bug with must not end the watch
                    _log.bug("bug")
            for index in self._indices.all:
                if time.monotonic() >= self._not_before.get(index, 0.0):
                    self._look(index)
            served = set(self._indices.all)
            self._counted &= served
            self._not_before = {index: at for index, at in self._not_before.items() if index in served}
            if self._stopped.wait(self._every_s):
                return

    def _look(self, index: ServedIndex) -> None:
        try:
            if index.refresh():
                self._tell(index, "done")
                self._counted.discard(index)
            if index not in self._counted:
                self._counted.add(index)
                index.count()
        except (EmbqError, OSError):
            self._failed(index)
        except Exception:  # noqa: BLE001 - one version that embq has a bug with must not end the watch
            _log.bug("bug", index=index.name)
            self._failed(index)

    def _failed(self, index: ServedIndex) -> None:
        self._not_before[index] = time.monotonic() + RETRY_S
        self._tell(index, "failed")


MODALITIES = ("image", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An index folder with the name and the modality by which requests ask for it."""

    name: str
    modality: str
    path: Path


def named_indices(indices: Sequence[str], names: Sequence[str], modality_of: Callable[[Path], str]) -> list[Named]:
    """All that is to be served, in the order of the command line; those of `names` stand last.

    Args:
        indices: folders: of an index, or of a run with its indices. An index below a run has the run's name, so that
            its images and its texts are two modalities of one name, as in clip-retrieval.
        names: NAME=FOLDER.
        modality_of: what an index folder holds: "image" or "text".

    Raises:
        UsageError: a name is given twice, or is none.
        InputError: `no_index`.
    """
    given = [("", folder) for folder in indices]
    for pair in names:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder):
            raise UsageError(f"--name {pair!r} is not NAME=INDEX", next_step="write --name photos=./out/index/image")
        given.append((name, folder))
    if not given:
        raise UsageError("there is no index to serve", next_step="embq serve OUT, with the output of a run")
    found: dict[tuple[str, str], Named] = {}
    for name, folder in given:
        for path in _index_folders(Path(folder)):
            one = Named(name=name or _name_of(path), modality=modality_of(path), path=path)
            other = found.setdefault((one.name, one.modality), one)
            if other is not one and other.path != path:
                raise UsageError(
                    f"{other.path} and {path} would both be {one.name!r} with modality {one.modality!r}",
                    next_step=f"give one of them another name: --name OTHER={path}",
                )
    return list(found.values())


def _index_folders(folder: Path) -> list[Path]:
    """The folder itself where it is an index, else the indices of the run in it."""
    folder = folder.resolve()
    refuse_unnameable(str(folder))
    if (folder / "CURRENT").is_file():
        return [folder]
    indices = folder / "index"
    below = sorted(path for path in indices.iterdir() if (path / "CURRENT").is_file()) if indices.is_dir() else []
    if not below:
        raise InputError(
            f"there is no index in {folder}", next_step=f"embq index {folder}, for the output of a run", code="no_index"
        )
    return below


def _name_of(index: Path) -> str:
    """The run's name for an index in its usual place, OUT/index/OUTPUT; else the folder's own."""
    return index.parent.parent.name if index.parent.name == "index" else index.name


WALK_S = 5.0
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
        self._due = time.monotonic() + max(WALK_S, SHARE * walked_s)

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
