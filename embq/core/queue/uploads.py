"""Uploads: files sent through the broker, in numbered pieces, to an output folder that only the writer can reach.

A laptop announces an upload, and sends its pieces in order. The writer takes them, makes them durable in its
folder, and records their number; no more than a window of pieces waits in the broker. Announcing and sending are
repeatable: the name of an upload follows from its content, and a piece is written under its number. So a laptop that
was cut off begins again where the writer stands.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Annotated, Any, cast

import msgspec
import redis
from msgspec import Meta

from embq.core import wire
from embq.core.errors import InputError, MalformedError
from embq.core.queue import keys
from embq.core.queue.keys import UPLOADS, upload_key
from embq.core.run.control import LEAST_PRIORITY, MOST_PRIORITY
from embq.core.run.layout import INPUTS
from embq.core.units import content_hash
from embq.core.wire import MOST_BYTES, Count, LongText, PathText, RunId, Sha256, UploadName, Word

PIECE_BYTES = 1 << 20
"""Bytes of one piece, before compression."""

MOST_UPLOAD_BYTES = 64 << 20
"""Bytes of what is announced of an upload: 300,000 files."""

ANNOUNCED_BYTES = 8 << 20
"""Of them in one field of the hash; the rest is in NAME.1, NAME.2, ...: a server takes no value of more than 16 MB."""

_SAFE = re.compile(rf"run\.json|manifest/\d{{5}}\.parquet|{INPUTS}/[0-9a-f]{{5,16}}(/[^/\0]+)+")
"""Paths that an upload may write; it comes over the network."""


class UploadFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One file of an upload; in JSON an array.

    Attributes:
        path: where it goes, relative to the output folder.
        bytes: its size.
        mtime_ns: its modification time, which is part of its version in units; 0 if it does not matter.
        sha256: hex digest of its content.
    """

    path: PathText
    bytes: Count
    mtime_ns: Annotated[int, Meta(ge=-(2**62), le=2**62)]
    sha256: Sha256

    @property
    def pieces(self) -> int:
        """Number of pieces; an empty file has none."""
        return -(-self.bytes // PIECE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An upload: the files of a planned run, `run.json` last.

    Where the output folder holds a run of the same model already, the units that this one lacks are added to it.

    Attributes:
        run: id of the run that they make, unless they are added to an existing one.
        output: absolute path of the output folder on the writer's machine.
        record: the run's record, as it will be announced.
        files: in the order in which they are sent.
        priority: of the run, or None to leave it unchanged; no part of the upload's name.
    """

    run: RunId
    output: PathText
    record: Annotated[str, Meta(max_length=MOST_BYTES)]
    files: tuple[UploadFile, ...]
    priority: Annotated[int, Meta(ge=LEAST_PRIORITY, le=MOST_PRIORITY)] | None = None

    @property
    def name(self) -> str:
        """Its name in the broker: a hash of its content."""
        return content_hash([self.run, self.output, [[file.path, file.sha256] for file in self.files]])[:16]

    def to_json(self) -> str:
        """The upload as JSON text."""
        return json.dumps({"v": keys.VERSION, **msgspec.to_builtins(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Upload | None:
        """The upload in `text`; None if another version of embq wrote it.

        Raises MalformedError, and InputError if it names a path that no upload may write.
        """
        fields = wire.read_version(text, keys.VERSION, what="upload", most_bytes=MOST_UPLOAD_BYTES)
        if fields is None:
            return None
        upload = wire.convert(cls, fields, what="upload")
        paths = {file.path for file in upload.files}
        folders = {str(above) for path in paths for above in PurePosixPath(path).parents}
        for file in upload.files:
            if not _SAFE.fullmatch(file.path) or {".", ".."} & set(file.path.split("/")) or file.path in folders:
                raise InputError(f"an upload may not write {file.path!r}", code="outside_root")
        if len(paths) != len(upload.files):
            raise InputError("an upload may not write a file twice", code="outside_root")
        return upload


class Pieces:
    """The pieces of an upload by number, in the order of its files.

    Attributes:
        count: number of all pieces.
        starts: the number of the first piece of each file.
    """

    def __init__(self, files: Sequence[UploadFile]) -> None:
        self.starts = list(accumulate((file.pieces for file in files), initial=0))
        self.count = self.starts.pop()
        self._bytes = list(accumulate((file.bytes for file in files), initial=0))

    def place(self, number: int) -> tuple[int, int]:
        """(index of the file, offset in it) of a piece."""
        # Of files that begin with the same piece all but the last are empty.
        index = bisect_right(self.starts, number) - 1
        return index, (number - self.starts[index]) * PIECE_BYTES

    def bytes_before(self, number: int) -> int:
        """Bytes of all pieces before `number`."""
        if number >= self.count:
            return self._bytes[-1]
        index, offset = self.place(number)
        return self._bytes[index] + offset


WINDOW = 64
"""Most pieces that wait in the broker."""

_NUMBER = re.compile(rb"[0-9]{1,12}")


def announce(client: redis.Redis, upload: Upload) -> None:
    """Announce an upload; repeating it changes nothing, but resets an earlier end."""
    if state(client, upload.name).end:
        client.delete(upload_key(upload.name, "state"))
    text = upload.to_json().encode()
    first, *rest = (text[start : start + ANNOUNCED_BYTES] for start in range(0, len(text), ANNOUNCED_BYTES))
    for number, part in enumerate(rest, 1):
        client.hset(UPLOADS, f"{upload.name}.{number}", part)
    client.hset(UPLOADS, upload.name, first)  # last: from now on it is announced


def names(client: redis.Redis) -> list[str]:
    """The uploads that have not ended; what is no name of one is skipped."""
    upload_names = []
    for raw in cast("list[bytes]", client.hkeys(UPLOADS)):
        if re.fullmatch(rb"[0-9a-f]{16}\.[1-9]", raw):
            continue  # the rest of an announcement
        try:
            text = wire.read_text(raw, what="name of an upload")
            upload_names.append(wire.convert(UploadName, text, what="name of an upload"))
        except MalformedError as error:
            wire.skipped("name of an upload", raw, error)
    return upload_names


def announced(client: redis.Redis, name: str) -> Upload | None:
    """The upload of a name; None if it has ended, and for one of another version.

    Raises InputError if it is malformed, or has another name.
    """
    part = text = cast("bytes | None", client.hget(UPLOADS, name))
    for number in range(1, MOST_UPLOAD_BYTES // ANNOUNCED_BYTES + 1):
        if text is None or part is None or len(part) < ANNOUNCED_BYTES:
            break
        part = cast("bytes | None", client.hget(UPLOADS, f"{name}.{number}"))
        text += part or b""
    upload = None if text is None else Upload.from_json(text)
    if upload is not None and upload.name != name:
        raise InputError(f"upload {name} is not what its name says, {upload.name}", code="bad_upload")
    return upload


def send(client: redis.Redis, name: str, number: int, data: bytes) -> None:
    """Write one piece under its number."""
    client.hset(upload_key(name, "pieces"), str(number), zlib.compress(data, 6))


def piece(client: redis.Redis, name: str, number: int) -> bytes | None:
    """One piece, or None if it has not come yet; InputError if it cannot be one."""
    packed = cast("bytes | None", client.hget(upload_key(name, "pieces"), str(number)))
    if packed is None:
        return None
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, PIECE_BYTES + 1)
    except zlib.error as error:
        raise InputError(f"piece {number} of upload {name} is damaged: {error}", code="bad_upload") from error
    if len(data) > PIECE_BYTES or not unpacker.eof:
        raise InputError(f"piece {number} of upload {name} is not whole", code="bad_upload")
    return data


def is_announced(client: redis.Redis, name: str) -> bool:
    """True if the broker knows of an upload that has not ended."""
    return bool(client.hexists(UPLOADS, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOutcome:
    """The outcome of an upload.

    Attributes:
        end: "accepted" or "refused"; "" while it has not ended.
        code, why: of a refusal; `why` before the end is the reason for its waiting, "" if it goes on.
        run: the run that has its units now; "" if it was refused.
        added: units that were added to an existing run; None if the run is new.
        units: of the run, with those added.
        samples: of the added units, or of a new run; None if only reading tells.
    """

    end: Word = ""
    code: Word = ""
    why: LongText = ""
    run: Annotated[str, Meta(pattern=r"\A([0-9a-f]{16})?\Z")] = ""
    added: Count | None = None
    units: Count = 0
    samples: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class State(UploadOutcome):
    """State of an upload, as its writer and its sender set it.

    Attributes:
        taken: pieces that are durable.
        sent: "1" once the sender has written all pieces.
    """

    taken: Count = 0
    sent: Word = ""


_OPTIONAL = (b"added", b"samples")
"""Fields whose None is written as an empty text."""


def state(client: redis.Redis, name: str) -> State:
    """The state of an upload; an empty one if it is malformed."""
    raw = cast("dict[bytes, bytes]", client.hgetall(upload_key(name, "state")))
    try:
        given = {part: value for part, value in raw.items() if value or part not in _OPTIONAL}
        return wire.read_hash(State, given, what="state of an upload")
    except MalformedError as error:
        wire.skipped("state of an upload", name, error)
        return State()


def confirm_pieces(client: redis.Redis, name: str, taken: int) -> None:
    """Record that the first `taken` pieces are durable, and drop them, those that were sent again included."""
    key = upload_key(name, "pieces")
    with client.pipeline() as pipe:
        pipe.hset(upload_key(name, "state"), "taken", str(taken))
        numbers = cast("list[bytes]", client.hkeys(key))
        if old := [number for number in numbers if not _NUMBER.fullmatch(number) or int(number) < taken]:
            pipe.hdel(key, *cast("list[str]", old))
        pipe.execute()


def mark_sent(client: redis.Redis, name: str) -> None:
    """Record that all pieces were sent."""
    client.hset(upload_key(name, "state"), "sent", "1")


def set_reason(client: redis.Redis, name: str, why: str) -> None:
    """Record the reason for an upload's waiting; "" if it goes on."""
    client.hset(upload_key(name, "state"), "why", why)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedUnits:
    """The units that a complete upload has added.

    Attributes:
        units: of the run now.
        samples: of the added units, or of a new run; None if only reading tells.
        added: units that were added; None if the run is new.
    """

    units: int
    samples: int | None
    added: int | None


def outcome_of(client: redis.Redis, name: str) -> UploadOutcome | None:
    """The outcome of an upload, kept for a day; None before its end. `name` may also be the id of the run."""
    last = state(client, name)
    return last if last.end else None


def finish(client: redis.Redis, name: str, run: str, end: UploadOutcome) -> None:
    """Record the outcome of an upload, also under the id of the run that was sent; remove the rest of it."""
    fields: dict[Any, Any] = {part: "" if value is None else str(value) for part, value in asdict(end).items()}
    with client.pipeline() as pipe:
        for known_as in (name, run):
            pipe.hset(upload_key(known_as, "state"), mapping=fields)
            pipe.expire(upload_key(known_as, "state"), 86_400)
        pipe.hdel(UPLOADS, name, *(f"{name}.{i}" for i in range(1, MOST_UPLOAD_BYTES // ANNOUNCED_BYTES + 1)))
        pipe.unlink(upload_key(name, "pieces"))
        pipe.execute()


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadProgress:
    """Progress of an upload that has not ended.

    Attributes:
        bytes: on the writer's disk, of `bytes_total`.
        sent: whether all pieces were sent, so that the sender may end.
        why: the reason for its waiting; "".
    """

    name: str
    upload: Upload
    bytes: int
    bytes_total: int
    sent: bool
    why: str


def in_progress(client: redis.Redis) -> list[UploadProgress]:
    """The uploads that have not ended; those of other versions, and malformed ones, are left out."""
    uploads = []
    for name in names(client):
        try:
            upload = announced(client, name)
        except InputError as error:
            wire.skipped("upload", name, error)
            continue
        if upload is not None:
            now, pieces = state(client, name), Pieces(upload.files)
            uploads.append(
                UploadProgress(
                    name=name,
                    upload=upload,
                    bytes=pieces.bytes_before(now.taken),
                    bytes_total=pieces.bytes_before(pieces.count),
                    sent=bool(now.sent),
                    why=now.why,
                )
            )
    return uploads


def drop_pieces(client: redis.Redis, name: str) -> None:
    """Remove pieces that were sent after the writer had ended the upload."""
    client.unlink(upload_key(name, "pieces"))


def has_writer(client: redis.Redis, name: str) -> bool:
    """True if a writer has taken up the upload."""
    return bool(client.hexists(upload_key(name, "state"), "taken"))


def has_piece(client: redis.Redis, name: str, number: int) -> bool:
    """True if a piece is in the broker."""
    return bool(client.hexists(upload_key(name, "pieces"), str(number)))
