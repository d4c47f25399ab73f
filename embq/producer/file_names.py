"""Names of files in keys, where files of several inputs would have one name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from embq.core.storage.paths import is_url
from embq.sources.access.urls import path_of


def distinct_names(files: Callable[[], Iterable[tuple[str, str]]]) -> dict[str, str]:
    """Path -> name, for the files whose names are equal: the shortest ends of their paths that tell them apart.

    Args:
        files: returns (path, name) of all files; called twice for each round in which names are equal.
    """
    longer: dict[str, str] = {}
    while True:
        digests: set[int] = set()
        repeated: set[int] = set()
        for path, name in files():
            digest = hash(longer.get(path, name))
            (repeated if digest in digests else digests).add(digest)
        if not repeated:
            return longer
        by_name: dict[str, list[str]] = {}
        for path, name in files():
            if hash(name := longer.get(path, name)) in repeated:
                by_name.setdefault(name, []).append(path)
        for name, paths in by_name.items():
            longer.update(zip(paths, _ends(paths, name), strict=True))


def _ends(paths: Sequence[str], name: str) -> Sequence[str]:
    """The ends of `paths` that are longer than `name` and differ, all of as few parts as that takes."""
    for parts in count(name.count("/") + 2):
        ends = [end_of(path, parts) for path in paths]
        if len(set(ends)) == len(ends):
            break
    return ends


def end_of(path: str, parts: int) -> str:
    """The last `parts` parts of a path or URL; beyond its length with a hash of it, as URLs may differ in the query."""
    components = (path_of(path) if is_url(path) else path).lstrip("/").split("/")
    end = "/".join(components[-parts:])
    if parts <= len(components):
        return end
    return f"{end}~{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
