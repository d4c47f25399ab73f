"""Kind "files": a folder of images, with a caption in a .txt and metadata in a .json beside each."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from core.errors import InputError, SampleError, SourceError
from core.log import Events
from core.units import UNIT_SPEC_MAX_BYTES, Sample, Unit
from sources import listings
from sources.base import Moved, ReadOptions, unwatched
from sources.extensions import ALL, Extensions, extensions_of, named
from sources.fields import decode_metadata, decode_text
from sources.remote import fetch_all
from sources.storage import SAMPLE_MAX_BYTES, WatchedFile, join, read_all, source_errors
from sources.urls import is_url

log = Events("sources")

_ASKED = 10
"""Images of a unit beside which metadata are looked for, before a unit is looked into."""

_PERMANENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of one file; any other says something about the disk, and the unit is worth another try."""


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
            if not any(name.lower().endswith(endings) for name, _ in _counted(path, others)):
                raise SourceError(
                    f"{path}: no file ends in {' or '.join(endings)}; found: {_shown(others)}",
                    code="missing_member",
                    next_step="check --caption-key, or leave the folder out",
                )
        return self.modalities

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units that also fit into a hint, however long the names are."""
        others: Counter[str] = Counter()
        wanted = extensions_of(named(options))
        empty = Unit(kind=self.kind, source=path, options=named(options))
        files: Iterable[tuple[str, int]] = _walk(path, others)
        if is_url(path):
            files = list(files)
            empty = replace(empty, options=(*_beside(files, wanted), *empty.options))
        units = cut(empty, _images(files, others, wanted), options.unit_samples)
        first = next(units, None)
        if first is None:
            raise InputError(
                f"{path}: no image in this folder or below it; found: {_shown(others)}",
                code="empty_input",
                next_step=f"image files end in .{', .'.join(wanted.images)}; others are named with --image-key",
            )
        yield first
        yield from units

    def read(self, unit: Unit, moved: Moved = unwatched) -> Iterator[Sample]:
        """One sample per planned file. Only storage that is away, or a missing folder, fails the unit."""
        if is_url(unit.source):
            yield from _read_remote(unit, moved)
            return
        with source_errors(unit.source):
            os.stat(unit.source)
        root = os.path.realpath(unit.source)
        wanted = extensions_of(unit.options)
        for ordinal, (relative, size) in enumerate(unit.items):
            yield _sample(root, ordinal, relative, size, wanted, moved)

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
            contents = (_read_beside(root, name, unwatched) for name in names)
        found = []
        for data in contents:
            with suppress(SampleError):
                if (content := _optional(data)) is not None:
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


def walk_images(path: str, others: Counter[str], image_keys: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """(relative path, bytes) of every image below a folder, sorted by relative path.

    `others` counts the extensions of files that are no images. `image_keys` are those of images; () takes all known.
    """
    return _images(_walk(path, others), others, Extensions(images=image_keys) if image_keys else ALL)


def _walk(path: str, others: Counter[str]) -> Iterable[tuple[str, int]]:
    return listings.walk(path) if is_url(path) else _walk_local(path, others)


def _images(files: Iterable[tuple[str, int]], others: Counter[str], wanted: Extensions) -> Iterator[tuple[str, int]]:
    endings = tuple(f".{extension}" for extension in wanted.images)
    for relative, size in files:
        if relative.lower().endswith(endings):
            yield relative, size
        else:
            others[_extension(relative)] += 1


def _counted(path: str, others: Counter[str]) -> Iterator[tuple[str, int]]:
    """Every file; `others` counts their extensions."""
    for relative, size in _walk(path, others):
        others[_extension(relative)] += 1
        yield relative, size


def _extension(relative: str) -> str:
    return os.path.splitext(relative)[1].lower() or "no extension"


def _shown(others: Counter[str]) -> str:
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


def is_image(name: str) -> bool:
    """Whether the name ends in a known image extension, in either case."""
    return ALL.is_image(name)


def _beside(files: Iterable[tuple[str, int]], wanted: Extensions) -> tuple[tuple[str, str], ...]:
    """Which files stand beside images in a remote folder: asking for each that may not be there would be slow."""
    names = [relative.lower() for relative, _ in files]
    found = [extension for extension in wanted.beside if any(name.endswith(extension) for name in names)]
    return (("beside", ",".join(sorted(found))),) if found else ()


def _unit(empty: Unit, items: list[tuple[str, int]], first: int) -> Unit:
    return replace(empty, first=first, samples=len(items), items=tuple(items))


def _size(entry: os.DirEntry[str]) -> int:
    """The file's size, or 0 where the entry is a link to nothing: reading it then says so."""
    try:
        return entry.stat().st_size
    except OSError:
        return 0


def _sample(root: str, ordinal: int, relative: str, size: int, wanted: Extensions, moved: Moved) -> Sample:
    image = text = metadata = error = None
    stem = wanted.stem(relative)
    try:
        image = read_inside(root, relative, size, moved)
        for extension in wanted.texts:
            if (data := _read_beside(root, f"{stem}.{extension}", moved)) is not None:
                text = decode_text(data)
                break
        if (data := _read_beside(root, f"{stem}.json", moved)) is not None:
            metadata = decode_metadata(data)
    except SampleError as problem:
        error = (problem.code, problem.message)
    return Sample(ordinal=ordinal, key=relative, image=image, text=text, metadata=metadata, error=error)


def _read_remote(unit: Unit, moved: Moved) -> Iterator[Sample]:
    """One sample per planned file, fetched several at a time. Storage that is away fails the unit."""
    beside = dict(unit.options).get("beside", "")
    wanted = extensions_of(unit.options)
    extensions = ["", *(extension for extension in wanted.beside if extension in beside.split(","))]
    urls, sizes = [], []
    for relative, size in unit.items:
        for extension in extensions:
            name = wanted.stem(relative) + extension if extension else relative
            urls.append(join(unit.source, name))
            sizes.append(None if extension else size)
    contents = fetch_all(urls, sizes, moved)
    for ordinal, (relative, size) in enumerate(unit.items):
        found = {extension: next(contents) for extension in extensions}
        image = text = metadata = error = None
        try:
            image = _usable(found[""], join(unit.source, relative), size)
            for extension in wanted.texts:
                if (data := _optional(found.get(f".{extension}"))) is not None:
                    text = decode_text(data)
                    break
            if (data := _optional(found.get(".json"))) is not None:
                metadata = decode_metadata(data)
        except SampleError as problem:
            error = (problem.code, problem.message)
        yield Sample(ordinal=ordinal, key=relative, image=image, text=text, metadata=metadata, error=error)


def _usable(found: bytes | SourceError, url: str, size: int) -> bytes:
    """The image, or why this one has no row; a SourceError that concerns the storage as a whole is raised again."""
    if size > SAMPLE_MAX_BYTES:
        raise SampleError("too_large", f"{url} has {size} bytes, more than {SAMPLE_MAX_BYTES}")
    if isinstance(found, bytes):
        if len(found) != size:
            raise SampleError("source_changed", f"{url} had {size} bytes when planned, now {len(found)}")
        return found
    if found.transient:
        raise found
    raise SampleError(found.code, found.message) from found


def _optional(found: bytes | SourceError | None) -> bytes | None:
    if isinstance(found, SourceError):
        if found.code == "source_missing":
            return None
        raise found if found.transient else SampleError(found.code, found.message)
    return found


def _read_beside(root: str, relative: str, moved: Moved) -> bytes | None:
    """The file's bytes, or None where there is no such file."""
    if not os.path.lexists(os.path.join(root, relative)):
        return None
    return read_inside(root, relative, None, moved)


def read_inside(root: str, relative: str, size: int | None, moved: Moved) -> bytes:
    """The bytes of a plain file under `root`, of `size` bytes where that is known.

    Raises SampleError `outside_root`, `source_missing`, `source_denied`, `source_changed`, `unsupported_member` or
    `too_large`; SourceError where the storage fails.
    """
    path = os.path.join(root, relative)
    real = os.path.realpath(path)
    if not real.startswith(os.path.join(root, "")):
        raise SampleError("outside_root", f"{path} leads to {real}, outside of the folder {root}")
    try:
        status = os.stat(real)
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for its writer
            raise SampleError("unsupported_member", f"{path} is not a regular file")
        if size is not None and status.st_size != size:
            raise SampleError("source_changed", f"{path} had {size} bytes when planned, now {status.st_size}")
        if status.st_size > SAMPLE_MAX_BYTES:
            raise SampleError("too_large", f"{path} has {status.st_size} bytes, more than {SAMPLE_MAX_BYTES}")
        with WatchedFile(real, moved) as file:
            data = read_all(file, status.st_size)
    except PermissionError as error:
        raise SampleError("source_denied", f"{path} may not be read by this user") from error
    except OSError as error:
        if error.errno in _PERMANENT:
            raise SampleError("source_missing", f"{path}: {error.strerror}") from error
        raise SourceError(
            f"{path}: cannot be read: {error.strerror or error}", code="source_unreadable", transient=True
        ) from error
    if len(data) != status.st_size:
        raise SampleError("source_changed", f"{path} changed while it was read")
    return data
