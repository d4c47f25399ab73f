"""Classes and their indices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from core.errors import InputError


def indices(names: Iterable[str], known: Sequence[str] | None) -> dict[str, int]:
    """Class -> index: its position among the sorted names, as torchvision's ImageFolder counts, or in `known`.

    Args:
        known: the classes of other shards that these are to go with, by index; None for none.

    Raises InputError for a class that `known` lacks.
    """
    wanted = sorted(set(names))
    if known is None:
        return {name: index for index, name in enumerate(wanted)}
    there = {name: index for index, name in enumerate(known)}
    if strange := [name for name in wanted if name not in there]:
        raise InputError(
            f"{len(strange):,} classes are not among the {len(known):,} of classes.json, the first is {strange[0]!r}",
            code="other_classes",
            next_step="convert what has all classes first, or write these shards into a folder of their own",
        )
    return there


def require_pictures(counts: Mapping[str, int], classes: Sequence[str], where: str) -> None:
    """InputError where a class has no picture."""
    empty = [name for name in classes if not counts.get(name)]
    if empty:
        shown = ", ".join(map(repr, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise InputError(
            f"{where}: {len(empty):,} of {len(classes):,} classes have no pictures: {shown}",
            code="empty_class",
            next_step="add pictures, remove the class, or keep its index with --allow-empty",
        )


def numbered(names: Iterable[str]) -> tuple[str, ...] | None:
    """The classes 0, 1, ... up to the largest where all names are such numbers, as lists of labels have; else None."""
    said = Counter(names)
    if not said or not all(name.isascii() and name.isdigit() and str(int(name)) == name for name in said):
        return None
    return tuple(map(str, range(max(map(int, said)) + 1)))
