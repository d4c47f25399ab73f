"""Deletion of rows: a bitmap by id that searches filter by, until compaction drops the codes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from embq.core.errors import InputError
from embq.core.storage.durable import drop, file_sha256
from embq.core.storage.durable import publish as put
from embq.index.change.version_swap import swap_version, tidy
from embq.index.index_files.files import FILES, File, disk_error, index_lock
from embq.index.index_files.identity import Identity
from embq.index.index_files.lists import is_set, read_lists
from embq.index.index_files.version import Version, read_current

NAMED = 10
"""Unknown keys that are named to the user."""

NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Result of a deletion.

    Attributes:
        version: current one afterwards.
        rows: that were deleted now.
        already: rows of these keys that were deleted before.
        unknown: keys that no row has.
    """

    version: Version
    rows: int
    already: int
    unknown: tuple[str, ...]


def delete(index: Path, keys: Sequence[str], ids: np.ndarray = NO_IDS) -> Deletion:
    """Delete all rows that have one of the keys or ids, in a new version; readers of the old one see them still.

    Args:
        ids: int64 (n,).

    Raises InputError `no_such_key` if no row has any of the keys, `no_such_id` for an id of no row, and `no_index`;
    TryLaterError if another process is at work on the index.
    """
    with index_lock(index):
        base = read_current(index)
        spans = [(file.check(index), file.first_id, file.rows) for file in base.identity]
        by_key = Identity.open(spans).ids_of(keys) if keys else {}
        unknown = tuple(key for key, key_ids in by_key.items() if not key_ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < base.next_id:
            raise InputError(
                f"there is no row with id {ids.max()}", next_step=f"{index} has {base.next_id:,}", code="no_such_id"
            )
        if unknown and len(unknown) == len(by_key) and not len(ids):
            raise InputError(
                f"no row of {index} has {'the key' if len(unknown) == 1 else f'any of the {len(unknown):,} keys'} "
                f"{', '.join(unknown[:NAMED])}{', ...' if len(unknown) > NAMED else ''}",
                next_step="keys are those that `embq search` shows; nothing was deleted",
                code="no_such_key",
            )
        ids = np.unique(np.concatenate([ids, *(np.asarray(key_ids, np.int64) for key_ids in by_key.values())]))
        bits = deleted_bits(base)
        new = ids[~is_set(bits, ids)]
        if not len(new):
            tidy(index)
            return Deletion(version=base, rows=0, already=len(ids), unknown=unknown)
        np.bitwise_or.at(bits, new >> 3, (1 << (new & 7)).astype(np.uint8))
        # Rows that are in no list are no answers anyway: they are counted once.
        listed = len(new) if not base.excluded else int(np.isin(new, np.concatenate([*_listed(base), new[:0]])).sum())
        version = replace(
            base,
            name="",
            deleted=base.deleted + len(new),
            excluded=base.excluded - (len(new) - listed),
            deleted_file=_write(index, bits),
        )
        return Deletion(
            version=swap_version(base, version, {}), rows=len(new), already=len(ids) - len(new), unknown=unknown
        )


def deleted_bits(version: Version) -> np.ndarray:
    """uint8 (ids / 8,): a bit for each id of a version, that of id 0 the lowest of the first byte; the caller's own."""
    bits = np.zeros(-(-version.next_id // 8), np.uint8)
    if version.deleted_file is not None:
        stored = np.fromfile(version.deleted_file.check(version.index), np.uint8)
        bits[: len(stored)] = stored
    return bits


def _listed(version: Version) -> Iterator[np.ndarray]:
    """The ids that are in the lists of a version, some at a time."""
    from embq.index.faiss_module import faiss

    for group in version.groups:
        for file in group:
            lists = read_lists(file.check(version.index), mapped=True)
            for number in range(file.last - file.first):
                if count := lists.list_size(number):
                    yield faiss().rev_swig_ptr(lists.get_ids(number), count).copy()


def _write(index: Path, bits: np.ndarray) -> File:
    temporary = index / FILES / f".deleted-{secrets.token_hex(4)}"
    try:
        temporary.write_bytes(bits.data)  # `tofile` raises nothing if the disk refuses the last bytes (numpy 2.4)
        digest = file_sha256(temporary)
        path = f"{FILES}/deleted-{digest[:16]}.bitmap"
        put(temporary, index / path)
    except OSError as error:
        drop(temporary)
        raise disk_error(error, index) from error
    return File(path=path, bytes=bits.nbytes, sha256=digest)
