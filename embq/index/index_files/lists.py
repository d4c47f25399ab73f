"""Files of inverted lists: written whole, memory-mapped or loaded, and stacked.

A file of the stage `add` holds all lists of a block of rows; one of the stage `merge` holds a range of lists of all
rows.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from embq.core.errors import OutputError
from embq.core.storage.objects import PIECE_BYTES, RangedFile
from embq.core.storage.paths import Place
from embq.index.faiss_module import faiss
from embq.index.index_files.files import asking, damaged, write_by_faiss

Lists = Any
"""A `faiss.InvertedLists`, downcast. Lists that are made of others do not own them: the caller holds both."""


def write_lists(lists: Lists, path: Path) -> None:
    """Write lists that are in memory; OSError if the disk refuses."""
    write_by_faiss(path, lambda writer: faiss().write_InvertedLists(lists, writer))


def read_lists(path: Path, *, mapped: bool) -> Lists:
    """The lists of a file; `mapped` leaves them there, for the kernel to load what is looked at."""
    module = faiss()
    with ListsBytes(path):  # faiss makes room for as many rows as the file says that it has
        pass
    try:
        reader = module.FileIOReader(str(path))
        flags = module.IO_FLAG_MMAP | module.IO_FLAG_READ_ONLY if mapped else 0
        read = module.read_InvertedLists(reader, flags)
        lists = module.downcast_InvertedLists(read)
    except RuntimeError as error:
        raise damaged(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    # faiss frees what it has read only for an index that owns it; setting `thisown` breaks its Python types (1.15).
    weakref.finalize(lists, type(lists).__swig_destroy__, read).atexit = False
    if mapped:
        # By itself faiss starts 32 threads for each search, to read ahead: most of the time of a search here.
        lists.prefetch_nthread = 0
    return lists


def empty_lists(nlist: int, code_size: int) -> Lists:
    """Lists in memory, without anything in them."""
    return faiss().ArrayInvertedLists(nlist, code_size)


def append(
    target: Lists, source: Lists, *, first: int, count: int, offset: int = 0, deleted: np.ndarray | None = None
) -> int:
    """Add what lists `first` to `first + count` - 1 of `source` hold to the target's, from `offset` on.

    Args:
        deleted: bits by id, see `is_set`; rows that are set there are left out.

    Returns the number of rows that were added.
    """
    module = faiss()
    rows = 0
    for number in range(first, first + count):
        size = source.list_size(number)
        if not size:
            continue
        ids, codes = source.get_ids(number), source.get_codes(number)
        if deleted is not None:
            all_ids = module.rev_swig_ptr(ids, size)
            live = ~is_set(deleted, all_ids)
            if not live.all():
                all_codes = module.rev_swig_ptr(codes, size * source.code_size).reshape(size, -1)
                kept_ids, kept_codes = all_ids[live], all_codes[live]
                size, ids, codes = len(kept_ids), module.swig_ptr(kept_ids), module.swig_ptr(kept_codes)
        if size:
            target.add_entries(offset + number - first, size, ids, codes)
            rows += size
    return rows


def is_set(bits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """bool, the shape of `ids`: which of them are set in `bits`, that of id 0 the lowest of the first byte. -1 is not.

    Args:
        bits: uint8 (ids / 8,).
    """
    clipped = np.maximum(ids, 0)
    result: np.ndarray = (ids >= 0) & ((bits[clipped >> 3] >> (clipped & 7).astype(np.uint8)) & 1).astype(bool)
    return result


class Stack:
    """One view of several lists files: ranges of lists one after the other, stacked with those of later groups.

    Args:
        groups: each with its ranges of lists in order; together these are all lists of the index.
        merged: hold one copy of everything in memory; else lists of several groups are put together when looked at.

    Attributes:
        lists: to give to an index.
    """

    def __init__(self, groups: Sequence[Sequence[Lists]], *, code_size: int, merged: bool) -> None:
        self._parts = groups
        wholes = [self._vertical(ranges) for ranges in groups]
        if len(wholes) == 1:
            self.lists = wholes[0]
        elif merged:
            nlist = wholes[0].nlist
            self.lists = empty_lists(nlist, code_size)
            for group_lists in wholes:
                append(self.lists, group_lists, first=0, count=nlist)
            self._parts, wholes = (), []
        else:
            self.lists = self._of(faiss().HStackInvertedLists, wholes)
        self._wholes = wholes

    def _vertical(self, ranges: Sequence[Lists]) -> Lists:
        return ranges[0] if len(ranges) == 1 else self._of(faiss().VStackInvertedLists, ranges)

    def _of(self, kind: Any, parts: Sequence[Lists]) -> Lists:
        vector = faiss().InvertedListsPtrVector()
        for part in parts:
            vector.push_back(part)
        return kind(vector.size(), vector.data())


_HEADER = struct.Struct("<4sQQ4sQ")
"""Start of lists in a file of faiss: "ilar", number of lists, bytes of a code, "full" or "sprs", numbers that follow.

The numbers, uint64, are the size of each list, or the number and size of each that is not empty. Codes and ids of list
after list follow.
"""

MAX_LISTS = 1 << 23
"""Limit of a file's lists, most of which may be empty; an index of a billion rows has 262,144."""

_MOST_CODE_BYTES = 1 << 24
"""Limit of one code; that of whole vectors of 65,536 dimensions is a 64th of it."""


def no_lists(lists: int, code_size: int) -> bytes:
    """Lists as faiss writes them while all are empty: the end of the file of an index without rows."""
    return _HEADER.pack(b"ilar", lists, code_size, b"sprs", 0)


def lists_header(sizes: np.ndarray, code_size: int) -> bytes:
    """Everything before the first code in faiss's form of lists with these sizes."""
    header = _HEADER.pack(b"ilar", len(sizes), code_size, b"full", len(sizes))
    return header + sizes.astype("<u8").tobytes()


class ListsBytes:
    """A lists file, in a folder or a bucket, read piece by piece: no more of it is ever in memory.

    Args:
        lists: number of lists in it; None for any.

    Raises OutputError `index_damaged` if the file holds something else.

    Attributes:
        sizes: rows of each list, int64.
    """

    def __init__(self, path: Place, lists: int | None = None) -> None:
        self.path = path
        with asking(path):
            self._bytes = path.stat().st_size
            self._file = (
                open(path, "rb", buffering=0)  # noqa: SIM115 - closed by the caller
                if isinstance(path, Path)
                else RangedFile(path, self._bytes)
            )
        try:
            self._read_sizes(lists)
        except OutputError:
            self._file.close()
            raise

    def _read_sizes(self, expected: int | None) -> None:
        kind, lists, self.code_size, form, numbers = _HEADER.unpack(self._read(0, _HEADER.size))
        file_bytes = self._bytes
        valid = kind == b"ilar" and form in (b"full", b"sprs") and self.code_size <= _MOST_CODE_BYTES
        if not valid or lists != (lists if expected is None else expected) or 8 * numbers > file_bytes:
            raise damaged(f"{self.path} does not hold {'its' if expected is None else f'{expected:,}'} lists")
        if lists > MAX_LISTS:
            raise damaged(f"{self.path} has {lists:,} lists; {MAX_LISTS:,} are the most")
        table = np.frombuffer(self._read(_HEADER.size, 8 * numbers), "<u8")
        listed, of_them = (np.arange(lists), table) if form == b"full" else (table[::2], table[1::2])
        if len(listed) != len(of_them) or (len(listed) and listed.max() >= lists):
            raise damaged(f"{self.path} does not hold {lists:,} lists")
        entry = self.code_size + 8
        header_bytes = _HEADER.size + 8 * numbers
        # Integers of numpy would wrap; of what is within the file they do not.
        fits = entry * of_them.sum(dtype=np.float64) <= 2 * file_bytes
        total = header_bytes + entry * (int(of_them.sum()) if fits else sum(of_them.tolist()))
        if total != file_bytes:
            raise damaged(f"{self.path} has {file_bytes:,} bytes, its lists have {total:,}")
        self.sizes = np.zeros(lists, np.int64)
        np.add.at(self.sizes, listed, of_them.astype(np.int64))
        self._starts = (header_bytes + entry * np.concatenate([[0], np.cumsum(self.sizes)])).tolist()

    def __enter__(self) -> ListsBytes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def codes(self, number: int, first: int, count: int) -> np.ndarray:
        """Codes of some rows of a list: uint8 (count, bytes of a code)."""
        data = self._read(self._starts[number] + first * self.code_size, count * self.code_size)
        return np.frombuffer(data, np.uint8).reshape(count, self.code_size)

    def ids(self, number: int, first: int, count: int) -> np.ndarray:
        """Ids of some rows of a list: int64 (count,)."""
        start = self._starts[number] + int(self.sizes[number]) * self.code_size
        return np.frombuffer(self._read(start + 8 * first, 8 * count), "<i8")

    def write_part(self, span: range, path: Path) -> None:
        """Write a file of some of its lists alone; OSError if the disk refuses."""
        start, stop = self._starts[span.start], self._starts[span.stop]
        with open(path, "wb") as file:
            file.write(lists_header(self.sizes[span.start : span.stop], self.code_size))
            for at in range(start, stop, PIECE_BYTES):
                file.write(self._read(at, min(PIECE_BYTES, stop - at)))

    def _read(self, offset: int, count: int) -> bytes:
        with asking(self.path):
            self._file.seek(offset)
            data = self._file.read(count) or b""
        if len(data) != count:
            raise damaged(f"{self.path} ends before byte {offset + count:,}")
        return data
