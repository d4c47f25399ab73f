"""How building keeps to the memory that it may take: a smaller sample and smaller blocks, or a refusal with numbers."""

from __future__ import annotations

from core.errors import InputError
from indexer.codecs import Codec
from indexer.costs import add_bytes, train_bytes
from indexer.ladder import POINTS_PER_CENTROID
from indexer.wish import Wish, bytes_text

TRAIN_POINTS = 50
"""Rows of the training sample for each list; fewer where the collection or the memory has no more."""

MOST_BLOCK_ROWS = 1 << 20
LEAST_BLOCK_ROWS = 1 << 16
LEAST_BLOCK_IN_NEED = 1 << 12
"""Blocks as small as this where the memory allows no larger ones."""


def trainable(n: int, dim: int, codec: Codec, nlist: int, wish: Wish, notes: list[str]) -> tuple[int, int]:
    """Lists and sample rows whose training fits into the memory of the build: first fewer rows, then fewer lists."""
    memory = wish.current_memory_available
    rows = min(n, max(TRAIN_POINTS * nlist, 16_384))
    wanted = nlist
    while train_bytes(rows, codec, nlist, dim) > memory:
        if rows > POINTS_PER_CENTROID * nlist:
            rows = max(POINTS_PER_CENTROID * nlist, rows // 2)
        elif nlist > 1 and wish.index_key is None:
            nlist //= 2
            rows = min(rows, POINTS_PER_CENTROID * nlist)
        else:
            raise _untrainable(min(rows, n), n, dim, codec, nlist, wish)
    if nlist < wanted:
        notes.append(f"{nlist} lists instead of {wanted}, whose training does not fit --current-memory-available")
    return nlist, rows


def rows_of_block(n: int, dim: int, codec: Codec, nlist: int, wish: Wish) -> int:
    """Rows of one add unit: a sixteenth of all, in bounds; less where the memory of one process demands it."""
    rows: int = min(MOST_BLOCK_ROWS, max(LEAST_BLOCK_ROWS, 1 << (n // 16).bit_length()))
    memory = wish.current_memory_available // wish.workers
    while add_bytes(min(rows, n), codec, nlist, dim) > memory:
        if rows <= LEAST_BLOCK_IN_NEED:
            raise _block_too_large(min(rows, n), n, dim, codec, nlist, wish)
        rows //= 2
    return rows


def _untrainable(rows: int, n: int, dim: int, codec: Codec, nlist: int, wish: Wish) -> InputError:
    memory, needed = wish.current_memory_available, train_bytes(rows, codec, nlist, dim)
    return InputError(
        f"training {codec.factory(nlist)} on {rows:,} of {n:,} vectors of {dim} dimensions takes "
        f"{bytes_text(needed)} ({needed:,} bytes) of memory; --current-memory-available allows "
        f"{bytes_text(memory)} ({memory:,} bytes)",
        next_step=f"Give --current-memory-available {bytes_text(needed)}"
        + ("." if wish.index_key is None else ", or a key with fewer lists."),
        code="build_memory",
    )


def _block_too_large(rows: int, n: int, dim: int, codec: Codec, nlist: int, wish: Wish) -> InputError:
    memory, needed = wish.current_memory_available // wish.workers, add_bytes(rows, codec, nlist, dim)
    ways = [f"--current-memory-available {bytes_text(needed * wish.workers)}"]
    if fewer := wish.current_memory_available // needed:
        ways.append(f"{fewer} worker{'s' if fewer > 1 else ''} on this machine")
    return InputError(
        f"adding {rows:,} of {n:,} vectors of {dim} dimensions to {codec.factory(nlist)} takes "
        f"{bytes_text(needed)} ({needed:,} bytes) of memory in each of {wish.workers} processes; "
        f"--current-memory-available allows each {bytes_text(memory)} ({memory:,} bytes)",
        next_step="One of these works: " + "; ".join(ways) + ".",
        code="build_memory",
    )
