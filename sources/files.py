"""Kind "files": a folder of images, with a caption in a .txt and metadata in a .json beside each."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from core.errors import InputError, SampleError, SourceError
from core.units import UNIT_SPEC_MAX_BYTES, Sample, Unit
from sources.base import Moved, ReadOptions, unwatched
from sources.extensions import Extensions, extensions_of, named
from sources.fields import decode_metadata
from sources.file_samples import local_sample, optional, remote_samples
from sources.folder_walk import counted, images_of, shown, walk
from sources.inside import read_if_there
from sources.remote import fetch_all
from sources.storage import join, source_errors
from sources.urls import is_url

_ASKED = 10
"""Images of a unit beside which metadata are looked for, before a unit is looked into."""


class FilesSource:
    """A folder's images in units of at most `unit_samples`, ordered by their paths relative to the folder.

    The key is that path, with "/" between its parts. The user may name the extensions of images and of captions. Linked
    folders are not entered; a linked file is read only where it stays inside the folder.
    """

    kind = "files"
    modalities: tuple[str, ...] = ("image", "text")

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """Images and captions. Where the user named the extensions of captions, there must be a file with one.

        Raises SourceError `missing_member` where there is none.
        """
        if options.caption_keys:
            others: Counter[str] = Counter()
            endings = tuple(f".{key}" for key in options.caption_keys)
            if not any(name.lower().endswith(endings) for name, _ in counted(path, others)):
                raise SourceError(
                    f"{path}: no file ends in {' or '.join(endings)}; found: {shown(others)}",
                    code="missing_member",
                    next_step="check --caption-key, or leave the folder out",
                )
        return self.modalities

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units that also fit into a hint, however long the names are."""
        others: Counter[str] = Counter()
        wanted = extensions_of(named(options))
        empty = Unit(kind=self.kind, source=path, options=named(options))
        files: Iterable[tuple[str, int]] = walk(path, others)
        if is_url(path):
            files = list(files)
            empty = replace(empty, options=(*_beside(files, wanted), *empty.options))
        units = cut(empty, images_of(files, others, wanted), options.unit_samples)
        first = next(units, None)
        if first is None:
            raise InputError(
                f"{path}: no image in this folder or below it; found: {shown(others)}",
                code="empty_input",
                next_step=f"image files end in .{', .'.join(wanted.images)}; others are named with --image-key",
            )
        yield first
        yield from units

    def read(self, unit: Unit, moved: Moved = unwatched) -> Iterator[Sample]:
        """One sample per planned file. Only storage that is away, or a missing folder, fails the unit."""
        if is_url(unit.source):
            yield from remote_samples(unit, moved)
            return
        with source_errors(unit.source):
            os.stat(unit.source)
        root = os.path.realpath(unit.source)
        wanted = extensions_of(unit.options)
        for ordinal, (relative, size) in enumerate(unit.items):
            yield local_sample(root, ordinal, relative, size, wanted, moved)

    def may_have_metadata(self, unit: Unit) -> bool:
        """Whether a `.json` stands beside one of its images; beside the first ones, on this machine."""
        if is_url(unit.source):
            return ".json" in dict(unit.options).get("beside", "").split(",")
        stem = extensions_of(unit.options).stem
        paths = (os.path.join(unit.source, f"{stem(relative)}.json") for relative, _ in unit.items[:_ASKED])
        return any(map(os.path.lexists, paths))

    def first_metadata(self, unit: Unit, most: int) -> list[str]:
        """From the `.json` files beside the first images."""
        stem = extensions_of(unit.options).stem
        names = [f"{stem(relative)}.json" for relative, _ in unit.items[:most]]
        contents: Iterable[bytes | SourceError | None]
        if is_url(unit.source):
            contents = fetch_all([join(unit.source, name) for name in names], [None] * len(names), unwatched)
        else:
            root = os.path.realpath(unit.source)
            contents = (read_if_there(root, name, unwatched) for name in names)
        found = []
        for data in contents:
            with suppress(SampleError):
                if (content := optional(data)) is not None:
                    found.append(decode_metadata(content))
        return found


def cut(empty: Unit, items: Iterable[tuple[str, int]], most: int, *, first: int = 0) -> Iterator[Unit]:
    """Units of at most `most` of the files `items`, (path relative to the folder, size in bytes), in their order.

    Args:
        empty: a unit of the folder; what is said of single files in it is replaced.
        first: ordinal of the first file.
    """
    empty = replace(empty, items=(), samples=None, first=0)
    # Counted with every non-ASCII character escaped, which is never less than the UTF-8 of `canonical_json`;
    # the numbers that the empty unit does not have yet take at most 60 bytes.
    overhead = len(json.dumps(empty.describe(), separators=(",", ":"))) + 60
    gathered: list[tuple[str, int]] = []
    length = overhead
    for item in items:
        item_length = len(json.dumps(item)) + 1
        if gathered and (len(gathered) >= most or length + item_length > UNIT_SPEC_MAX_BYTES):
            yield _unit(empty, gathered, first)
            first += len(gathered)
            gathered, length = [], overhead
        gathered.append(item)
        length += item_length
    if gathered:
        yield _unit(empty, gathered, first)


def _beside(files: Iterable[tuple[str, int]], wanted: Extensions) -> tuple[tuple[str, str], ...]:
    """Which files stand beside images in a remote folder: asking for each that may not be there would be slow."""
    names = [relative.lower() for relative, _ in files]
    found = [extension for extension in wanted.beside if any(name.endswith(extension) for name in names)]
    return (("beside", ",".join(sorted(found))),) if found else ()


def _unit(empty: Unit, items: list[tuple[str, int]], first: int) -> Unit:
    return replace(empty, first=first, samples=len(items), items=tuple(items))
