"""The pictures that a user names: a folder or a list, and the classes whose indices they get."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import InputError, UsageError
from training.shards.conversion import classes_there
from training.shards.folders import class_folders, has_folders, without_classes
from training.shards.lists import listed
from training.shards.pattern import Pattern
from training.shards.pictures import Listing
from training.shards.sizes import CLASSES, classes_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How pictures are to be listed.

    Attributes:
        classes: whose indices to use; None counts those that are found.
        no_classes: whether pictures are taken wherever they are, without a class.
        allow_empty: whether a class may have no pictures.
    """

    classes: tuple[str, ...] | None
    no_classes: bool
    allow_empty: bool


def listing_of(source: str, pattern: Pattern, wish: Wish, looked: Callable[[int], None]) -> Listing:
    """The pictures in a folder, or of a list.

    Args:
        source: path of the folder or of the list.
        pattern: of the shards that they are to become, which must not lie among them.
        looked: called with the number of pictures that were found, as it goes on.

    Raises InputError where the source cannot be understood, UsageError where the shards would lie in it.
    """
    if pattern.folder.resolve().is_relative_to(Path(source).resolve()):
        raise UsageError(
            f"{pattern.folder}: lies in {source}, whose pictures are to be converted",
            next_step="write the shards into a folder outside of it",
        )
    allow_empty = wish.allow_empty
    if not os.path.isdir(source):
        return listed(
            source, known=wish.classes, with_classes=not wish.no_classes, allow_empty=allow_empty, looked=looked
        )
    if wish.no_classes or not has_folders(source):
        return without_classes(source, looked=looked)
    return class_folders(source, known=wish.classes, allow_empty=allow_empty, looked=looked)


def known_classes(path: str | None, pattern: Pattern) -> tuple[str, ...] | None:
    """The classes of a `classes.json`, or of the one beside the shards that are there already; None without one.

    Raises UsageError for a file of another name, InputError for one that is not there.
    """
    if path is None:
        return classes_there(pattern.folder)
    folder, name = os.path.split(path)
    if name != CLASSES:
        raise UsageError(f"{path}: is not called {CLASSES}", next_step=f"name the {CLASSES} of other shards")
    known = classes_beside(folder or ".")
    if known is None:
        raise InputError(f"{path}: does not exist", code="source_missing", next_step="check the path")
    return tuple(known)
