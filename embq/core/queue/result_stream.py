"""Result stream of a run: results of its workers wait here for its writer, the one consumer.

Workers add results with `embq.core.queue.ledger.Ledger.publish`; `Ledger.commit` removes those that are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, cast

import msgspec
import redis
from msgspec import Meta
from redis.exceptions import ResponseError

from embq.core import wire
from embq.core.broker.bounded import Oversized
from embq.core.queue.keys import CONSUMER, GROUP, run_key
from embq.core.wire import UnitNumber

T = TypeVar("T", bound=msgspec.Struct)

LIMIT_BYTES = 512 * 1024 * 1024
"""Most bytes of results waiting for the writer, in the broker and in staging files together. Parts that workers write
are not counted: the output will hold them anyway."""

RESULT_SUFFIX, PART_SUFFIX = ".arrow", ".part"
"""Of the staging files: of an encoded result, and of a unit's rows as a part of the output in the run's format."""

LIMIT_ENTRIES = 20_000
"""Most results waiting for the writer."""


class PublishVerdict(Enum):
    """Answer of the script `publish`, or of a broker that does not run it: whether a result was accepted."""

    ACCEPTED = 1
    SUPERSEDED = 2  # the result of another attempt stands
    LOST = 0  # the lease is lost
    NO_ROOM = -1
    NO_MEMORY = -2  # of the broker for this result

    @property
    def is_full(self) -> bool:
        """Whether the result may be accepted later."""
        return self in (PublishVerdict.NO_ROOM, PublishVerdict.NO_MEMORY)


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of the result stream: its id and its fields (empty where the entry was deleted)."""

    id: str
    fields: Mapping[str, bytes]

    @property
    def is_whole(self) -> bool:
        """Whether all of it was kept; see `embq.core.broker.bounded`."""
        return not any(isinstance(value, Oversized) for value in self.fields.values())

    @property
    def receipt(self) -> str:
        """Its id, and what it counts for in the stream's limits, which is subtracted when it is taken off."""
        counted = (self.fields.get(name, b"") for name in ("bytes", "tokens"))
        return " ".join([self.id, *(text.decode() if text.isdigit() and len(text) < 16 else "0" for text in counted)])


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every entry of the result stream: unit and lease.

    Attributes:
        u: unit index.
        token: the lease under which it was published; `QUARANTINE` for what the broker's scripts publish.
    """

    u: UnitNumber
    token: Annotated[str, Meta(pattern=r"\A[!-~]{1,400}\Z")]

    @property
    def worker(self) -> str:
        """Name of the worker, as the token has it; not verified."""
        return self.token.partition(":")[2].rpartition(":")[0]


QUARANTINE = "quarantine"
"""Token of the failures that scripts publish for units that they give up."""

MOST_TEXT_BYTES = 8_192
"""Limit of the fields of an entry that hold no rows."""


DATA, PIECE_BYTES = "data", 8 << 20
"""Field of the rows of an entry; of more bytes each piece has a field of its own: data, data1, ..."""


def in_pieces(fields: Mapping[str, str | bytes | int]) -> Iterator[tuple[str, str | bytes | int]]:
    """The fields of an entry as they are sent; see `PIECE_BYTES`."""
    for name, value in fields.items():
        if name != DATA or not isinstance(value, bytes):
            yield name, value
            continue
        for start in range(0, len(value), PIECE_BYTES) or (0,):
            yield f"{name}{start // PIECE_BYTES or ''}", value[start : start + PIECE_BYTES]


def _joined(sent: Mapping[bytes, bytes]) -> Mapping[str, bytes]:
    """The fields of an entry as they were before `in_pieces`."""
    fields = {name.decode(errors="replace"): value for name, value in sent.items()}
    pieces = [fields.pop(name) for name in list(fields) if name.startswith(DATA)]
    if len(pieces) > 1:
        is_whole = not any(isinstance(piece, Oversized) for piece in pieces)
        return {**fields, DATA: b"".join(pieces) if is_whole else Oversized(sum(map(len, pieces)))}
    return {**fields, DATA: pieces[0]} if pieces else fields


def read_fields(form: type[T], entry: Entry) -> T:
    """The fields of an entry as a form; MalformedError if they do not fit."""
    raw = {name.encode(): entry.fields[name] for name in form.__struct_fields__ if name in entry.fields}
    if sum(map(len, raw.values())) > MOST_TEXT_BYTES:
        raise wire.malformed("result", f"its fields have more than {MOST_TEXT_BYTES} bytes")
    return wire.read_hash(form, raw, what="result")


class ResultStream:
    """The results of one run that are published and not committed. Safe to share between threads.

    Args:
        on_lost: called where the stream or its consumer group was lost; what was published is to be looked for.
    """

    def __init__(self, client: redis.Redis, run: str, *, on_lost: Callable[[], object] = lambda: None) -> None:
        self._on_lost = on_lost
        self._client = client
        self._key = run_key(run, "res")
        self._meta = run_key(run, "meta")

    def make_group(self) -> None:
        """Create the stream's consumer group if it is missing."""
        try:
            self._client.xgroup_create(self._key, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        else:
            self._on_lost()

    def read(self, after: str, *, count: int, block_ms: int | None) -> list[Entry]:
        """Entries for the one consumer.

        Args:
            after: ">" for new entries, or a stream id: entries delivered before, not acknowledged, after this id.
            count: most entries to give.
            block_ms: how long to wait for a new one; None does not wait.
        """
        try:
            answer = cast(
                "list[Any] | dict[Any, Any] | None",
                self._client.xreadgroup(GROUP, CONSUMER, {self._key: after}, count=count, block=block_ms),
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self.make_group()  # the stream was lost; what is published from now on must be seen
            return []
        if not answer:
            return []
        pairs = answer.items() if isinstance(answer, dict) else answer
        ((_, messages),) = pairs
        if messages and isinstance(messages[0], list) and messages[0] and isinstance(messages[0][0], (list, tuple)):
            messages = messages[0]
        return [Entry(id_.decode(), _joined(fields or {})) for id_, fields in messages]

    def is_overfull(self) -> bool:
        """True if it holds more bytes than its limit, which honest workers keep to."""
        return int(self._client.memory_usage(self._key, samples=0) or 0) > LIMIT_BYTES

    def has_room(self) -> bool:
        """True if it is below its limits."""
        names = ["bytes", "limit_bytes", "limit_entries"]
        waiting, most_bytes, most_entries = cast("list[bytes | None]", self._client.hmget(self._meta, names))
        entries = self._client.xlen(self._key)
        if most_bytes is None or most_entries is None or not entries:
            return True
        if not all((number or b"0").isdigit() for number in (waiting, most_bytes, most_entries)):
            return True  # the writer corrects them
        return int(waiting or 0) < int(most_bytes) and entries < int(most_entries)

    def unacknowledged(self) -> int:
        """Entries that were delivered to the one consumer and are not acknowledged."""
        try:
            pending = self._client.xpending(self._key, GROUP)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return 0
        return int(pending["pending"])
