"""What files there are in a folder and below it, and which of them are images."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator

from core.service.log import Events
from sources import listings
from sources.extensions import ALL, Extensions
from sources.storage import source_errors
from sources.urls import is_url

log = Events("sources")


def walk_images(path: str, others: Counter[str], image_keys: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """(relative path, bytes) of every image below a folder, sorted by relative path.

    `others` counts the extensions of files that are no images. `image_keys` are those of images; () takes all known.
    """
    return images_of(walk(path, others), others, Extensions(images=image_keys) if image_keys else ALL)


def is_image(name: str) -> bool:
    """Whether the name ends in a known image extension, in either case."""
    return ALL.is_image(name)


def walk(path: str, others: Counter[str]) -> Iterable[tuple[str, int]]:
    """(relative path, bytes) of every file; `others` counts the linked folders that are not entered."""
    return listings.walk(path) if is_url(path) else _walk_local(path, others)


def images_of(files: Iterable[tuple[str, int]], others: Counter[str], wanted: Extensions) -> Iterator[tuple[str, int]]:
    """Those of the files that are images; `others` counts the extensions of the rest."""
    endings = tuple(f".{extension}" for extension in wanted.images)
    for relative, size in files:
        if relative.lower().endswith(endings):
            yield relative, size
        else:
            others[_extension(relative)] += 1


def counted(path: str, others: Counter[str]) -> Iterator[tuple[str, int]]:
    """Every file; `others` counts their extensions."""
    for relative, size in walk(path, others):
        others[_extension(relative)] += 1
        yield relative, size


def _extension(relative: str) -> str:
    return os.path.splitext(relative)[1].lower() or "no extension"


def shown(others: Counter[str]) -> str:
    """The most frequent extensions, for a message."""
    return ", ".join(f"{name} ({count:,})" for name, count in others.most_common(8)) or "nothing"


def _walk_local(path: str, others: Counter[str]) -> Iterator[tuple[str, int]]:
    """(relative path, bytes) of every file. One folder's names are held at a time, not the tree's."""
    links: list[str] = []
    stack: list[tuple[str, os.DirEntry[str] | None]] = [("", None)]
    while stack:
        relative, entry = stack.pop()
        if entry is not None and not relative.endswith("/"):
            if entry.is_symlink() and os.path.isdir(entry.path):
                links.append(relative)
            else:
                yield relative, _size(entry)
            continue
        with source_errors(os.path.join(path, relative)), os.scandir(os.path.join(path, relative)) as entries:
            # A folder sorts by its name with the slash, so that the whole walk is in order of the full paths.
            found = [
                (f"{relative}{child.name}{'/' if child.is_dir(follow_symlinks=False) else ''}", child)
                for child in entries
            ]
        found.sort(key=lambda pair: pair[0], reverse=True)
        stack.extend(found)
    if links:
        others["linked folder, not followed"] += len(links)
        log.warning("linked_folders_skipped", path=path, folders=len(links), first=links[0])


def _size(entry: os.DirEntry[str]) -> int:
    """The file's size, or 0 where the entry is a link to nothing: reading it then says so."""
    try:
        return entry.stat().st_size
    except OSError:
        return 0
