"""What every kind of input provides."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from core.units import Sample, Unit

SAMPLE_MAX_BYTES = 32_000_000
"""Largest file, member or line that is taken as one sample; images.md gives 32 MB as the limit of an encoded image."""

FILE_UNITS_MAX = 1 << 24
"""Units of one file. More are what a small file says that was made to keep planning busy."""

Memory = bytes | mmap.mmap
"""A file in memory: for both, a slice is bytes and an item is a number."""

Moved = Callable[[], None]
"""Called whenever bytes have come in, so that who watches the reader can tell slow storage from a hang."""


def unwatched() -> None:
    """Nobody watches."""


class FileStatus(NamedTuple):
    """A file as it is now.

    Attributes:
        size: bytes.
        version: changes whenever the content does, as far as the storage can tell: modification time in ns and size
            of a local file, ETag and size of an object.
    """

    size: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """User options that decide how inputs split into units and samples.

    Attributes:
        unit_samples: most samples of one unit, where the input is not sharded by itself.
        unit_bytes: bytes at which a unit of lines ends with the line, however few it has; 0 sets no bound.
        text_column: column or JSON field that holds the text; "" finds it.
        id_column: column or JSON field that holds the key; "" finds it or counts rows.
        image_column: column that holds the image, or its path or URL; "" finds it.
        metadata_columns: columns or JSON fields that become metadata; "*" among them takes all others; () does so
            where rows are lines (.jsonl, .csv), and takes none elsewhere.
        image_keys: extensions of what is an image in a shard or folder, in order of preference; () takes all known.
        caption_keys: extensions of what is a caption there, likewise; () takes txt.
        kind: kind of all inputs; "" tells it by their names.
    """

    unit_samples: int = 1000
    unit_bytes: int = 0
    text_column: str = ""
    id_column: str = ""
    image_column: str = ""
    metadata_columns: tuple[str, ...] = ()
    image_keys: tuple[str, ...] = ()
    caption_keys: tuple[str, ...] = ()
    kind: str = ""


class Source(Protocol):
    """One kind of input. Implementations are stateless modules' singletons; the contract suite runs against each."""

    kind: str
    modalities: tuple[str, ...]

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """The units of one input, in a fixed order.

        Raises InputError where the input is missing, empty, unreadable or of another kind.
        """
        ...

    def read(self, unit: Unit, moved: Moved = unwatched) -> Iterator[Sample]:
        """The unit's samples with ordinals 0, 1, 2, ...

        Raises SourceError before or between samples where the unit as a whole cannot be trusted; the caller then
        drops every sample already given. A sample that cannot be used is yielded with `error` set.
        """
        ...


@runtime_checkable
class Inspected(Protocol):
    """A kind of input of which only its content tells what its samples can have."""

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """The modalities of one input.

        Raises SourceError where the columns cannot be chosen, or the input is damaged or cannot be read.
        """
        ...


LOOKED_AT_BYTES = 2 << 20
"""So much of a shard is read to see what metadata its samples have: about a hundred small images."""


@runtime_checkable
class Described(Protocol):
    """A kind of input whose samples can have metadata."""

    def may_have_metadata(self, unit: Unit) -> bool:
        """Whether a look at the unit can tell more; a cheap question."""
        ...

    def first_metadata(self, unit: Unit, most: int) -> list[str]:
        """The metadata of those of the unit's first `most` samples that have any, as `read` gives it, or fewer of them.

        Little is read, nothing is checked that is not needed, and no image is looked at. Raises SourceError, as `read`.
        """
        ...
