"""What every kind of input provides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from core.units import Sample, Unit

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
        text_column: JSON field that holds the text of a .jsonl line; "" finds it.
        id_column: JSON field that holds the key of a .jsonl line; "" finds it or counts lines.
    """

    unit_samples: int = 1000
    text_column: str = ""
    id_column: str = ""


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
