"""The indices that are served, by the names and modalities by which requests ask for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from embq.serving.http_errors import Refusal
from embq.serving.served_index import ServedIndex


class Indices:
    """All that is served, by name and modality. What it says of itself is replaced, never changed, when one comes.

    Args:
        indices: the first is taken where a request to `/knn-service` names none.
    """

    def __init__(self, indices: list[ServedIndex]) -> None:
        self._changing = threading.Lock()
        self._set(tuple(indices))

    def add(self, index: ServedIndex) -> None:
        """Serve one more; `has` does not know its name and modality."""
        with self._changing:
            self._set((*self.all, index))

    def remove(self, index: ServedIndex) -> None:
        """Serve it no more; requests that have begun are answered."""
        with self._changing:
            self._set(tuple(one for one in self.all if one is not index))

    def _set(self, indices: tuple[ServedIndex, ...]) -> None:
        by_name: dict[str, dict[str, ServedIndex]] = {}
        for index in indices:
            by_name.setdefault(index.name, {})[index.modality] = index
        self.all, self._by_name = indices, by_name

    @property
    def names(self) -> list[str]:
        """In the order in which they were given, or found."""
        return list(self._by_name)

    def has(self, name: str, modality: str) -> bool:
        """Whether there is this one."""
        return modality in self._by_name.get(name, {})

    def of(self, name: str, modality: str) -> tuple[ServedIndex, bool]:
        """The index that a request of clip-retrieval's kind means, and whether it has the modality that it asks for.

        A name with one index has nothing to choose from: that one is taken. clip-retrieval's client asks for images
        unless it is told otherwise, also of a collection of texts.
        """
        of_name = self._named(name or next(iter(self._by_name), ""), "indice_name")
        index = of_name.get(modality or next(iter(of_name)))
        if index is not None:
            return index, True
        if len(of_name) == 1:
            return next(iter(of_name.values())), False
        raise _no_modality(name, modality, of_name)

    def meant(self, name: str, modality: str) -> ServedIndex:
        """The one index that a name and a modality, each of which may be "", can only mean."""
        if not name and len(self._by_name) > 1:
            raise Refusal(
                "several indices are served",
                code="which_index",
                next_step=f"set index to one of: {', '.join(self._by_name)}",
            )
        of_name = self._named(name or next(iter(self._by_name), ""), "index")
        if not modality and len(of_name) > 1:
            raise Refusal(
                "the index has several modalities",
                code="which_index",
                next_step=f"set modality to one of: {', '.join(of_name)}",
            )
        index = of_name.get(modality or next(iter(of_name)))
        if index is None:
            raise _no_modality(name, modality, of_name)
        return index

    def _named(self, name: str, field: str) -> dict[str, ServedIndex]:
        by_name = self._by_name
        if not by_name:
            raise Refusal(
                "no index is served yet",
                code="no_index",
                next_step="embq index OUT, for a run below the folder that is followed, and ask again",
                status=503,
                retry_after_s=10,
            )
        if name not in by_name:
            raise Refusal(
                f"there is no index {name[:100]!r}",
                code="no_such_index",
                next_step=f"set {field} to one of: {', '.join(by_name)}",
                status=404,
            )
        return by_name[name]


def _no_modality(name: str, modality: str, of_name: Mapping[str, ServedIndex]) -> Refusal:
    return Refusal(
        f"index {name!r} has no modality {modality!r}",
        code="no_such_index",
        next_step=f"set modality to one of: {', '.join(of_name)}",
        status=404,
    )
