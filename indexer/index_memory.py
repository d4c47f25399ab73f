"""Which index fits the memory that searching may take, and what is said where none does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from core.errors import InputError
from indexer.autofaiss_keys import IndexKey
from indexer.codecs import Codec, codec
from indexer.ladder import SMALL_ROWS, lists_for, most_lists
from indexer.wish import Wish, bytes_text


def _share(codec: Codec, n: int, nlist: int, dim: int, wish: Wish) -> int:
    """RAM of one of the indices that are kept."""
    return codec.index_bytes(math.ceil(n / wish.nb_indices_to_keep), nlist, dim)


def best_that_fits(n: int, dim: int, wish: Wish, rungs: Sequence[Codec]) -> tuple[Codec, int]:
    """The most exact codec, and its lists, that fit into the memory of the index."""
    flat = codec("Flat", dim)
    if n < SMALL_ROWS and _share(flat, n, 1, dim, wish) <= wish.max_index_memory_usage:
        return flat, 1
    for rung in rungs:
        nlist = lists_for(n, packed=rung.fastscan_at_load)
        if _share(rung, n, nlist, dim, wish) <= wish.max_index_memory_usage:
            return rung, nlist
    raise _too_small(n, dim, nlist, wish, rungs[-1], rungs)


def asked_for(
    asked: IndexKey, n: int, dim: int, wish: Wish, rungs: Sequence[Codec], notes: list[str]
) -> tuple[Codec, int]:
    """The codec and the lists of the user's key, where they fit."""
    nlist = asked.nlist
    if asked.note:
        notes.append(asked.note)
    if nlist > n:
        lower = most_lists(n)
        notes.append(f"{nlist} lists for {n:,} vectors: lowered to {lower}, so that each has vectors to be trained on")
        nlist = lower
    if _share(asked.codec, n, nlist, dim, wish) > wish.max_index_memory_usage:
        raise _too_small(n, dim, nlist, wish, asked.codec, rungs)
    return asked.codec, nlist


def _too_small(n: int, dim: int, nlist: int, wish: Wish, rung: Codec, rungs: Sequence[Codec]) -> InputError:
    """The refusal of a memory limit, with what would work."""
    given = wish.max_index_memory_usage
    needed = _share(rung, n, nlist, dim, wish)
    ways = [f"--max-index-memory-usage {bytes_text(needed)} (for {rung.factory(nlist)})"]
    fits = [(r, lists_for(n, packed=r.fastscan_at_load)) for r in rungs]
    smaller = next(((r, k) for r, k in fits if _share(r, n, k, dim, wish) <= given), None)
    if smaller is not None:
        takes = bytes_text(_share(smaller[0], n, smaller[1], dim, wish))
        ways.insert(0, f"--index-key {smaller[0].factory(smaller[1])}, which takes {takes}")
    elif wish.index_key is None and len(fits) > 2:
        better, lists = fits[len(fits) // 2]
        takes = bytes_text(_share(better, n, lists, dim, wish))
        ways.append(f"--max-index-memory-usage {takes} (for {better.factory(lists)}, more exact)")
    fixed = rung.index_bytes(0, nlist, dim)
    if given > fixed + rung.bytes_per_vector():
        keep = math.ceil(n / ((given - fixed) // rung.bytes_per_vector()))
        if keep <= nlist:
            ways.append(f"--nb-indices-to-keep {keep}, searched one after another or on {keep} machines")
    return InputError(
        f"an index over {n:,} vectors of {dim} dimensions takes {bytes_text(needed)} ({needed:,} bytes) of memory with "
        f"{rung.factory(nlist)}, {'the smallest key' if wish.index_key is None else 'the key asked for'}; "
        f"--max-index-memory-usage allows {bytes_text(given)} ({given:,} bytes)",
        next_step="One of these works: " + "; ".join(ways) + ".",
        code="index_memory",
    )
