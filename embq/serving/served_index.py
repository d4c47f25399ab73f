"""One index that is served, in the version that CURRENT names, while others publish new ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from core.errors import EmbqError
from core.service.log import Events
from embq.serving.http_errors import Refusal

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_log = Events("serve")


class Found(Protocol):
    """The answer to a search: `ids` int64 (q, k), -1 where there are fewer, and `scores` float32 (q, k)."""

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def scores(self) -> np.ndarray: ...


class Searchable(Protocol):
    """One version of an index, open. One thread at a time."""

    def search(self, vectors: np.ndarray, k: int, *, nprobe: int | None = None, refine: bool | None = None) -> Found:
        """The nearest rows of float32 (q, d); see `indexer.searcher.Searcher.search`."""
        ...

    def rows(self, ids: np.ndarray) -> pa.Table:
        """Identity and metadata of rows, in the order of `ids`."""
        ...

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """float32 (n, d) of rows."""
        ...

    def vector_of(self, id_: int) -> np.ndarray:
        """float32 (d,) of a row: of the index where it keeps it, else of what was indexed."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a query becomes a vector of an index.

    Attributes:
        model: JSON-ready description of the model, with the output that is indexed.
        rows: JSON-ready description of what is stored of a vector.
        key: equal for recipes that give equal vectors.
    """

    model: Mapping[str, Any]
    rows: Mapping[str, Any]
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What the server says of a version.

    Attributes:
        name: such as v0003.
        rows: how many can be found.
        ids: how many ids there are: 0 to `ids` - 1.
        dim: of queries.
        cosine: whether scores are cosines, so that queries are brought to length 1.
        model: its spec; "" where the index does not say which model made its vectors.
        fingerprint: of the model.
        recipe: how a query becomes a vector of this index; versions with equal ones share a loaded model.
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


class Open:
    """An open version, and how many requests use it.

    Attributes:
        turn: who has it may use `searchable`. A search takes a millisecond, and a second copy of an index as much
            memory as the first, so requests take turns; those that wait hold no thread.
    """

    def __init__(self, searchable: Searchable, version: Version) -> None:
        self.searchable = searchable
        self.version = version
        self.turn = anyio.CapacityLimiter(1)
        self.users = 0
        self.retired = False


Opener = Callable[[Path], tuple[Searchable, Version]]


class ServedIndex:
    """One index folder under the name and modality by which requests ask for it.

    Args:
        opener: opens the version that CURRENT names.
        counted: how many rows its collection has now; None where that cannot be seen from here.

    Attributes:
        source_rows: what `counted` has said for the version that is open.
        failed: why the last new version could not be opened; "" where it could.
    """

    def __init__(
        self, *, name: str, modality: str, path: Path, opener: Opener, counted: Callable[[Path], int | None]
    ) -> None:
        self.name, self.modality, self.path = name, modality, path
        self._opener, self._counted = opener, counted
        self._lock = threading.Lock()
        self._looked = self._look()
        self._open = Open(*opener(path))
        self.failed = ""
        self.source_rows: int | None = None

    @property
    def version(self) -> Version:
        """The version that the next request is answered from."""
        return self._open.version

    @contextmanager
    def use(self) -> Iterator[Open]:
        """The current version; it stays open for as long as the block lasts, whatever is published meanwhile."""
        with self._lock:
            held = self._open
            if held.retired:
                raise Refusal(
                    f"index {self.name!r} was removed", code="no_such_index", next_step="GET /indices-list", status=404
                )
            held.users += 1
        try:
            yield held
        finally:
            with self._lock:
                held.users -= 1
                over = held.retired and held.users == 0
            if over:
                held.searchable.close()

    def refresh(self) -> bool:
        """Take up the version that CURRENT names, where that is another one than the last time; says whether it did.

        A version that cannot be opened leaves the old one at work; it is tried again at every call.
        """
        look = self._look()
        if look is None or look == self._looked:
            return False
        try:
            new = Open(*self._opener(self.path))
        except (EmbqError, OSError) as error:
            self._say_failed(error)
            raise
        self._looked, self.failed = look, ""
        with self._lock:
            old, self._open = self._open, new
            old.retired = True
            over = old.users == 0
        if over:
            old.searchable.close()
        _log.info("index_reloaded", index=self.name, modality=self.modality, version=new.version.name)
        return True

    def count(self) -> None:
        """Look how many rows the collection has."""
        self.source_rows = self._counted(self.path)

    def retire(self) -> None:
        """Close it when the last request that uses it has ended; later ones are refused."""
        with self._lock:
            held = self._open
            held.retired = True
            over = held.users == 0
        if over:
            held.searchable.close()

    def close(self) -> None:
        """Close it; nobody may use it any more."""
        self._open.searchable.close()

    def _look(self) -> tuple[str, int, int] | None:
        """What CURRENT says and which file it is: an index that was built anew may have versions of the same names."""
        path = self.path / "CURRENT"
        try:
            with path.open(encoding="utf-8") as file:
                status = path.stat()
                return file.read(64), status.st_ino, status.st_mtime_ns
        except (OSError, ValueError):
            return None

    def _say_failed(self, error: Exception) -> None:
        told = str(error)
        if told != self.failed:
            self.failed = told
            _log.warning("index_not_reloaded", index=self.name, modality=self.modality, why=told)
