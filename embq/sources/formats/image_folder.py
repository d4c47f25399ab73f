"""Kind "files": a folder of images, with captions and metadata beside each or in one file for all."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, islice, repeat
from typing import Any

from embq.core.errors import InputError, SampleError, SourceError
from embq.core.run.layout import MARKS
from embq.core.service.log import Events
from embq.core.storage.paths import is_url
from embq.core.units import UNIT_SPEC_MAX_BYTES, Sample, Unit
from embq.sources.access import listings
from embq.sources.access.files import check_inside, join, read_inside, source_errors
from embq.sources.access.ranged_reads import fetch_all
from embq.sources.decode import decode_file, decode_metadata, unread_counted
from embq.sources.extensions import ALL, SYSTEM_NAMES, Extensions, endings, extensions_of, of_system
from embq.sources.formats.metadata_files import METADATA_FILES, Content, fields_of
from embq.sources.interface import SAMPLE_MAX_BYTES, Moved, Source, unwatched
from embq.sources.partitions import merged
from embq.sources.reader_options import ReadOptions
from embq.sources.rows import NO_IMAGES, NO_TEXTS

log = Events("sources")

_LINKS = 100
"""First images of a folder of which it is seen before the run whether they are links out of it."""

_ASKED = 10
"""First images of a unit beside which metadata are looked for before the unit is read."""


class FilesSource(Source):
    """A folder's images in units of at most `unit_samples`, ordered by their paths relative to the folder.

    The key is that path, with "/" between its parts. The user may name the extensions of images and of captions. What
    `walk` leaves out is not entered; a linked file is read only if it stays inside the folder.
    """

    kind = "files"
    modalities: tuple[str, ...] = ("image", "text")

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """Images and captions. Where the user named the extensions of captions, there must be a file with one.

        Raises SourceError `missing_member` if there is none.
        """
        if options.caption_keys:
            skipped: Counter[str] = Counter()
            if next(walk_with(options.caption_keys, path, skipped), None) is None:
                raise SourceError(
                    f"{path}: no file ends in .{' or .'.join(options.caption_keys)}; found: {shown(skipped)}",
                    code="missing_member",
                    next_step="check --caption-key, or leave the folder out",
                )
        return self.modalities

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units that also fit into a hint, however long the names are."""
        skipped: Counter[str] = Counter()
        extensions = extensions_of(options.extensions)
        empty = Unit(kind=self.kind, source=path, options=options.extensions)
        files: Iterable[tuple[str, int]] = walk(path, skipped)
        if is_url(path):
            files = list(files)
            empty = replace(empty, options=(*_extensions_beside(files, extensions), *empty.options))
        unit = None
        images = images_of(files, skipped, extensions)
        for unit in cut(empty, images if is_url(path) else _inside(path, images), options.unit_samples):
            yield unit
        if unit is None:
            raise InputError(
                f"{path}: no image in this folder or below it; found: {shown(skipped)}",
                code="empty_input",
                next_step=f"image files end in .{', .'.join(extensions.images)}; others are named with --image-key",
            )

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """One sample per planned file. Only storage that is away, or a missing folder, fails the unit."""
        extensions, images = extensions_of(unit.options), NO_IMAGES not in unit.options
        texts = NO_TEXTS not in unit.options
        if is_url(unit.source):
            contents = _fetched_contents(unit, extensions, on_progress, images=images)
        else:
            contents = repeat(_local_content(unit.source, on_progress, images=images))
        for ordinal, ((relative, size), content) in enumerate(zip(unit.items, contents, strict=False)):
            yield _sample(ordinal, unit.source, relative, size, extensions, content, texts=texts)

    def part(self, unit: Unit, first: int, samples: int | None = None) -> Unit:
        """The unit of some of its files."""
        items = unit.items[first : None if samples is None else first + samples]
        return replace(unit, first=unit.first + first, samples=len(items), items=items)

    def may_have_metadata(self, unit: Unit) -> bool:
        """True if a `.json` stands beside one of its images; beside the first ones, on this machine."""
        if is_url(unit.source):
            return ".json" in dict(unit.options).get("beside", "").lower().split(",")
        return any(True for _ in self.first_metadata(unit, _ASKED))

    def first_metadata(self, unit: Unit, most: int) -> Iterator[str]:
        """From the `.json` files beside the first images."""
        extensions = extensions_of(unit.options)
        stems = [extensions.stem(relative) for relative, _ in unit.items[:most]]
        if is_url(unit.source):
            names = [f"{stem}{end}" for stem in stems for end in _present(unit, Extensions(texts=()))]
            urls = [join(unit.source, name) for name in names]
            fetched = dict(zip(names, fetch_all(urls, [None] * len(urls), unwatched), strict=True))
            content: Content = partial(_fetched_content, unit.source, fetched)
        else:
            content = _local_content(unit.source, unwatched)
        with unread_counted(unit.source) as unread:
            for stem, (relative, _) in zip(stems, unit.items, strict=False):
                try:
                    fields, data = fields_of(unit.source, relative, content)[1], _beside(stem, "json", content)
                    if fields or data is not None:
                        yield merged(fields, None if data is None else decode_metadata(data))
                except SampleError as problem:
                    unread.append(f"{relative}: {problem.message}")


def cut(empty: Unit, items: Iterable[tuple[str, int]], most: int, *, first: int = 0) -> Iterator[Unit]:
    """Units of at most `most` of the files `items`, (path relative to the folder, size in bytes), in their order.

    Args:
        empty: a unit of the folder, whose items are replaced.
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


def _unit(empty: Unit, items: list[tuple[str, int]], first: int) -> Unit:
    return replace(empty, first=first, samples=len(items), items=tuple(items))


def _inside(path: str, images: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The images of a local folder, InputError `outside_root` if all of the first are links out of it."""
    first, root = list(islice(images, _LINKS)), os.path.join(os.path.realpath(path), "")
    real = [os.path.realpath(os.path.join(path, name)) for name, _ in first]
    if real and not any(target.startswith(root) for target in real):
        raise InputError(
            f"{path}: its images are links out of the folder, such as {first[0][0]} to {real[0]}",
            code="outside_root",
            next_step=f"copy the files, as with `cp -rL {shlex.quote(str(path))} COPY`, and name the copy; "
            "nothing outside is read",
        )
    return chain(first, images)


def _extensions_beside(files: Iterable[tuple[str, int]], extensions: Extensions) -> tuple[tuple[str, str], ...]:
    """Option that lists the extensions of files beside images in a remote folder; trying each name would be slow."""
    present = [ending for ending in extensions.beside if any(relative.endswith(ending) for relative, _ in files)]
    return (("beside", ",".join(sorted(present))),) if present else ()


def _beside(stem: str, extension: str, content: Content) -> bytes | None:
    """The content of the file of that name and extension, in small or capital letters; None if there is none."""
    return next((data for end in endings(extension) if (data := content(stem + end, None)) is not None), None)


def _sample(
    ordinal: int, root: str, relative: str, size: int, extensions: Extensions, content: Content, *, texts: bool
) -> Sample:
    """The sample of an image with what stands beside it, or its failure.

    Metadata that cannot be read are no error; nor is a caption without `texts`.
    """
    stem = extensions.stem(relative)
    text = metadata = unread = None
    fields: dict[str, Any] = {}
    try:
        image = content(relative, size)
        try:
            text, fields = fields_of(root, relative, content)
        except SampleError as problem:
            unread = problem
        try:
            for extension in extensions.texts:
                if (data := _beside(stem, extension, content)) is not None:
                    text = decode_file(data)
                    break
        except SampleError as problem:
            if texts:
                raise
            text, unread = None, problem
        if texts and text is None and unread is not None:  # the file that cannot be read may have had it
            raise unread
    except SampleError as problem:
        return Sample(ordinal=ordinal, key=relative, error=(problem.code, problem.message))
    try:
        if (data := _beside(stem, "json", content)) is not None:
            metadata = decode_metadata(data)
    except SampleError as problem:
        unread = problem
    if fields:
        metadata = merged(fields, metadata)
    lost = None if unread is None else (unread.code, unread.message)
    return Sample(ordinal=ordinal, key=relative, image=image, text=text, metadata=metadata, unread=lost)


def _local_content(folder: str, on_progress: Moved, *, images: bool = True) -> Content:
    with source_errors(folder):
        os.stat(folder)
    root = os.path.realpath(folder)

    def content(name: str, size: int | None) -> bytes | None:
        if size is None and not os.path.lexists(os.path.join(root, name)):
            return None
        if size is not None and not images:
            check_inside(root, name, size)
            return None
        return cached(name) if name.endswith(METADATA_FILES) else read_inside(root, name, size, on_progress)

    cached = lru_cache(maxsize=2)(partial(read_inside, root, size=None, on_progress=on_progress))  # for many images
    return content


def _fetched_contents(unit: Unit, extensions: Extensions, on_progress: Moved, *, images: bool) -> Iterator[Content]:
    """The content of each image of a remote folder and of the files beside it, fetched several at a time.

    Without `images` nothing tells whether an image has changed.
    """
    beside = _present(unit, extensions)
    groups = [
        [*[(relative, size)] * images, *((extensions.stem(relative) + extension, None) for extension in beside)]
        for relative, size in unit.items
    ]
    files: list[tuple[str, int | None]] = [file for group in groups for file in group]
    fetched = fetch_all([join(unit.source, name) for name, _ in files], [size for _, size in files], on_progress)
    for group in groups:
        yield partial(_fetched_content, unit.source, {name: next(fetched) for name, _ in group})


def _present(unit: Unit, extensions: Extensions) -> list[str]:
    """The endings of files beside images that the remote folder of a unit has."""
    present = dict(unit.options).get("beside", "").split(",")
    return [ending for ending in extensions.beside if ending in present]


def _fetched_content(
    folder: str, contents: Mapping[str, bytes | SourceError], name: str, size: int | None
) -> bytes | None:
    data = contents.get(name)
    if size is not None and size > SAMPLE_MAX_BYTES:
        raise SampleError("too_large", f"{join(folder, name)} has {size} bytes, more than {SAMPLE_MAX_BYTES}")
    if isinstance(data, SourceError):
        if size is None and data.code == "source_missing":
            return None
        raise SampleError(data.code, data.message) from data
    if data is not None and size is not None and len(data) != size:
        raise SampleError("source_changed", f"{join(folder, name)} had {size} bytes when planned, now {len(data)}")
    return data


def walk_with(keys: tuple[str, ...], path: str, skipped: Counter[str]) -> Iterator[tuple[str, int]]:
    """(relative path, bytes) of every file below a folder with one of the extensions `keys`, sorted by relative path.

    `skipped` counts the extensions of all other files. () as `keys` takes the known extensions of images.
    """
    return images_of(walk(path, skipped), skipped, Extensions(images=keys) if keys else ALL)


OUTPUT, OF_SYSTEM = "output folder of embq", "of the system"
"""Reasons under which `walk` and patterns count what they leave out."""


def walk(path: str, skipped: Counter[str], *, sizes: bool = True) -> Iterable[tuple[str, int]]:
    """(relative path, bytes) of every file, sorted; without `sizes`, local files have 0 and are not looked at.

    `skipped` counts what is left out: names that begin with a dot or are a system's, output folders of embq, linked
    folders.
    """
    return _visible(listings.walk(path), skipped) if is_url(path) else _walk_local(path, skipped, sizes)


def _visible(files: Sequence[tuple[str, int]], skipped: Counter[str]) -> Iterator[tuple[str, int]]:
    """The files of a remote folder that `_walk_local` would give."""
    runs = {name.removesuffix("/run.json") for name, _ in files if name.endswith("/run.json")}
    manifests = {name.rpartition("/manifest/")[0] for name, _ in files if "/manifest/" in name}
    outputs = tuple(f"{folder}/" for folder in runs & manifests)
    skipped.update({OUTPUT: len(outputs)} if outputs else {})
    for name, size in files:
        if name.startswith(".") or "/." in name:
            skipped["hidden"] += 1
        elif of_system(name):
            skipped[OF_SYSTEM] += 1
        elif not name.startswith(outputs):
            yield name, size


def images_of(files: Iterable[tuple[str, int]], skipped: Counter[str], chosen: Extensions) -> Iterator[tuple[str, int]]:
    """Files with an extension of images; `skipped` counts the extensions of the rest."""
    endings = tuple(f".{extension}" for extension in chosen.images)
    for relative, size in files:
        if relative.lower().endswith(endings):
            yield relative, size
        else:
            skipped[os.path.splitext(relative)[1].lower() or "no extension"] += 1


def shown(skipped: Counter[str]) -> str:
    """The most frequent extensions, for a message."""
    return ", ".join(f"{name} ({count:,})" for name, count in skipped.most_common(8)) or "nothing"


def _walk_local(path: str, skipped: Counter[str], sizes: bool) -> Iterator[tuple[str, int]]:
    """As `walk`. One folder's names are held at a time, not the tree's."""
    links: list[str] = []
    stack: list[tuple[str, os.DirEntry[str] | None]] = [("", None)]
    while stack:
        relative, entry = stack.pop()
        if entry is not None and not relative.endswith("/"):
            if entry.is_symlink() and os.path.isdir(entry.path):
                links.append(relative)
            else:
                yield relative, _size(entry) if sizes else 0
            continue
        with source_errors(os.path.join(path, relative)), os.scandir(os.path.join(path, relative)) as entries:
            children = list(entries)
            if relative and sum(child.name in MARKS for child in children) == len(MARKS):
                skipped[OUTPUT] += 1
                continue
            # A folder sorts by its name with the slash, so that the whole walk is in order of the full paths.
            listed = [
                (f"{relative}{child.name}{'/' if child.is_dir(follow_symlinks=False) else ''}", child)
                for child in children
                if not child.name.startswith(".") and child.name not in SYSTEM_NAMES
            ]
        if len(listed) < len(children):
            hidden = sum(child.name.startswith(".") for child in children)
            skipped.update({"hidden": hidden} if hidden else {})
            of_systems = len(children) - len(listed) - hidden
            skipped.update({OF_SYSTEM: of_systems} if of_systems else {})
        listed.sort(key=lambda pair: pair[0], reverse=True)
        stack.extend(listed)
    if links:
        skipped["linked folder, not followed"] += len(links)
        if sizes:
            log.warning("linked_folders_skipped", path=path, folders=len(links), first=links[0])


def _size(entry: os.DirEntry[str]) -> int:
    """The file's size, or 0 for a broken link, which fails when it is read."""
    try:
        return entry.stat().st_size
    except OSError:
        return 0
