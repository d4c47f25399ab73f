"""Exports an index as files that faiss itself reads: the template with its inverted lists in one stream.

```
template    as `faiss.write_index` writes an index without rows, less its lists; nprobe is what tuning chose
lists       "ilar", number of lists, bytes of a code, "full", size of each list, then codes and ids list by list
```

Rows are copied from the lists files of a version in small pieces: memory is that of the template, whatever the rows.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from core.errors import OutputError, UsageError
from core.storage.durable import drop, publish
from indexer.change.deletes import deleted_bits
from indexer.faiss_module import faiss
from indexer.index_files.files import damaged, disk_error
from indexer.index_files.lists import ListsBytes, empty_lists, is_set, lists_header, no_lists
from indexer.index_files.template import Template
from indexer.index_files.version import Version, open_current
from indexer.plan.codecs import ID_BYTES

COPY_BYTES = 8 << 20
"""Bytes that are copied at once, and a lower limit of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaissFile:
    """One file that `faiss.read_index` reads.

    Attributes:
        first_list, last_list: lists with rows in it are from the first to before the last.
    """

    path: Path
    rows: int
    bytes: int
    first_list: int
    last_list: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaissExport:
    """Result of an export.

    Attributes:
        version: that was exported.
        nprobe: lists that a search looks at by default; it is written in the files.
        k_factor: times k candidates that `embq search` re-ranks by stored vectors, which the files do not hold; 1
            where it re-ranks nothing.
        distance: of the answers of faiss: "squared distance", which is 2 - 2 cosine for metric "cosine", or "inner
            product".
    """

    version: Version
    files: tuple[FaissFile, ...]
    nprobe: int
    k_factor: int
    distance: str


def write_faiss_file(index: Path, path: Path, *, shards: int = 1, overwrite: bool = False) -> FaissExport:
    """Write the current version of an index as a file that `faiss.read_index` opens, also with `IO_FLAG_MMAP`.

    Ids are those of `embq search`; deleted rows are left out, added rows are in their lists.

    Args:
        index: folder of the index, see `indexer.index_files.version.resolve_index`.
        path: of the file. Of several files, it is followed by their number from 0 on, as autofaiss names them.
        shards: number of files, each with a range of the lists and about as many rows: the best answers of all
            together are those of the whole. Fewer where there are not so many lists.
        overwrite: whether existing files are replaced.

    Raises InputError `no_index` where there is no finished index, UsageError where a file exists, OutputError where a
    file of the index is damaged or the disk refuses.
    """
    refuse_existing(faiss_paths(path, shards), overwrite=overwrite)
    with ExitStack() as stack:
        source = open_current(index, lambda version: _Source(version, stack))
        bounds = source.shards(shards)
        # A shard has the name of its place in as many as there are, or readers would wait for the rest.
        paths = faiss_paths(path, len(bounds))
        temporaries = [path.with_name(f".{path.name}.{secrets.token_hex(4)}") for _ in paths]
        try:
            for temporary, (first, last) in zip(temporaries, bounds, strict=True):
                source.write(temporary, first, last)
            refuse_existing(paths, overwrite=overwrite)
            for temporary, final in zip(temporaries, paths, strict=True):
                publish(temporary, final)
        except OSError as error:
            raise disk_error(error, path) from error
        finally:
            for temporary in temporaries:
                drop(temporary)
        files = tuple(
            FaissFile(
                path=final,
                rows=int(source.sizes[first:last].sum()),
                bytes=final.stat().st_size,
                first_list=first,
                last_list=last,
            )
            for final, (first, last) in zip(paths, bounds, strict=True)
        )
    return FaissExport(
        version=source.version,
        files=files,
        nprobe=source.nprobe,
        k_factor=source.version.search.get("k_factor", 1) if source.version.rows else 1,
        distance="inner product" if source.version.plan.metric == "ip" else "squared distance",
    )


def faiss_paths(path: Path, shards: int) -> list[Path]:
    """The names of so many files, as autofaiss gives them: `knn.index`, or `knn.index0` and so on."""
    if shards == 1:
        return [path]
    return [path.with_name(f"{path.name}{number:0{len(str(shards))}}") for number in range(shards)]


def refuse_existing(paths: Sequence[Path], *, overwrite: bool) -> None:
    """UsageError where one of the files exists, and may not be replaced."""
    for path in paths:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", next_step="give the name of a file")
        if not overwrite and path.exists():
            raise UsageError(f"{path} exists", next_step="give another name, or add --overwrite")


class _Source:
    """Files of a version, open: they can be read to their end when the version is swept away meanwhile.

    Attributes:
        nprobe: lists that tuning chose to look at.
        sizes: rows of each list that are not deleted, int64 (lists,).
    """

    def __init__(self, version: Version, opened: ExitStack) -> None:
        self.version = version
        self._template = Template.read(version.trained.check(version.index))
        self._deleted = deleted_bits(version) if version.deleted > version.dropped else None
        self._files = [
            (one.first, opened.enter_context(ListsBytes(one.check(version.index), one.last - one.first)))
            for group in version.groups
            for one in group
        ]
        self.nprobe = min(self._template.nlist, version.search.get("nprobe", 1))
        self.sizes = np.zeros(self._template.nlist, np.int64)
        for first, lists in self._files:
            self.sizes[first : first + len(lists.sizes)] += self._kept_sizes(lists)
        if (rows := int(self.sizes.sum())) != version.n:
            raise damaged(f"the lists of {version.path} hold {rows:,} rows, its record says {version.n:,}")

    def _kept_sizes(self, lists: ListsBytes) -> np.ndarray:
        """Rows of each list that are not deleted."""
        if self._deleted is None:
            return lists.sizes
        return np.array(
            [sum(int(self._kept(*piece).sum()) for piece in self._pieces(lists, at)) for at in range(len(lists.sizes))]
        )

    def _pieces(self, lists: ListsBytes, at: int) -> Iterator[tuple[ListsBytes, int, int, int]]:
        """A list in pieces of `COPY_BYTES` at most: the file, the list's number there, first row, number of rows."""
        size, step = int(lists.sizes[at]), max(1, COPY_BYTES // max(ID_BYTES, lists.code_size))
        return ((lists, at, first, min(step, size - first)) for first in range(0, size, step))

    def _kept(self, lists: ListsBytes, at: int, first: int, count: int) -> Any:
        """Index of the rows of a piece that are not deleted."""
        return slice(None) if self._deleted is None else ~is_set(self._deleted, lists.ids(at, first, count))

    def shards(self, count: int) -> list[tuple[int, int]]:
        """Ranges of lists, from the first to before the last, of about as many rows each, and at most `count`."""
        ends = np.cumsum(self.sizes)
        wanted = ends[-1] * np.arange(1, count) / count
        cuts = sorted({int(cut) for cut in np.searchsorted(ends, wanted) + 1} - {len(ends)})
        return list(zip([0, *cuts], [*cuts, len(ends)], strict=True))

    def write(self, path: Path, first: int, last: int) -> None:
        """Write the index with the rows of some of the lists; the others are empty."""
        sizes = np.zeros_like(self.sizes)
        sizes[first:last] = self.sizes[first:last]
        template = self._template
        template.hold(empty_lists(template.nlist, template.code_size), 0)
        template.ivf.ntotal = template.index.ntotal = int(sizes.sum())
        template.ivf.nprobe = self.nprobe
        # Training leaves it unset where transforms come first: `embq search` calls what is behind them.
        template.index.is_trained = True
        template.write(path)
        with open(path, "r+b", buffering=COPY_BYTES) as file:
            none = no_lists(template.nlist, template.code_size)
            start = file.seek(-len(none), os.SEEK_END)
            if file.read() != none:
                raise OutputError(f"faiss {faiss().__version__} writes indexes in another form than embq knows")
            file.seek(start)
            file.write(lists_header(sizes, template.code_size))
            for number in range(first, last):
                self._copy(number, file)

    def _copy(self, number: int, file: IO[bytes]) -> None:
        """Copy the codes of a list from all files that hold some, then its ids."""
        pieces = [
            piece
            for first, lists in self._files
            if first <= number < first + len(lists.sizes)
            for piece in self._pieces(lists, number - first)
        ]
        for lists, *piece in pieces:
            file.write(np.ascontiguousarray(lists.codes(*piece)[self._kept(lists, *piece)]).data)
        for lists, *piece in pieces:
            file.write(np.ascontiguousarray(lists.ids(*piece)[self._kept(lists, *piece)]).data)
