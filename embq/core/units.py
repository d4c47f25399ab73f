"""Vocabulary of what is embedded: units, their samples, retries of samples, and failures.

A unit's id is the hash of its description, so planning the same input twice gives the same units on any machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from embq.core.wire import Count, PathText, UnitNumber, Word, convert, malformed

UNIT_SPEC_MAX_BYTES = 48_000
"""Longest canonical description of a unit. It travels in a hint, and hints above 64 kB are refused."""


def canonical_json(value: Any) -> str:
    """`value` as JSON text that is equal for equal values: sorted keys, no spaces, UTF-8 unescaped."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_ASCII_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def json_text(value: Any) -> str:
    """`value` as compact JSON in valid UTF-8; ValueError for NaN and infinity."""
    text = _ENCODER.encode(value)
    return text if is_unicode(text) else _ASCII_ENCODER.encode(value)


# JSON has no NaN; Python writes it all the same, and img2dataset's metadata holds it for "unknown".
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def json_value(text: str) -> Any:
    """The value of a JSON text; NaN and Infinity are None. Raises ValueError or RecursionError.

    A number beyond float64, such as 1e400, is an infinite float.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # those, halves of surrogate pairs, and what is no JSON
        return _DECODER.decode(text)


def is_unicode(text: str) -> bool:
    """True if UTF-8 can encode `text`: a JSON escape can give half a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def content_hash(value: Any) -> str:
    """First 32 hex digits of the SHA-256 of `canonical_json(value)`; surrogate escapes are hashed as bytes."""
    return id_of(canonical_json(value).encode("utf-8", "surrogateescape"))


def sealed(body: dict[str, Any]) -> dict[str, Any]:
    """A record with the hash of its other fields as `sha256`, in place of one that it has; the same if that fits.

    UnicodeEncodeError for what cannot be hashed: a surrogate that is no escape.
    """
    text = canonical_json({name: value for name, value in body.items() if name != "sha256"})
    return {**body, "sha256": hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()}


def id_of(description: bytes) -> str:
    """The id of the unit whose description is `description`: canonical JSON with surrogate escapes as bytes."""
    return hashlib.sha256(description).hexdigest()[:32]


DAMAGED_REST = "damaged_rest"
"""Code of the failure that stands for all samples of a damaged shard that are not kept. It has the ordinal behind those
that are."""

SAMPLES_TOLD = "; {file} says that it has {samples:,} samples"
"""Part of the message of a shard's failure, where a file beside the shard tells the number of its samples."""

MOST_SAMPLES = 10_000_000
"""Limit of one unit, because a few characters of a forged hint could fill a worker's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The samples of an earlier unit that a unit retries.

    A retry is a unit of its own in a later generation of the manifest. Its rows and failures replace the failures that
    it names; committed rows are neither changed nor read again.

    Attributes:
        unit: index of the original unit, whose ordinals its samples have.
        failed: index of the unit whose result holds the failures: the original one, or an earlier retry of it.
        record: number of the commit record that holds them.
        attempts: number of earlier attempts at these samples.
        replaces: number of failures that its result replaces.
        only: ordinals of its samples, ascending, as ranges such as "0-3,7"; "" for a unit that failed as a whole;
            "12+" for the rest of a shard, from that ordinal to its end, in place of the one failure with this ordinal.
        keys: `key_digest` of its samples; "" if their positions identify them. For the rest of a shard the
            `SamplesDigest` of the samples before it, which have rows or failures already.
        samples: number of samples of the original unit, if known; a source with another number was not repaired
            but changed.
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
        if len(self.ordinals) != 1 and self.is_rest:
            raise ValueError(f"{self.only[:80]!r} is no rest of a shard")

    @property
    def is_rest(self) -> bool:
        """True for the rest of a damaged shard."""
        return self.only.endswith("+")

    @property
    def ordinals(self) -> list[int]:
        """Ordinals of the failures that are retried, ascending; empty for the whole unit."""
        return from_ranges(self.only.removesuffix("+"))

    @property
    def lifts(self) -> int:
        """Number of units, 0 or 1, whose quarantine ends when this one is committed."""
        return 0 if self.only else self.replaces


def to_ranges(ordinals: Iterable[int]) -> str:
    """Ascending numbers as text: "0-3,7"."""
    ranges: list[list[int]] = []
    for ordinal in ordinals:
        if ranges and ordinal == ranges[-1][1] + 1:
            ranges[-1][1] = ordinal
        else:
            ranges.append([ordinal, ordinal])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def from_ranges(text: str) -> list[int]:
    """The numbers that `to_ranges` wrote; ValueError for any other text."""
    numbers: list[int] = []
    for piece in text.split(",") if text else ():
        low, _, high = piece.partition("-")
        span = range(int(low), int(high or low) + 1)
        if not span or (numbers and span[0] <= numbers[-1]) or span[0] < 0 or span[-1] >= MOST_SAMPLES:
            raise ValueError(f"{text[:80]!r} are no ascending ranges")
        numbers.extend(span)
    return numbers


def key_digest(keys: Sequence[str]) -> str:
    """32 hex digits over keys in their order, as they are stored."""
    digest = hashlib.sha256()
    for key in keys:
        data = key.encode("utf-8", "backslashreplace")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:32]


FILE_NAME = "file_name"
"""Option of a unit, see there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit: the part of a source that one worker embeds at once.

    Attributes:
        kind: name of the source type that reads it: "tar", "files", "parquet", "arrow", "csv", "jsonl" or "lines";
            or of a plug-in.
        source: path or URL of the shard, folder or file.
        start: first byte of the slice (texts; of what comes out where the file is compressed); 0 for a whole shard and
            for rows of tables.
        stop: byte after the slice; the size of the source for a whole shard; 0 for rows of tables.
        first: ordinal of the unit's first sample within its source, used in keys; 0 for a whole shard.
        samples: number of samples, or None if only reading the source tells (tar, but for a part of a shard).
        etag: version of the source when it was planned (modification time and size); a change fails the unit.
        items: for "files": (path relative to `source`, size in bytes) of each file, in order.
        options: reader options that change the samples, such as the text column, as sorted pairs. `FILE_NAME` is the
            name in keys by row number of a file below a named folder, if that is not the file's own.
        retry: the samples of an earlier unit that are retried here; None for a unit of the inputs. The other fields
            describe the source as it is now; `items` of a folder are those of these samples alone.
        size: estimated bytes of its rows in a table; 0 if unknown. No part of the description: only the manifest
            keeps it.
    """

    kind: Word
    source: PathText
    start: Count = 0
    stop: Count = 0
    first: Count = 0
    samples: Count | None = None
    etag: Annotated[str, Meta(max_length=1_000)] = ""
    items: tuple[tuple[str, Count], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    retry: Retry | None = None
    size: int = field(default=0, compare=False)

    def describe(self) -> dict[str, Any]:
        """The unit as JSON-ready values; `from_description` is its inverse."""
        return {
            "kind": self.kind,
            "source": self.source,
            "start": self.start,
            "stop": self.stop,
            "first": self.first,
            "samples": self.samples,
            "etag": self.etag,
            "items": [list(item) for item in self.items],
            "options": [list(pair) for pair in self.options],
            **({} if self.retry is None else {"retry": msgspec.to_builtins(self.retry)}),
        }

    @classmethod
    def from_description(cls, described: dict[str, Any]) -> Unit:
        """The inverse of `describe`; MalformedError for anything else."""
        unit = convert(cls, described, what="unit")
        if unit.describe() != described:
            raise malformed("unit", "it lacks fields, or has others")
        return unit

    @property
    def unit_id(self) -> str:
        """32 hex digits: the content hash of the unit's description."""
        return content_hash(self.describe())

    @property
    def selected(self) -> list[int] | None:
        """Ordinals of the samples that become rows or failures, ascending; None for all from `first_ordinal` on."""
        return self.retry.ordinals if self.retry is not None and self.retry.only and not self.retry.is_rest else None

    @property
    def first_ordinal(self) -> int:
        """Ordinal of the first sample that becomes a row or a failure, where `selected` does not name them."""
        return self.retry.ordinals[0] if self.retry is not None and self.retry.is_rest else 0

    @property
    def expected(self) -> int | None:
        """Number of samples that become rows or failures, or None if only reading the source tells."""
        ordinals = self.selected
        return self.samples if ordinals is None else len(ordinals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Position of a chunk in its text.

    Attributes:
        document: key of the text.
        number: index of the chunk, from 0.
        count: number of its chunks.
        start, end: characters (code points) of the text as it was read: the chunk is `text[start:end]`.
    """

    document: str
    number: int
    count: int
    start: int
    end: int

    @property
    def key(self) -> str:
        """Key of the chunk: the document's key up to the last "#"."""
        return f"{self.document}#{self.number}"


def key_without_chunks(document: str) -> str:
    """Key of the failure of a whole text in a run with chunks; no chunk's key ends in "#"."""
    return f"{document}#"


@dataclass(slots=True, kw_only=True)
class Sample:
    """The smallest item that is counted: one image and/or text with a key, or a chunk of such a text.

    Nobody changes one, but that the read stage drops an image that is prepared. It is not frozen because a frozen one
    takes three times as long to make, and there are billions.

    Attributes:
        ordinal: position within its unit, from 0; (unit_id, ordinal) is the sample's identity. All chunks of a text
            have that of the text.
        key: its name for users.
        image: encoded image, or None; a view keeps the memory of a whole shard.
        text: caption or text, or None.
        metadata: further fields as JSON text of one object, or None.
        error: (code, message) where the reader found that this sample cannot be embedded, such as a duplicate key or
            a text that is not UTF-8; such a sample becomes a failure.
        passage: position of `text` in its document; None for a text that was not cut.
        parts: extensions of the members of a shard that it has, if it lacks an image or a text.
        unread: (code, message) where its metadata, or a caption that is not embedded, could not be read and is lost.
    """

    ordinal: int
    key: str
    image: bytes | memoryview | None = None
    text: str | None = None
    metadata: str | None = None
    error: tuple[str, str] | None = None
    passage: Passage | None = None
    parts: tuple[str, ...] = ()
    unread: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A sample, or a whole unit, that has no row.

    Attributes:
        ordinal: position within the unit, or None for the whole unit.
        key: the sample's key; "" for a whole unit.
        code: stable name of the cause.
        message: one line, at most 1,000 characters.
        attempt: number of attempts, those that killed their worker and earlier retries included.
    """

    ordinal: int | None
    key: str
    code: str
    message: str
    attempt: int = 1
