"""Damaged shards: the failure that stands for the rest of one whose whole samples are kept, the retry of that rest, and
how many samples there should be.

Committed rows are never replaced. So the key of the failure has a digest of the samples before the damage, and a retry
embeds what is behind them where the mended shard begins with the very same samples.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from functools import lru_cache

import msgspec

from embq.core.errors import MalformedError, SampleError, SourceError
from embq.core.storage.paths import is_url
from embq.core.units import DAMAGED_REST, SAMPLES_TOLD, Retry, Sample, Unit
from embq.core.wire import Count, read
from embq.sources.access.files import base_name, read_inside
from embq.sources.access.ranged_reads import fetch_all
from embq.sources.access.urls import path_of
from embq.sources.interface import SAMPLE_MAX_BYTES, unwatched

_SHARD = re.compile(r"(.+?)\.(tar|tgz)(\.[a-z0-9]+)?", re.IGNORECASE)
_INDEX = re.compile(rb"v1\.[0-9] ([0-9]{1,9})\s")
_KEY = re.compile(r".*:bytes [0-9]+-[0-9]*:([0-9a-f]{32})", re.DOTALL)


def keeps_damaged(unit: Unit) -> bool:
    """True if the whole samples of a damaged shard become rows."""
    return ("damaged", "keep") in unit.options


class _Stats(msgspec.Struct, frozen=True):
    """`_stats.json` of a shard by img2dataset, as far as it is used: images that were downloaded."""

    successes: Count


def with_samples(error: SourceError, source: str) -> SourceError:
    """A copy of the error of a shard, with the number of its samples where a file beside it tells.

    Read are `<shard>_stats.json` of img2dataset, `sizes.json`, and `<shard>.idx` (the first line of DALI's wds2idx).
    """
    name = base_name(source)
    shard = _SHARD.fullmatch(name)
    folder = path_of(source).removesuffix(name)
    counts: dict[str, Callable[[str], int]] = (
        {
            f"{shard[1]}_stats.json": lambda file: read(_Stats, _beside(folder, file), what=file).successes,
            "sizes.json": lambda _: _sizes(folder)[name],
            f"{shard[1]}.idx": lambda file: (
                int(match[1]) if (match := _INDEX.match(_beside(folder, file))) else _none()
            ),
        }
        if shard
        else {}
    )
    for beside, count in counts.items():
        with suppress(SampleError, SourceError, MalformedError, LookupError):
            samples = count(beside)
            return SourceError(
                error.message + SAMPLES_TOLD.format(file=beside, samples=samples),
                code=error.code,
                next_step=error.next_step,
            )
    return copy(error)


@lru_cache(maxsize=1)
def _sizes(folder: str) -> dict[str, int]:
    """Samples of each shard of a folder; read once, since where one shard is missing others may be."""
    return read(dict[str, Count], _beside(folder, "sizes.json"), what="sizes.json", most_bytes=SAMPLE_MAX_BYTES)


def _none() -> int:
    raise LookupError


def _beside(folder: str, name: str) -> bytes:
    if not is_url(folder):
        return read_inside(os.path.realpath(folder), name, None, unwatched)
    (data,) = fetch_all([folder + name], [None], unwatched)
    if isinstance(data, SourceError):
        raise data
    return data


class SamplesDigest:
    """SHA-256 over samples in order: their keys, and all that rows and failures are made of."""

    def __init__(self) -> None:
        self.samples = 0
        self._hash = hashlib.sha256()

    def add(self, sample: Sample) -> None:
        """The next sample. Of one that cannot be used its code counts: the message may have byte offsets."""
        self.samples += 1
        problem = sample.error or sample.unread
        code = None if problem is None else problem[0]
        for part in (sample.key, sample.image, sample.text, sample.metadata, code):
            data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
            self._hash.update(b"-" if data is None else b"%d:" % len(data))
            self._hash.update(data or b"")

    def hexdigest(self) -> str:
        """32 hex digits."""
        return self._hash.hexdigest()[:32]


def rest_of(unit: Unit, kept_digest: SamplesDigest, message: str, start: int, stop: int | None) -> Sample:
    """The failure that stands for all samples behind those in `kept_digest`.

    Args:
        message: what is damaged, and where.
        start: first byte of what is not read, decompressed where the shard is compressed.
        stop: byte behind the last of it; None if that is unknown.
    """
    key = f"{base_name(unit.source)}:bytes {start}-{'' if stop is None else stop}:{kept_digest.hexdigest()}"
    return Sample(ordinal=kept_digest.samples, key=key, error=("damaged_rest", message))


def digest_in(key: str) -> str:
    """The digest of the kept samples in the key of such a failure; "" for another key."""
    match = _KEY.fullmatch(key.removesuffix("#"))  # as the key of a text without chunks
    return match[1] if match else ""


def rest(samples: Iterator[Sample], unit: Unit, retry: Retry) -> Iterator[Sample]:
    """The samples of a mended shard behind those that were kept.

    Raises SourceError `source_changed` if other samples are before them than were kept, and `damaged_rest` where
    the shard is damaged before that place.
    """
    digest = SamplesDigest()
    proven = False
    for sample in samples:
        if sample.ordinal < unit.first_ordinal:
            if sample.error is not None and sample.error[0] == DAMAGED_REST:
                raise SourceError(sample.error[1], code="damaged_rest", next_step="copy or write the shard again")
            digest.add(sample)
            continue
        if not proven:
            _prove(digest, unit, retry)
            proven = True
        yield sample
    if not proven:
        _prove(digest, unit, retry)


def _prove(digest: SamplesDigest, unit: Unit, retry: Retry) -> None:
    if (digest.samples, digest.hexdigest()) != (unit.first_ordinal, retry.keys):
        raise SourceError(
            f"{unit.source}: its first {unit.first_ordinal:,} samples are not those that were kept of the damaged "
            "shard, and their rows are not replaced",
            code="source_changed",
            next_step="put the shard back as it was first written, or make a new run of it",
        )
