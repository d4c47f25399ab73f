"""Lists the pictures of a folder or of a list, with their classes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from embq.core.errors import InputError, UsageError
from embq.sources.access.files import source_errors
from embq.sources.decode import IMAGE_EXTENSIONS
from embq.training.shards.conversion_plan import Pattern
from embq.training.shards.lists import listed
from embq.training.shards.pictures import Listing, Picture, SideFile, indices, require_pictures
from embq.training.shards.sizes import CLASSES, classes_beside


def listing_of(
    source: str,
    pattern: Pattern,
    looked: Callable[[int], None],
    *,
    classes: tuple[str, ...] | None,
    no_classes: bool,
    allow_empty: bool,
) -> Listing:
    """The pictures of a folder or a list.

    Args:
        source: path of the folder or of the list.
        pattern: of the shards that they are to become, which must not lie among them.
        looked: called with the number of pictures that were found, as it goes on.
        classes: whose indices to use; None counts those that are found.
        no_classes: whether pictures are taken wherever they are, without a class.
        allow_empty: whether a class may have no pictures.

    Raises InputError if the source cannot be understood, UsageError if the shards would lie in it.
    """
    if pattern.folder.resolve().is_relative_to(Path(source).resolve()):
        raise UsageError(
            f"{pattern.folder}: lies in {source}, whose pictures are to be converted",
            next_step="write the shards into a folder outside of it",
        )
    if not os.path.isdir(source):
        return listed(source, vocab=classes, with_classes=not no_classes, allow_empty=allow_empty, looked=looked)
    if no_classes or not has_folders(source):
        return without_classes(source, looked=looked)
    return class_folders(source, vocab=classes, allow_empty=allow_empty, looked=looked)


def known_classes(path: str | None, pattern: Pattern) -> tuple[str, ...] | None:
    """The classes of a `classes.json`, or of the one in the folder of the shards; None without one.

    Raises UsageError for a file of another name, InputError for one that is not there.
    """
    folder, name = (str(pattern.folder), CLASSES) if path is None else os.path.split(path)
    if name != CLASSES:
        raise UsageError(f"{path}: is not called {CLASSES}", next_step=f"name the {CLASSES} of other shards")
    class_names = classes_beside(folder or ".")
    if class_names is None and path is not None:
        raise InputError(f"{path}: does not exist", code="source_missing", next_step="check the path")
    return None if class_names is None else tuple(class_names)


BESIDE = (".json", ".txt")


class _Found(NamedTuple):
    """Pictures of a folder tree, and its other files."""

    pictures: list[Picture]
    unused: Counter[str]


Looked = Callable[[int], None]
"""Called with the number of pictures of each folder that was looked at."""


def class_folders(
    root: str, *, vocab: Sequence[str] | None, allow_empty: bool, looked: Looked = lambda _: None
) -> Listing:
    """Pictures of a folder whose subfolders are the classes; deeper folders belong to the class above them.

    Links are followed. Hidden files and folders are no classes and no pictures, other than in ImageFolder.

    Args:
        vocab: see `embq.training.shards.pictures.indices`.
        allow_empty: whether a class may have no pictures.

    Raises InputError for no pictures, pictures beside the class folders, an empty class, and what `indices` refuses.
    """
    folders, files = _entries(root)
    if loose := [file.name for file in files if _extension(file.name) in IMAGE_EXTENSIONS]:
        raise InputError(
            f"{root}: holds both folders and {len(loose):,} pictures, the first is {loose[0]!r}",
            next_step="move them into folders of classes, or take all pictures without classes: --no-classes",
        )
    by_class = {folder.name: _tree(root, folder.name, looked) for folder in folders}
    unused = sum((tree.unused for tree in by_class.values()), Counter(map(_extension, (f.name for f in files))))
    if not any(tree.pictures for tree in by_class.values()):
        raise nothing(root, unused)
    counts = {name: len(tree.pictures) for name, tree in by_class.items()}
    if not allow_empty:
        require_pictures(counts, sorted(counts), root)
    index = indices(counts, vocab)
    pictures = [picture._replace(label=index[name]) for name, tree in by_class.items() for picture in tree.pictures]
    pictures.sort(key=lambda picture: picture.name.split("/"))
    return Listing(root=root, pictures=pictures, classes=tuple(vocab or index), unused=unused)


def without_classes(root: str, *, looked: Looked = lambda _: None) -> Listing:
    """All pictures in a folder and below it; InputError if there are none."""
    tree = _tree(root, "", looked)
    if not tree.pictures:
        raise nothing(root, tree.unused)
    tree.pictures.sort(key=lambda picture: picture.name.split("/"))
    return Listing(root=root, pictures=tree.pictures, classes=None, unused=tree.unused)


def has_folders(root: str) -> bool:
    """True if a folder has subfolders that are not hidden."""
    return bool(_entries(root)[0])


def nothing(root: str, unused: Counter[str]) -> InputError:
    """The error for a folder without pictures."""
    shown = ", ".join(f"{extension or 'no extension'} ({n:,})" for extension, n in unused.most_common(6)) or "nothing"
    return InputError(
        f"{root}: no pictures in this folder or below it; found: {shown}",
        code="empty_input",
        next_step=f"pictures end in .{', .'.join(IMAGE_EXTENSIONS)}",
    )


def _entries(path: str) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Folders and files that are not hidden, by name; SourceError if the folder cannot be listed."""
    with source_errors(path), os.scandir(path) as listed:
        entries = sorted((entry for entry in listed if not entry.name.startswith(".")), key=lambda entry: entry.name)
        folders = [entry for entry in entries if entry.is_dir()]
        return folders, [entry for entry in entries if not entry.is_dir()]


def _tree(root: str, relative: str, looked: Looked) -> _Found:
    tree = _Found([], Counter())
    for folder, files in _walk(os.path.join(root, relative), relative, ()):
        count = len(tree.pictures)
        _add_pictures(folder, files, tree)
        looked(len(tree.pictures) - count)
    return tree


def _walk(path: str, relative: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """(path relative to the root, files) of a folder and all below it; links are followed, circles refused."""
    with source_errors(path):
        status = os.stat(path)
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise InputError(f"{path}: links back to a folder above it", next_step="remove the link")
    folders, files = _entries(path)
    yield relative, files
    for folder in folders:
        yield from _walk(folder.path, f"{relative}/{folder.name}" if relative else folder.name, (*above, here))


def _add_pictures(folder: str, files: list[os.DirEntry[str]], tree: _Found) -> None:
    """Add the pictures among the files of one folder, each with the files that belong to it."""
    images = [file for file in files if _extension(file.name) in IMAGE_EXTENSIONS]
    beside: dict[str, dict[str, os.DirEntry[str]]] = {}
    unused = [file for file in files if _extension(file.name) not in IMAGE_EXTENSIONS]
    for file in unused:
        if file.name.endswith(BESIDE):
            stem, _, extension = file.name.rpartition(".")
            beside.setdefault(stem, {})[extension] = file
    taken: dict[str, str] = {}
    for image in images:
        stem = image.name.rpartition(".")[0]
        belongs = beside.get(stem, {})
        if belongs and stem in taken:
            raise InputError(
                f"{os.path.join(folder, stem)}: {taken[stem]!r} and {image.name!r} have one caption or metadata file",
                code="duplicate_key",
                next_step="rename one of the pictures, or name pictures and captions in a list instead of the folder",
            )
        taken[stem] = image.name
        name = f"{folder}/{image.name}" if folder else image.name
        with source_errors(image.path):
            status = image.stat()
            sides = tuple(
                SideFile(extension, (side := belongs[extension].stat()).st_size, side.st_mtime_ns)
                for extension in sorted(belongs)
            )
        tree.pictures.append(Picture(name, status.st_size, status.st_mtime_ns, beside=sides))
    for file in unused:
        if not (file.name.endswith(BESIDE) and file.name.rpartition(".")[0] in taken):
            tree.unused[_extension(file.name)] += 1


def _extension(name: str) -> str:
    stem, dot, extension = name.rpartition(".")
    return extension.lower() if dot and stem else ""
