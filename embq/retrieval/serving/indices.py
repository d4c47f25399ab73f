"""The served indexes by name and modality."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.serving.served_index import ServedIndex


class Indices:
    """The served indexes. Its state is replaced, never changed, so that threads read it without a lock.

    Args:
        indices: the first is the default of `/knn-service`.
    """

    def __init__(self, indices: list[ServedIndex]) -> None:
        self._changing = threading.Lock()
        self._set(tuple(indices))

    def add(self, index: ServedIndex) -> None:
        """Serve one more, whose name and modality are new."""
        with self._changing:
            self._set((*self.all, index))

    def remove(self, index: ServedIndex) -> None:
        """Stop to serve it; requests that have begun are answered."""
        with self._changing:
            self._set(tuple(other for other in self.all if other is not index))

    def _set(self, indices: tuple[ServedIndex, ...]) -> None:
        by_name: dict[str, dict[str, ServedIndex]] = {}
        for index in indices:
            by_name.setdefault(index.name, {})[index.modality] = index
        self.all, self._by_name = indices, by_name

    @property
    def names(self) -> list[str]:
        """In the order in which they were added."""
        return list(self._by_name)

    def has(self, name: str, modality: str) -> bool:
        """True if an index of this name and modality is served."""
        return modality in self._by_name.get(name, {})

    def of(self, name: str, modality: str) -> tuple[ServedIndex, bool]:
        """The index for a request of `/knn-service`, and whether it has the modality that was asked for.

        The only index of a name is taken whatever its modality: clip-retrieval's client asks for images by default,
        also of a collection of texts.
        """
        of_name = self._named(name or next(iter(self._by_name), ""), "indice_name")
        index = of_name.get(modality or next(iter(of_name)))
        if index is not None:
            return index, True
        if len(of_name) == 1:
            return next(iter(of_name.values())), False
        raise _no_modality(name, modality, of_name)

    def only(self, name: str, modality: str) -> ServedIndex:
        """The index of a name and a modality, for `/search`; each may be "" if it leaves no choice."""
        if not name and len(self._by_name) > 1:
            raise HttpError(
                "several indexes are served",
                code="which_index",
                next_step=f"set index to one of: {', '.join(self._by_name)}",
            )
        of_name = self._named(name or next(iter(self._by_name), ""), "index")
        if not modality and len(of_name) > 1:
            raise HttpError(
                "the index has several modalities",
                code="which_index",
                next_step=f"set modality to one of: {', '.join(of_name)}",
            )
        index = of_name.get(modality or next(iter(of_name)))
        if index is None:
            raise _no_modality(name, modality, of_name)
        return index

    def at(self, qualified_name: str) -> ServedIndex | None:
        """The index with a `qualified_name`; for "" the first one, or None. Raises as `only`."""
        name, _, modality = qualified_name.rpartition(":")
        return self.only(name, modality) if qualified_name else next(iter(self.all), None)

    def _named(self, name: str, field: str) -> dict[str, ServedIndex]:
        by_name = self._by_name
        if not by_name:
            raise HttpError(
                "no index is served yet",
                code="no_index",
                next_step="embq index OUT, for a run below the followed folder, and ask again",
                status=503,
                retry_after_s=10,
            )
        if name not in by_name:
            raise HttpError(
                f"there is no index {name[:100]!r}",
                code="no_such_index",
                next_step=f"set {field} to one of: {', '.join(by_name)}",
                status=404,
            )
        return by_name[name]


def _no_modality(name: str, modality: str, of_name: Mapping[str, ServedIndex]) -> HttpError:
    return HttpError(
        f"index {name!r} has no modality {modality!r}",
        code="no_such_index",
        next_step=f"set modality to one of: {', '.join(of_name)}",
        status=404,
    )
