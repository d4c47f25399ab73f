"""Fits an index to its search memory, and training sample and blocks to the build memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from embq.core.errors import InputError
from embq.index.plan.build_options import BuildOptions, bytes_text, memory_option
from embq.index.plan.codec_choices import POINTS_PER_CENTROID, SMALL_ROWS, lists_for, most_lists
from embq.index.plan.codecs import Codec, codec
from embq.index.plan.costs import add_bytes, train_bytes
from embq.index.plan.index_key import IndexKey

TRAIN_POINTS = 50
"""Rows of the training sample for each list; fewer where the collection or the memory has no more."""

MOST_BLOCK_ROWS = 1 << 20

LEAST_BLOCK_ROWS = 1 << 16

LEAST_BLOCK_IN_NEED = 1 << 12
"""Blocks as small as this where the memory allows no larger ones."""


def best_codec_that_fits(n: int, dim: int, options: BuildOptions, choices: Sequence[Codec]) -> tuple[Codec, int]:
    """The most exact codec, and its lists, that fit into the memory of the index."""
    flat = codec("Flat", dim)
    if n < SMALL_ROWS and _share(flat, n, 1, dim, options) <= options.max_index_memory_usage:
        return flat, 1
    for choice in choices:
        nlist = lists_for(n, packed=choice.fastscan_at_load)
        if _share(choice, n, nlist, dim, options) <= options.max_index_memory_usage:
            return choice, nlist
    raise _too_small(n, dim, nlist, options, choices[-1], choices)


def codec_of_key(
    key: IndexKey, n: int, dim: int, options: BuildOptions, choices: Sequence[Codec], notes: list[str]
) -> tuple[Codec, int]:
    """The codec and the lists of the user's key, where they fit."""
    nlist = key.nlist
    if key.note:
        notes.append(key.note)
    if nlist > n:
        lower = most_lists(n)
        notes.append(f"{nlist} lists for {n:,} vectors: lowered to {lower}, so that each has vectors to be trained on")
        nlist = lower
    if _share(key.codec, n, nlist, dim, options) > options.max_index_memory_usage:
        raise _too_small(n, dim, nlist, options, key.codec, choices)
    return key.codec, nlist


def _share(codec: Codec, n: int, nlist: int, dim: int, options: BuildOptions) -> int:
    """RAM of one of the indices that are kept."""
    return codec.index_bytes(math.ceil(n / options.nb_indices_to_keep), nlist, dim)


def _too_small(
    n: int, dim: int, nlist: int, options: BuildOptions, choice: Codec, choices: Sequence[Codec]
) -> InputError:
    """The refusal of a memory limit, with what would work."""
    given = options.max_index_memory_usage
    needed = _share(choice, n, nlist, dim, options)
    ways = [f"--max-index-memory-usage {bytes_text(needed)} (for {choice.factory(nlist)})"]
    fits = [(r, lists_for(n, packed=r.fastscan_at_load)) for r in choices]
    smaller = next(((r, k) for r, k in fits if _share(r, n, k, dim, options) <= given), None)
    if smaller is not None:
        takes = bytes_text(_share(smaller[0], n, smaller[1], dim, options))
        ways.insert(0, f"--index-key {smaller[0].factory(smaller[1])}, which takes {takes}")
    elif options.index_key is None and len(fits) > 2:
        better, lists = fits[len(fits) // 2]
        takes = bytes_text(_share(better, n, lists, dim, options))
        ways.append(f"--max-index-memory-usage {takes} (for {better.factory(lists)}, more exact)")
    fixed = choice.index_bytes(0, nlist, dim)
    if given > fixed + choice.bytes_per_vector():
        keep = math.ceil(n / ((given - fixed) // choice.bytes_per_vector()))
        if keep <= nlist:
            ways.append(f"--nb-indices-to-keep {keep}, searched one after another or on {keep} machines")
    return InputError(
        f"an index over {n:,} vectors of {dim} dimensions takes {bytes_text(needed)} ({needed:,} bytes) of memory with "
        f"{choice.factory(nlist)}, {'the smallest key' if options.index_key is None else 'the key asked for'}; "
        f"--max-index-memory-usage allows {bytes_text(given)} ({given:,} bytes)",
        next_step="One of these works: " + "; ".join(ways) + ".",
        code="index_memory",
    )


def trainable(n: int, dim: int, codec: Codec, nlist: int, options: BuildOptions, notes: list[str]) -> tuple[int, int]:
    """Lists and sample rows whose training fits into the memory of the build: first fewer rows, then fewer lists."""
    memory = options.current_memory_available
    rows = min(n, max(TRAIN_POINTS * nlist, 16_384))
    planned = nlist
    while train_bytes(rows, codec, nlist, dim) > memory:
        if rows > POINTS_PER_CENTROID * nlist:
            rows = max(POINTS_PER_CENTROID * nlist, rows // 2)
        elif nlist > 1 and options.index_key is None:
            nlist //= 2
            rows = min(rows, POINTS_PER_CENTROID * nlist)
        else:
            raise _untrainable(min(rows, n), n, dim, codec, nlist, options)
    if nlist < planned:
        notes.append(f"{nlist} lists instead of {planned}, whose training does not fit {memory_option()}")
    return nlist, rows


def rows_of_block(n: int, dim: int, codec: Codec, nlist: int, options: BuildOptions) -> int:
    """Rows of one add unit: a sixteenth of all, in bounds; less if the memory of one process demands it."""
    rows: int = min(MOST_BLOCK_ROWS, max(LEAST_BLOCK_ROWS, 1 << (n // 16).bit_length()))
    memory = options.current_memory_available // options.workers
    while add_bytes(min(rows, n), codec, nlist, dim) > memory:
        if rows <= LEAST_BLOCK_IN_NEED:
            raise _block_too_large(min(rows, n), n, dim, codec, nlist, options)
        rows //= 2
    return rows


def _untrainable(rows: int, n: int, dim: int, codec: Codec, nlist: int, options: BuildOptions) -> InputError:
    memory, needed = options.current_memory_available, train_bytes(rows, codec, nlist, dim)
    return InputError(
        f"training {codec.factory(nlist)} on {rows:,} of {n:,} vectors of {dim} dimensions takes "
        f"{bytes_text(needed)} ({needed:,} bytes) of memory; {memory_option()} allows "
        f"{bytes_text(memory)} ({memory:,} bytes)",
        next_step=f"Give {memory_option()} {bytes_text(needed)}"
        + ("." if options.index_key is None else ", or a key with fewer lists."),
        code="build_memory",
    )


def _block_too_large(rows: int, n: int, dim: int, codec: Codec, nlist: int, options: BuildOptions) -> InputError:
    memory, needed = options.current_memory_available // options.workers, add_bytes(rows, codec, nlist, dim)
    ways = [f"{memory_option()} {bytes_text(needed * options.workers)}"]
    if fewer := options.current_memory_available // needed:
        ways.append(f"{fewer} worker{'s' if fewer > 1 else ''} on this machine")
    return InputError(
        f"adding {rows:,} of {n:,} vectors of {dim} dimensions to {codec.factory(nlist)} takes "
        f"{bytes_text(needed)} ({needed:,} bytes) of memory in each of {options.workers} processes; "
        f"{memory_option()} allows each {bytes_text(memory)} ({memory:,} bytes)",
        next_step="One of these works: " + "; ".join(ways) + ".",
        code="build_memory",
    )
