"""Random numbers that follow from what they are for, and from nothing else: not from who draws them, or when."""

from __future__ import annotations

import hashlib
import random


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits for what `parts` name; other parts give another one. The same on every machine, as `hash` of
    a text is not."""
    told = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(told.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") >> 1


def random_of(*parts: int | str) -> random.Random:
    """A source of random numbers for what `parts` name."""
    return random.Random(seed_of(*parts))
