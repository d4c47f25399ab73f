"""Retries: which samples of a unit are done once more, after somebody has mended what they are read from.

A retry is a unit of its own in a later generation of the manifest. Its rows and failures take the place of the
failures that it names; nothing of what is committed is changed or read again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from core.wire import Count, UnitNumber

MOST_SAMPLES = 10_000_000
"""Of one unit: a few characters of a forged hint must not fill a worker's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What a retry unit does again.

    Attributes:
        unit: index of the unit that was planned first, whose ordinals its samples have.
        failed: index of the unit whose result holds the failures: that one, or an earlier retry of it.
        record: number of the commit record that holds them.
        attempts: how often these samples were tried before.
        replaces: number of failures that its result takes the place of.
        only: ordinals of its samples, ascending, as ranges such as "0-3,7"; "" for a unit that failed as a whole.
        keys: `key_digest` of its samples; "" where their place alone says which they are.
        samples: samples of the unit that was planned first, where they are known; a source that has another number
            of them was not mended but changed.
    """

    unit: UnitNumber
    failed: UnitNumber
    record: Count
    attempts: Count
    replaces: Count
    only: str = ""
    keys: str = ""
    samples: Count | None = None

    def __post_init__(self) -> None:
        from_ranges(self.only)

    @property
    def ordinals(self) -> list[int]:
        """The samples that are done again, ascending; empty where that is the whole unit."""
        return from_ranges(self.only)

    @property
    def lifts(self) -> int:
        """Number of quarantined units, 0 or 1, that are none any more once this one is committed."""
        return 0 if self.only else self.replaces

    def describe(self) -> dict[str, Any]:
        """The retry as JSON-ready values."""
        described: dict[str, Any] = msgspec.to_builtins(self)
        return described


def to_ranges(ordinals: Iterable[int]) -> str:
    """Ascending numbers as text: "0-3,7"."""
    found: list[list[int]] = []
    for ordinal in ordinals:
        if found and ordinal == found[-1][1] + 1:
            found[-1][1] = ordinal
        else:
            found.append([ordinal, ordinal])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def from_ranges(text: str) -> list[int]:
    """The numbers that `to_ranges` wrote; ValueError for any other text."""
    numbers: list[int] = []
    for piece in text.split(",") if text else ():
        low, _, high = piece.partition("-")
        some = range(int(low), int(high or low) + 1)
        if not some or (numbers and some[0] <= numbers[-1]) or some[0] < 0 or some[-1] >= MOST_SAMPLES:
            raise ValueError(f"{text[:80]!r} are no ascending ranges")
        numbers.extend(some)
    return numbers


def key_digest(keys: Sequence[str]) -> str:
    """32 hex digits over keys in their order, as they are stored."""
    digest = hashlib.sha256()
    for key in keys:
        data = key.encode("utf-8", "backslashreplace")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:32]
