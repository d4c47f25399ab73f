"""Interface of a kind of input, and the limits and types that all kinds share."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from embq.core.units import Sample, Unit
from embq.sources.reader_options import ReadOptions

SAMPLE_MAX_BYTES = 32_000_000
"""Largest file, member or line that is taken as one sample; images.md gives 32 MB as the limit of an encoded image."""

FILE_UNITS_MAX = 1 << 24
"""Most units of one file: a small file may claim any number of rows."""

Memory = bytes | mmap.mmap
"""A file in memory: for both, a slice is bytes and an item is a number."""

Moved = Callable[[], None]
"""Called whenever bytes have come in: progress for a watchdog, which must tell slow storage from a hang."""


def unwatched() -> None:
    """A `Moved` that does nothing."""


class FileStatus(NamedTuple):
    """Size and version of a file.

    Attributes:
        size: bytes.
        version: changes whenever the content does, as far as the storage can tell: modification time in ns and size
            of a local file, ETag and size of an object.
    """

    size: int
    version: str


class Fields(NamedTuple):
    """What the rows of one file have.

    Attributes:
        names: of all columns or fields.
        text: the one that is embedded; "" if it is not a text.
        is_guess: the text is taken from a column only because no other one could be it.
    """

    names: frozenset[str]
    text: str
    is_guess: bool


class Source(Protocol):
    """One kind of input. Implementations are stateless; the contract suite runs against each."""

    kind: str
    modalities: tuple[str, ...]
    suffixes: Sequence[str] = ()
    """Of a plug-in: endings of the names of its files, in lower case, such as (".h5", ".hdf5")."""

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """The units of one input, in a fixed order.

        Raises InputError if the input is missing, empty, unreadable or of another kind.
        """
        ...

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """The unit's samples with ordinals 0, 1, 2, ...

        Raises SourceError before or between samples where the unit as a whole cannot be trusted; the caller then
        drops every sample already yielded. A sample that cannot be used is yielded with `error` set.
        """
        ...

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """The modalities of one input: a subset of `modalities` if its content decides.

        Raises SourceError if the columns cannot be chosen, or the input is damaged or cannot be read.
        """
        return self.modalities

    def fields(self, path: str, options: ReadOptions) -> Fields | None:
        """The columns of one file, from its first bytes or footer; None for kinds without columns.

        Raises SourceError as `holds` does.
        """
        return None

    def unit_of_sample(self, unit: Unit, ordinal: int) -> Unit:
        """The unit of one sample of a unit, where a sample can be read by itself; else the unit.

        Args:
            unit: of the inputs, not a retry.
            ordinal: of the sample in `unit`.
        """
        return unit

    def count_samples(self, unit: Unit, most: int) -> int:
        """The number of a unit's samples, or `most` if it has more; 1 for a unit that fails as a whole."""
        return 1 if unit.samples is None else min(most, unit.samples)

    def part(self, unit: Unit, first: int, samples: int | None = None) -> Unit:
        """The unit of `samples` samples of a unit from the ordinal `first` on, by default of all from there; the unit
        itself where its kind cannot be divided.
        """
        return unit

    def may_have_metadata(self, unit: Unit) -> bool:
        """True if `first_metadata` can return anything; cheap."""
        return False

    def first_metadata(self, unit: Unit, most: int) -> Iterator[str]:
        """Metadata of those of the unit's first `most` samples that have any, as `read` returns it.

        Reads little, checks nothing that is not needed, and reads no image. Raises SourceError as `read` does.
        """
        return iter(())
