"""Retries: which samples of a unit are done once more, after somebody has mended what they are read from.

A retry is a unit of its own in a later generation of the manifest. Its rows and failures take the place of the
failures that it names; nothing of what is committed is changed or read again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_FIELDS = ("unit", "failed", "record", "attempts", "replaces", "only", "keys", "samples")

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

    unit: int
    failed: int
    record: int
    attempts: int
    replaces: int
    only: str = ""
    keys: str = ""
    samples: int | None = None

    @property
    def ordinals(self) -> list[int]:
        """The samples that are done again, ascending; empty where that is the whole unit."""
        return from_ranges(self.only)

    @property
    def lifts(self) -> int:
        """Number of quarantined units, 0 or 1, that are none any more once this one is committed."""
        return 0 if self.only else self.replaces

    def describe(self) -> dict[str, Any]:
        """The retry as JSON-ready values; `from_description` is its inverse."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_description(cls, described: Any) -> Retry | None:
        """The retry that `describe` gave, None for None; KeyError, TypeError or ValueError on any other shape."""
        if described is None:
            return None
        if set(described) != set(_FIELDS):
            raise KeyError(f"a retry has exactly the fields {sorted(_FIELDS)}")
        numbers = {name: int(described[name]) for name in ("unit", "failed", "record", "attempts", "replaces")}
        samples = described["samples"]
        retry = cls(
            **numbers,
            only=str(described["only"]),
            keys=str(described["keys"]),
            samples=None if samples is None else int(samples),
        )
        from_ranges(retry.only)
        return retry


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
