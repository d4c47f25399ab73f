"""One served index: the version that CURRENT names, kept open for requests while newer versions are published."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from embq.core.errors import EmbqError
from embq.core.service.log import Events
from embq.core.storage import beneath
from embq.core.storage.objects import ObjectPath
from embq.retrieval.serving.http_errors import HttpError

if TYPE_CHECKING:
    from embq.index.searcher import Searcher

ASK_S = 30.0
"""Between looks at an index on an object store: two requests each."""

_log = Events("serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The model and row format that turn a query into a vector of an index.

    Attributes:
        model: JSON-ready description of the model, with the output that is indexed.
        rows: JSON-ready description of how a vector is stored.
        key: equal for recipes that give equal vectors.
    """

    model: Mapping[str, Any]
    rows: Mapping[str, Any]
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """Description of a version, as reported by `/health`.

    Attributes:
        name: such as v0003.
        rows: how many can be found.
        ids: how many ids there are: 0 to `ids` - 1.
        dim: of queries.
        cosine: whether scores are cosines, so that queries are normalised to length 1.
        model: its spec; "" if the index does not say which model made its vectors.
        fingerprint: of the model.
        recipe: of query vectors; versions with equal recipes share a loaded model.
        output: which of the vectors of a run it holds, such as image, text or clip_image.
    """

    name: str
    rows: int
    ids: int
    dim: int
    cosine: bool
    model: str
    fingerprint: str | None
    recipe: Recipe | None
    output: str = ""


class OpenVersion:
    """An open version, and how many requests use it.

    Attributes:
        searcher: used by one thread at a time, the one that holds `turn`.
        turn: a search takes a millisecond, and a second copy of an index as much memory as the first, so requests take
            turns; those that wait hold no thread.
    """

    def __init__(self, searcher: Searcher, info: VersionInfo) -> None:
        self.searcher, self.info = searcher, info
        self.turn = anyio.CapacityLimiter(1)
        self.users = 0
        self.retired = False


class ServedIndex:
    """One index folder under the name and modality by which requests ask for it.

    Args:
        opener: opens the version that CURRENT names.
        count_rows: rows that the collection has now; None if that cannot be seen from here.
        source: place on an object store of which the folder is the cached copy; None for a folder of its own.

    Attributes:
        source_rows: the last result of `count_rows`.
        failed: why the last new version could not be opened; "" if it could.
    """

    def __init__(
        self,
        *,
        name: str,
        modality: str,
        path: Path,
        opener: Callable[[Path], tuple[Searcher, VersionInfo]],
        count_rows: Callable[[Path], int | None],
        source: ObjectPath | None = None,
    ) -> None:
        self.name, self.modality, self.path = name, modality, path
        self._source, self._ask_at = source, time.monotonic() + ASK_S
        self._opener, self._count_rows = opener, count_rows
        self._lock = threading.Lock()
        self._current = self._read_current()
        self._open = OpenVersion(*opener(path))
        self.failed = ""
        self.source_rows: int | None = None

    @property
    def qualified_name(self) -> str:
        """NAME:MODALITY, as addresses of pages have it."""
        return f"{self.name}:{self.modality}"

    @property
    def version(self) -> VersionInfo:
        """The version that is searched now."""
        return self._open.info

    @contextmanager
    def use(self) -> Iterator[OpenVersion]:
        """The current version; it stays open for as long as the block lasts, even when a newer one is published."""
        with self._lock:
            held = self._open
            if held.retired:
                raise HttpError(
                    f"index {self.name!r} was removed", code="no_such_index", next_step="GET /indices-list", status=404
                )
            held.users += 1
        try:
            yield held
        finally:
            with self._lock:
                held.users -= 1
                unused = held.retired and held.users == 0
            if unused:
                held.searcher.close()

    def refresh(self, on_progress: Callable[[], None] = lambda: None) -> bool:
        """Open the version that CURRENT names if it has changed; whether a new version is open.

        A version that cannot be fetched or opened leaves the old one in use; it is tried again at every call.

        Args:
            on_progress: called again and again while a version is fetched; what it raises ends that.
        """
        try:
            if self._source is not None and time.monotonic() >= self._ask_at:
                from embq.index.index_files.remote import fetched

                self._ask_at = time.monotonic() + ASK_S
                fetched(self._source, on_progress=on_progress)
                if self._read_current() == self._current:
                    self.failed = ""
            current = self._read_current()
            if current is None or current == self._current:
                return False
            new = OpenVersion(*self._opener(self.path))
        except (EmbqError, OSError) as error:
            if str(error) != self.failed:
                self.failed = str(error)
                _log.warning("index_not_reloaded", index=self.name, modality=self.modality, why=self.failed)
            raise
        self._current, self.failed = current, ""
        self._retire(replaced_by=new)
        _log.info("index_reloaded", index=self.name, modality=self.modality, version=new.info.name)
        return True

    def count(self) -> None:
        """Update `source_rows`."""
        self.source_rows = self._count_rows(self.path)

    def retire(self) -> None:
        """Close it when the last request that uses it has ended; later ones are refused."""
        self._retire(replaced_by=self._open)

    def close(self) -> None:
        """Close it at once."""
        self._open.searcher.close()

    def _retire(self, *, replaced_by: OpenVersion) -> None:
        with self._lock:
            old, self._open = self._open, replaced_by
            old.retired = True
            unused = old.users == 0
        if unused:
            old.searcher.close()

    def _read_current(self) -> tuple[str, int, int] | None:
        """Content and identity of CURRENT: an index that was rebuilt may have versions of the same names."""
        path = self.path / "CURRENT"
        try:
            with beneath.open_regular(path) as file:
                status = os.fstat(file.fileno())
                return file.read(64).decode(), status.st_ino, status.st_mtime_ns
        except (OSError, ValueError):
            return None


# --- reading an index folder ---


def open_version(path: Path, *, memory: str, threads: int) -> tuple[Searcher, VersionInfo]:
    """Open the current version of an index folder."""
    from embq.index.searcher import Searcher

    searcher = Searcher.open(path, memory=memory, threads=threads)
    version, collection = searcher.version, searcher.version.collection
    recipe = None
    if collection.model is not None:
        # The outputs of one model, images and texts, need the same query vectors.
        identity = [collection.fingerprint, collection.model["output"]["spec"], collection.rows_spec]
        recipe = Recipe(model=collection.model, rows=collection.rows_spec, key=json.dumps(identity, sort_keys=True))
    return searcher, VersionInfo(
        name=version.name,
        rows=version.n,
        ids=version.next_id,
        dim=version.plan.dim,
        cosine=version.plan.metric == "cosine",
        model="" if collection.model is None else str(collection.model["output"]["spec"]),
        fingerprint=collection.fingerprint,
        recipe=recipe,
        output=collection.output,
    )


def modality_of(path: Path) -> str:
    """Modality of an index: of the model that made its vectors, else by their name, such as text_embedding, img_emb."""
    from embq.index.index_files.version import read_current

    collection = read_current(path).collection
    if collection.model is not None:
        return str(collection.model["output"]["modality"])
    return "text" if "text" in collection.output else "image"


def collection_rows(path: Path) -> int | None:
    """Rows of the collection of an index now; None if it is gone or of another kind."""
    from embq.index.collection.opening import rows_now
    from embq.index.index_files.version import read_current

    try:
        return rows_now(read_current(path).collection)
    except (EmbqError, OSError):
        return None
