"""Pictures that become samples, their classes, and notes on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from embq.core.errors import InputError, SampleError
from embq.sources.interface import SAMPLE_MAX_BYTES


def indices(names: Iterable[str], vocab: Sequence[str] | None) -> dict[str, int]:
    """Class -> index, as torchvision's ImageFolder counts (position among the sorted names), or as in `vocab`.

    Args:
        vocab: the classes of other shards that these are to go with, by index; None for none.

    Raises InputError for a class that `vocab` lacks.
    """
    ordered = sorted(set(names))
    if vocab is None:
        return {name: index for index, name in enumerate(ordered)}
    index_of = {name: index for index, name in enumerate(vocab)}
    if strange := [name for name in ordered if name not in index_of]:
        raise InputError(
            f"{len(strange):,} classes are not among the {len(vocab):,} of classes.json, the first is {strange[0]!r}",
            code="other_classes",
            next_step="convert what has all classes first, or write these shards into a folder of their own",
        )
    return index_of


def require_pictures(counts: Mapping[str, int], classes: Sequence[str], where: str) -> None:
    """InputError if a class has no picture."""
    empty = [name for name in classes if not counts.get(name)]
    if empty:
        shown = ", ".join(map(repr, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise InputError(
            f"{where}: {len(empty):,} of {len(classes):,} classes have no pictures: {shown}",
            code="empty_class",
            next_step="add pictures, remove the class, or keep its index with --allow-empty",
        )


def numbered(names: Iterable[str]) -> tuple[str, ...] | None:
    """The classes 0, 1, ... up to the largest, if all names are such numbers; else None."""
    counted = Counter(names)
    if not counted or not all(name.isascii() and name.isdigit() and str(int(name)) == name for name in counted):
        return None
    return tuple(map(str, range(max(map(int, counted)) + 1)))


LABEL_MAX_BYTES = 20
"""No int64 has more digits."""


def class_index(written: bytes, classes: int | None) -> int:
    """The class that a sample's `cls` names in decimal digits; SampleError `bad_label` for anything else.

    Args:
        classes: how many there are; None if that is not known.
    """
    digits = written.strip()
    if not digits.isdigit() or len(digits) > LABEL_MAX_BYTES:
        raise SampleError("bad_label", f".cls is {written[:LABEL_MAX_BYTES]!r}, not the number of a class")
    label = int(digits)
    if label >= (2**63 if classes is None else classes):
        raise SampleError("bad_label", f".cls is {label}, and there are {classes} classes")
    return label


OPEN_CLIP_READS = ("jpg", "png", "jpeg", "webp")
"""Extensions that open_clip's loader of shards takes; it leaves out samples of others without a word (3.3.0)."""


class SideFile(NamedTuple):
    """A caption (`txt`) or metadata (`json`) file beside a picture."""

    extension: str
    size: int
    mtime_ns: int


class Picture(NamedTuple):
    """A picture as it was found. A tuple, because there are millions.

    Attributes:
        name: path relative to the root of its listing, or an absolute one; how it is called to users.
        size: bytes.
        mtime_ns: when it was last changed.
        label: index of its class; None without classes.
        caption: from a list; None if it has none, or a file beside it.
        metadata: what else a list says, as a JSON object; None for nothing.
        beside: what belongs to it, by extension.
    """

    name: str
    size: int
    mtime_ns: int
    label: int | None = None
    caption: str | None = None
    metadata: str | None = None
    beside: tuple[SideFile, ...] = ()

    @property
    def extension(self) -> str:
        """Extension of the file in lower case, without the dot."""
        return self.name.rpartition(".")[2].lower()

    @property
    def has_caption(self) -> bool:
        """True if its sample gets a `txt`."""
        return self.caption is not None or any(side.extension == "txt" for side in self.beside)


class LeftOut(NamedTuple):
    """A picture that becomes no sample, and why.

    Attributes:
        code: as of a failed sample, see docs/reference/failure-codes.md.
    """

    name: str
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Pictures in the order of their names, or of a list.

    Attributes:
        root: folder that names are relative to.
        pictures: those that are to become samples.
        classes: names by index; None if pictures have no classes.
        unused: extension -> files that are neither pictures nor belong to one.
        left_out: pictures that become no samples.
    """

    root: str
    pictures: Sequence[Picture]
    classes: tuple[str, ...] | None
    unused: Counter[str] = field(default_factory=Counter)
    left_out: tuple[LeftOut, ...] = ()


def notes(listing: Listing) -> list[str]:
    """Notes for the user on the pictures."""
    lines = []
    if listing.unused:
        shown = ", ".join(f"{extension or 'no extension'} ({n:,})" for extension, n in listing.unused.most_common(6))
        lines.append(f"{sum(listing.unused.values()):,} other files stay behind: {shown}")
    kinds = Counter(picture.extension for picture in listing.pictures)
    if unread := {kind: count for kind, count in kinds.items() if kind not in OPEN_CLIP_READS}:
        shown = ", ".join(f"{kind} ({count:,})" for kind, count in sorted(unread.items()))
        lines.append(f"open_clip's training leaves out what is not jpg, png, jpeg or webp: {shown}")
    if large := sum(picture.size > SAMPLE_MAX_BYTES for picture in listing.pictures):
        lines.append(
            f"{large:,} pictures are larger than {SAMPLE_MAX_BYTES // 1_000_000} MB: embq run does not embed them"
        )
    captions = sum(picture.has_caption for picture in listing.pictures)
    if not captions and listing.classes is None:
        lines.append("neither classes nor captions: shards to embed, and not to train on")
    elif 0 < captions < len(listing.pictures):
        lines.append(
            f"{len(listing.pictures) - captions:,} pictures have no caption: open_clip's training leaves them out"
        )
    return lines
