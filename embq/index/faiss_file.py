"""Exports an index as files that faiss itself reads: the template with its inverted lists in one stream.

```
template    as `faiss.write_index` writes an index without rows, less its lists; nprobe is what tuning chose
lists       "ilar", number of lists, bytes of a code, "full", size of each list, then codes and ids list by list
```

With vectors for re-ranking, this stands in a `faiss.IndexRefine`, and they stand behind it as the codes of a
`faiss.IndexScalarQuantizer` with `QT_fp16`.

Rows are copied from the lists files of a version in small pieces: memory is that of the template, whatever the rows.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from embq.core.errors import OutputError, UsageError
from embq.core.storage import beneath
from embq.core.storage.durable import drop, publish, try_lock
from embq.index.change.deletes import deleted_bits
from embq.index.faiss_module import faiss
from embq.index.index_files.files import damaged, disk_error
from embq.index.index_files.lists import ListsBytes, empty_lists, is_set, lists_header, no_lists
from embq.index.index_files.template import Template
from embq.index.index_files.version import Version, open_current
from embq.index.plan.codecs import ID_BYTES

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
        k_factor: times k candidates that `embq search` re-ranks by stored vectors; 1 if it re-ranks nothing.
        refine: whether faiss re-ranks them too, by the vectors in the file.
        distance: of the answers of faiss: "cosine", "inner product", or "squared distance", which is 2 - 2 cosine for
            vectors of length 1.
        read_since: the oldest version of faiss that was found to read the files.
    """

    version: Version
    files: tuple[FaissFile, ...]
    nprobe: int
    k_factor: int
    refine: bool
    distance: str
    read_since: str


def write_faiss_file(
    index: Path, path: Path, *, shards: int = 1, overwrite: bool = False, refine: bool = False
) -> FaissExport:
    """Write the current version of an index as a file that `faiss.read_index` opens, also with `IO_FLAG_MMAP`.

    Ids are those of `embq search`; deleted rows are left out, added rows are in their lists.

    Args:
        index: folder of the index, see `embq.index.index_files.version.resolve_index`.
        path: of the file. Of several files, it is followed by their number from 0 on, as autofaiss names them.
        shards: number of files, each with a range of the lists and about as many rows: the best answers of all
            together are those of the whole. Fewer if there are fewer lists.
        overwrite: whether existing files are replaced; of several files all numbered ones, whatever their number.
        refine: whether the vectors by which `embq search` re-ranks are in the file too, where the index keeps such:
            faiss answers as exactly then, and holds 2 bytes per dimension and id more in memory. One file only.
            Answers are cosines then, also of an index of whole vectors, `Flat`.

    Raises InputError `no_index` if there is no finished index, UsageError if a file exists, OutputError if a
    file of the index is damaged or the disk refuses.
    """
    if refine and shards > 1:
        raise UsageError(
            f"--refine and --shards {shards} do not go together: vectors for re-ranking are found by id, in one file",
            next_step="leave out --shards for one file that re-ranks, or --refine for files that do not",
        )
    refuse_existing(path, shards, overwrite=overwrite)
    with ExitStack() as stack:
        source = open_current(index, lambda version: _Source(version, stack))
        bounds = source.shards(shards)
        # A shard has the name of its place in as many as there are, or readers would wait for the rest.
        paths = faiss_paths(path, len(bounds))
        _sweep(path)
        temporaries = [path.with_name(f".{path.name}.{secrets.token_hex(4)}") for _ in paths]
        published: list[Path] = []
        try:
            for temporary in temporaries:
                with suppress(OSError):  # a file system without locks, where `_sweep` removes nothing
                    try_lock(stack.enter_context(open(temporary, "xb")))
            for temporary, (first, last) in zip(temporaries, bounds, strict=True):
                source.write(temporary, first, last, refine=refine)
            refuse_existing(path, len(paths), overwrite=overwrite)
            for temporary, final in zip(temporaries, paths, strict=True):
                publish(temporary, final)
                published.append(final)
            if len(paths) > 1:
                for other in _numbered(path) - {*paths}:  # of an export before, which would be merged with these
                    other.unlink()
        except OSError as error:
            if not overwrite:  # or the same command would be refused for the files that it has made
                for final in published:
                    drop(final)
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
    refines = refine and bool(source.version.rows)
    return FaissExport(
        version=source.version,
        files=files,
        nprobe=source.nprobe,
        k_factor=source.k_factor,
        refine=refines,
        distance=_distance(source.version.plan.metric, cosines=refines or (refine and source.cosines)),
        read_since=_read_since(source.version.plan.codec),
    )


def _read_since(codec: str) -> str:
    """The oldest of faiss 1.7.4, 1.9.0, 1.11.0, 1.13.2, 1.14.3 and 1.15.1 that reads files with a codec (measured)."""
    if codec.startswith("EDEN"):
        return "1.15.1"
    if codec.startswith("RaBitQ"):
        return "1.11.0" if codec in ("RaBitQ", "RaBitQ1") else "1.13.2"
    return "1.7.4"


def _distance(metric: str, *, cosines: bool) -> str:
    if metric == "ip":
        return "inner product"
    return "cosine" if metric == "cosine" and cosines else "squared distance"


def faiss_paths(path: Path, shards: int) -> list[Path]:
    """The names of the files of an export, as autofaiss gives them: `knn.index`, or `knn.index0` and so on."""
    if shards == 1:
        return [path]
    return [path.with_name(f"{path.name}{number:0{len(str(shards))}}") for number in range(shards)]


def refuse_existing(path: Path, shards: int, *, overwrite: bool) -> None:
    """UsageError if one of the files of an export exists, and may not be replaced; of several any numbered file."""
    paths = faiss_paths(path, shards)
    for existing in paths if shards == 1 else sorted(_numbered(path).union(paths)):
        if existing.is_dir():
            raise UsageError(f"{existing} is a folder", next_step="give the name of a file")
        if not overwrite and existing.exists():
            raise UsageError(f"{existing} exists", next_step="give another name, or add --overwrite")


def _numbered(path: Path) -> set[Path]:
    """The files with a number behind this name."""
    return {sibling for sibling in _siblings(path, "[0-9]+") if sibling.is_file()}


def _sweep(path: Path) -> None:
    """Remove the temporary files of exports to this name that were killed; those of running ones are locked."""
    for sibling in _siblings(path, r"[0-9]*\.[0-9a-f]{8}", prefix="."):
        with suppress(OSError, OutputError), beneath.reader(sibling.parent, sibling.name) as file:
            if try_lock(file):
                sibling.unlink()


def _siblings(path: Path, behind: str, prefix: str = "") -> list[Path]:
    """What is beside a path under its name between `prefix` and what matches the pattern `behind`."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    return [path.with_name(name) for name in names if re.fullmatch(re.escape(prefix + path.name) + behind, name)]


class _Source:
    """Files of a version, open: they can be read to their end when the version is swept away meanwhile.

    Attributes:
        nprobe: lists that tuning chose to look at.
        k_factor: times k candidates that tuning chose to re-rank; 1 if there are no vectors for that.
        cosines: whether codes are the vectors themselves, of length 1, so that faiss can compare by cosines.
        sizes: rows of each list that are not deleted, int64 (lists,).
    """

    def __init__(self, version: Version, opened: ExitStack) -> None:
        self.version = version
        self._template = Template.read(version.trained.check(version.index))
        self._deleted = deleted_bits(version) if version.deleted > version.dropped else None
        self._files = [
            (file.first, opened.enter_context(ListsBytes(file.check(version.index), file.last - file.first)))
            for group in version.groups
            for file in group
        ]
        self._rows = [
            opened.enter_context(open(file.check(version.index), "rb"))  # noqa: SIM115 - closed by the caller
            for file in version.rows
        ]
        self.k_factor = version.search.get("k_factor", 1) if version.rows else 1
        self.cosines = version.plan.metric == "cosine" and version.plan.codec == "Flat"
        self.nprobe = min(self._template.nlist, version.search.get("nprobe", 1))
        self.sizes = np.zeros(self._template.nlist, np.int64)
        for first, lists in self._files:
            self.sizes[first : first + len(lists.sizes)] += self._live_sizes(lists)
        if (rows := int(self.sizes.sum())) != version.n:
            raise damaged(f"the lists of {version.path} hold {rows:,} rows, its record says {version.n:,}")

    def _live_sizes(self, lists: ListsBytes) -> np.ndarray:
        """Rows of each list that are not deleted."""
        if self._deleted is None:
            return lists.sizes
        return np.array(
            [sum(int(self._live(*piece).sum()) for piece in self._pieces(lists, at)) for at in range(len(lists.sizes))]
        )

    def _pieces(self, lists: ListsBytes, at: int) -> Iterator[tuple[ListsBytes, int, int, int]]:
        """A list in pieces of `COPY_BYTES` at most: the file, the list's number there, first row, number of rows."""
        size, step = int(lists.sizes[at]), max(1, COPY_BYTES // max(ID_BYTES, lists.code_size))
        return ((lists, at, first, min(step, size - first)) for first in range(0, size, step))

    def _live(self, lists: ListsBytes, at: int, first: int, count: int) -> Any:
        """Index of the rows of a piece that are not deleted."""
        return slice(None) if self._deleted is None else ~is_set(self._deleted, lists.ids(at, first, count))

    def shards(self, count: int) -> list[tuple[int, int]]:
        """Ranges of lists, from the first to before the last, of about as many rows each; at most one for each list."""
        ends = np.cumsum(self.sizes)
        count = min(count, len(ends))
        places = np.arange(1, count)
        cuts = np.searchsorted(ends, ends[-1] * places / count) + 1
        cuts = np.maximum.accumulate(cuts - places) + places  # none twice, so that no range is without a list
        cuts = np.minimum(cuts, len(ends) - places[::-1]).tolist()
        return list(zip([0, *cuts], [*cuts, len(ends)], strict=True))

    def write(self, path: Path, first: int, last: int, *, refine: bool) -> None:
        """Write the index with the rows of some of the lists; the others are empty."""
        sizes = np.zeros_like(self.sizes)
        sizes[first:last] = self.sizes[first:last]
        template = self._template
        template.hold(empty_lists(template.nlist, template.code_size), 0)
        template.ivf.ntotal = template.index.ntotal = int(sizes.sum())
        template.ivf.nprobe = self.nprobe
        # Training leaves it unset where transforms come first: `embq search` calls what is behind them.
        template.index.is_trained = True
        if refine and self.cosines:
            template.index.metric_type = template.ivf.metric_type = faiss().METRIC_INNER_PRODUCT
        head, tail, end = self._refine_bytes() if refine and self._rows else (b"", b"", b"")
        template.write(path, head=head)
        with open(path, "r+b", buffering=COPY_BYTES) as file:
            none = no_lists(template.nlist, template.code_size)
            start = file.seek(-len(none), os.SEEK_END)
            if file.read() != none:
                raise _unknown_form()
            file.seek(start)
            file.write(lists_header(sizes, template.code_size))
            for number in range(first, last):
                self._copy(number, file)
            if tail:
                file.write(tail)
                self._copy_rows(file)
                file.write(end)

    def _copy(self, number: int, file: IO[bytes]) -> None:
        """Copy the codes of a list from all files that hold some, then its ids."""
        pieces = [
            piece
            for first, lists in self._files
            if first <= number < first + len(lists.sizes)
            for piece in self._pieces(lists, number - first)
        ]
        for lists, *piece in pieces:
            file.write(np.ascontiguousarray(lists.codes(*piece)[self._live(lists, *piece)]).data)
        for lists, *piece in pieces:
            file.write(np.ascontiguousarray(lists.ids(*piece)[self._live(lists, *piece)]).data)

    def _refine_bytes(self) -> tuple[bytes, bytes, bytes]:
        """Bytes of an index that re-ranks: before the one that finds candidates, before the vectors, and behind."""
        module, plan = faiss(), self.version.plan
        metric = module.METRIC_L2 if plan.metric == "l2" else module.METRIC_INNER_PRODUCT
        inner = module.IndexFlat(plan.dim, metric)
        rows = module.IndexScalarQuantizer(plan.dim, module.ScalarQuantizer.QT_fp16, metric)
        refined = module.IndexRefine(inner, rows)
        # faiss compares ids with its number of rows, so that counts deleted ones.
        refined.k_factor, refined.ntotal, rows.ntotal = self.k_factor, self.version.next_id, self.version.next_id
        head, _, tail = module.serialize_index(refined).tobytes().partition(module.serialize_index(inner).tobytes())
        # The last are the number of bytes of the vectors, none yet, and the factor.
        if tail[-12:-4] != bytes(8):
            raise _unknown_form()
        return head, tail[:-12] + (2 * plan.dim * self.version.next_id).to_bytes(8, "little"), tail[-4:]

    def _copy_rows(self, file: IO[bytes]) -> None:
        """Copy the vectors of all ids; those of deleted rows are zeros."""
        bits = deleted_bits(self.version) if self.version.deleted else None
        width, id_ = 2 * self.version.plan.dim, 0
        for part, source in sorted(zip(self.version.rows, self._rows, strict=True), key=lambda pair: pair[0].first_id):
            if part.first_id != id_ or part.bytes != part.rows * width:
                raise damaged(f"{part.path} does not hold the vectors of the ids from {id_:,} on")
            while data := source.read(max(1, COPY_BYTES // width) * width):
                rows = np.frombuffer(data, np.uint8).reshape(-1, width)
                if bits is not None:
                    rows = np.where(is_set(bits, np.arange(id_, id_ + len(rows)))[:, None], np.uint8(0), rows)
                file.write(rows.data)
                id_ += len(rows)
        if id_ != self.version.next_id:
            raise damaged(f"{self.version.path} holds vectors of {id_:,} ids of {self.version.next_id:,}")


def _unknown_form() -> OutputError:
    return OutputError(f"faiss {faiss().__version__} writes indexes in another form than embq knows")
