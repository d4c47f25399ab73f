"""What every part format provides, and what the formats share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from core.run.commits import CommittedFile
from core.run.layout import Layout
from core.storage.durable import drop, output_error
from core.storage.paths import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A finished, closed file under a temporary name, and what a record will say of it once it is published."""

    temporary: Path
    file: CommittedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PartName:
    """How the files of one part are called.

    Attributes:
        number: that of the record that will name them, so two writers never share a name and no clock or host is in it.
        first_id: id of the first row.
        epoch: of the writer.
        layout: of the output folder.
    """

    number: int
    first_id: int
    epoch: int
    layout: Layout

    def unfinished(self, what: str) -> Path:
        """Where the file for `what` is written. Its suffix is no format's, so that no reader takes it for one."""
        return self.layout.temporary / f"part-{self.number:08d}.{self.epoch}.{what}.unfinished"


class Store(Protocol):
    """One part format."""

    def write(self, table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
        """Write rows as the files of one part, closed and hashed but not synced, in the order of publication.

        Args:
            table: the rows, at least one, in pieces of any size; columns are id, ordinal, key, fixed-size lists for the
                vectors, and what else the rows of a result have.
            notes: what the files say of the run, such as its id and its fingerprint.

        OutputError leaves nothing behind.
        """
        ...

    def join(self, layout: Layout, files: Iterable[CommittedFile]) -> None:
        """Bring what joins the parts for readers up to date, durably, where the format has such a thing.

        Args:
            files: the committed files of rows, in the order of their records.

        Called before a log is closed, and where a closed one is opened. Raises OutputError.
        """
        ...


@contextmanager
def whole_or_none(drafts: Sequence[Path], path: Place) -> Iterator[None]:
    """Remove the unfinished files where the block fails; an OSError becomes the OutputError for `path`."""
    try:
        yield
    except BaseException as error:
        for draft in drafts:
            drop(draft)
        if isinstance(error, OSError):
            raise output_error(error, path) from error
        raise


def slices(table: pa.Table, rows: int) -> Iterator[pa.Table]:
    """`table` in slices of so many rows, the last of which may have fewer; nothing is copied."""
    return (table.slice(start, rows) for start in range(0, table.num_rows, rows))
