"""Discovery of the indexes to serve: their names, and a thread that takes up new versions and new indexes.

Names come from the command line (`named_indices`), or, for a folder that is followed, from the path of each index below
it (`followed_name`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from embq.core.errors import EmbqError, TryLaterError, UsageError
from embq.core.service.log import Events
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place, is_url, place, refuse_missing, refuse_unnameable
from embq.retrieval.serving.indices import Indices
from embq.retrieval.serving.metrics import Metrics
from embq.retrieval.serving.query_models import QueryModels
from embq.retrieval.serving.served_index import ServedIndex, modality_of

LOOK_S = 1.0
"""Between looks at CURRENT: one stat of one small file."""

WALK_S = 5.0
"""Between walks through the followed folders."""

WALK_SHARE = 50
"""A walk is repeated after this many times its own duration at the earliest: one through a slow mount costs 2 %."""

RETRY_S = 10.0
"""After an index or a version could not be opened: opening may mean reading all of it."""

DEPTH = 6
"""Levels below a followed folder at which an index is looked for: FOLDER/team/project/run/index/text has 5."""

PLAIN_OUTPUTS = ("image", "text")
"""Outputs of a run of one model. Their indexes have the run's name, those of other outputs RUN/OUTPUT."""

_log = Events("serve")


# --- names ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An index folder with the name and the modality by which requests ask for it.

    Attributes:
        source: place on an object store of which the folder is the cached copy; None for a folder of its own.
    """

    name: str
    modality: str
    path: Path
    source: ObjectPath | None = None


def named_indices(indices: Sequence[str], names: Sequence[str]) -> list[Named]:
    """The indexes of the command line, in its order; those of `names` last.

    Args:
        indices: folders or URLs: of an index, or of a run with its indexes. An index below a run has the run's name, so
            that its images and its texts are two modalities of one name, as in clip-retrieval.
        names: NAME=FOLDER or NAME=URL.

    Raises:
        UsageError: a name is given twice, or is invalid.
        InputError: `no_index`.
        EmbqError: what fetching the index of a URL raises.
    """
    from embq.index.index_files.remote import fetched

    given = [("", folder) for folder in indices]
    for pair in names:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder) or {"", ".", ".."} & {*name.split("/")}:
            raise UsageError(f"--name {pair!r} is not NAME=INDEX", next_step="write --name photos=./out/index/image")
        given.append((name, folder))
    if not given:
        raise UsageError("there is no index to serve", next_step="embq serve OUT, with the output of a run")
    named: dict[tuple[str, str], Named] = {}
    for name, folder in given:
        for where in _index_folders(place(folder) if is_url(folder) else Path(folder).resolve()):
            source = where if isinstance(where, ObjectPath) else None
            path = where if isinstance(where, Path) else fetched(where, on_load=_tell_fetch)
            index = Named(name=name or _name_of(where), modality=modality_of(path), path=path, source=source)
            other = named.setdefault((index.name, index.modality), index)
            if other is not index and other.path != path:
                raise UsageError(
                    f"{other.path} and {path} would both be {index.name!r} with modality {index.modality!r}",
                    next_step=f"give one of them another name: --name OTHER={path}",
                )
    return list(named.values())


def _index_folders(folder: Place) -> Sequence[Place]:
    """The folder itself if it is an index, else the indexes of the run in it."""
    from embq.index.index_files.files import asking
    from embq.index.index_files.version import indexes_below, no_index

    refuse_unnameable(str(folder))
    if isinstance(folder, Path):
        refuse_missing(folder)
    with asking(folder) if isinstance(folder, ObjectPath) else nullcontext():
        if (folder / "CURRENT").exists():
            return [folder]
        below = list(indexes_below(folder).values())
    if not below:
        raise no_index(folder)
    return below


def _name_of(index: Place) -> str:
    """The run's name for an index in its usual place, OUT/index/OUTPUT; else the folder's own."""
    return index.parent.parent.name if index.parent.name == "index" else index.name


def followed_name(index: Path, folder: Path) -> str:
    """The name of an index below a followed folder: the relative path of its run, which is unique."""
    of_run = index.parent.name == "index" and index != folder
    run = index.parent.parent if of_run else index
    relative = run.relative_to(folder).as_posix() if run.is_relative_to(folder) else "."
    name = run.name if relative == "." else relative
    return f"{name}/{index.name}" if of_run and index.name not in PLAIN_OUTPUTS else name


def published_below(folder: Path) -> Iterator[Path]:
    """The folders of all indexes at or below a folder, in order. Of a run only its `index` is searched."""
    visited: set[tuple[int, int]] = set()

    def walk(at: Path, depth: int) -> Iterator[Path]:
        try:
            status = at.stat()
            with os.scandir(at) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            return  # not readable, or removed meanwhile
        if (status.st_dev, status.st_ino) in visited:
            return  # a link to a folder that was visited
        visited.add((status.st_dev, status.st_ino))
        names = {entry.name for entry in inside}
        if "CURRENT" in names:
            yield at
            return
        for entry in inside:
            below = entry.name == "index" if "run.json" in names else entry.name[0] not in "._"
            if below and depth < DEPTH and _is_folder(entry):
                yield from walk(at / entry.name, depth + 1)

    yield from walk(folder, 0)


def _tell_fetch(what: str) -> None:
    """Log that an index is being fetched."""
    _log.info("index_fetch", what=what)


# --- watching ---


class IndexWatcher:
    """Keeps the served indexes current, in a thread of its own, with their metrics and models.

    Args:
        indices: those of the command line; indexes below followed folders are added and removed.
        folders: followed, absolute.
        opened: opens an index.

    Attributes:
        failed: index folder -> its name, and why it could not be opened. Replaced, never changed: threads read it.
    """

    def __init__(
        self,
        indices: Indices,
        folders: Sequence[Path],
        *,
        opened: Callable[[Named], ServedIndex],
        models: QueryModels,
        metrics: Metrics,
    ) -> None:
        self.failed: dict[Path, tuple[str, str]] = {}
        self._indices, self._folders = indices, folders
        self._opened, self._models, self._metrics = opened, models, metrics
        self._followed: dict[Path, ServedIndex] = {}
        self._retry_at: dict[Path, float] = {}
        self._walk_at = 0.0
        self._counted: set[ServedIndex] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)
        for index in indices.all:
            self._report(index)
        self._walk()

    @property
    def follows(self) -> bool:
        """True if any folder is followed."""
        return bool(self._folders)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; returns when its last look is over."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            if time.monotonic() >= self._walk_at:
                try:
                    self._walk()
                except Exception:  # noqa: BLE001 - a bug with one folder must not end the watch
                    _log.bug("bug")
            served = self._indices.all
            for index in served:
                if time.monotonic() >= self._retry_at.get(index.path, 0.0):
                    self._refresh(index)
            self._counted &= set(served)
            if self._stopped.wait(LOOK_S):
                return

    def _refresh(self, index: ServedIndex) -> None:
        """Take up a new version of an index, and count the rows of its collection once for each version."""
        try:
            if index.refresh(self._go_on):
                self._count_reload(index, "done")
                self._report(index)
                self._models.want(index.version)
                self._counted.discard(index)
            if index not in self._counted:
                self._counted.add(index)
                index.count()
            return
        except (EmbqError, OSError):
            pass
        except Exception:  # noqa: BLE001 - a bug with one version must not end the watch
            _log.bug("bug", index=index.name)
        self._retry_at[index.path] = time.monotonic() + RETRY_S
        self._count_reload(index, "failed")

    def _go_on(self) -> None:
        """End a fetch once the server stops."""
        if self._stopped.is_set():
            raise TryLaterError("the server stops")

    def _walk(self) -> None:
        """Look for new and removed indexes below the followed folders."""
        began = time.monotonic()
        published = {path: folder for folder in reversed(self._folders) for path in published_below(folder)}
        walked_s = time.monotonic() - began
        for path in [path for path in self._followed if _is_gone(path)]:
            self._drop(path)
        self.failed = {path: failure for path, failure in self.failed.items() if path in published}
        for path, folder in published.items():
            if path not in self._followed and time.monotonic() >= self._retry_at.get(path, 0.0):
                self._add(path, followed_name(path, folder))
        self._walk_at = time.monotonic() + max(WALK_S, WALK_SHARE * walked_s)

    def _add(self, path: Path, name: str) -> None:
        try:
            named = Named(name=name, modality=modality_of(path), path=path)
            if self._indices.has(named.name, named.modality):
                raise UsageError("another index has its name and modality", next_step=f"--name OTHER={path}")
            index = self._opened(named)
        except (EmbqError, OSError) as error:
            self._fail(path, name, str(error))
            return
        except Exception:  # noqa: BLE001 - a bug with one index must not end the watch
            _log.bug("bug", index=name)
            self._fail(path, name, "embq has a bug; its log holds the details")
            return
        self.failed = {other: failure for other, failure in self.failed.items() if other != path}
        self._followed[path] = index
        self._indices.add(index)
        self._report(index)
        self._models.want(index.version)
        _log.info("index_taken_up", index=name, modality=index.modality, version=index.version.name)

    def _drop(self, path: Path) -> None:
        index = self._followed.pop(path)
        self._retry_at.pop(path, None)
        self._indices.remove(index)
        for name in ("embq_index_rows", "embq_index_info"):
            self._metrics.gauges[name].remove_by_labels({"index": index.name, "modality": index.modality})
        index.retire()
        _log.info("index_gone", index=index.name, modality=index.modality)

    def _fail(self, path: Path, name: str, why: str) -> None:
        self._retry_at[path] = time.monotonic() + RETRY_S
        if self.failed.get(path) != (name, why):
            self.failed = {**self.failed, path: (name, why)}
            _log.warning("index_not_taken_up", index=name, why=why)

    def _report(self, index: ServedIndex) -> None:
        """Set the metrics of the version that is open."""
        version, labels = index.version, {"index": index.name, "modality": index.modality}
        self._metrics.gauges["embq_index_rows"].labels(index.name, index.modality).set(version.rows)
        info = self._metrics.gauges["embq_index_info"]
        info.remove_by_labels(labels)
        info.labels(index.name, index.modality, version.name).set(1)

    def _count_reload(self, index: ServedIndex, result: str) -> None:
        self._metrics.counters["embq_index_reloads_total"].labels(index.name, index.modality, result).inc()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_gone(index: Path) -> bool:
    """True if an index was removed; storage that does not answer removes nothing."""
    try:
        (index / "CURRENT").stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
