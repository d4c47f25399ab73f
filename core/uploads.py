"""The way into an output folder that only the writer can reach: files in numbered pieces through the broker.

A laptop announces what it will send, and sends pieces in order. The writer takes them, makes them durable in its
folder, and says how many it has taken; no more than a window of pieces waits in the broker. Announcing and sending are
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
from typing import Any, cast

import redis

from core import protocol
from core.errors import InputError
from core.layout import INPUTS
from core.protocol import UPLOADS, upload_key
from core.units import content_hash

PIECE_BYTES = 1 << 20
"""Bytes of one piece, before compression."""

WINDOW = 64
"""Most pieces that wait in the broker."""

_SAFE = re.compile(rf"run\.json|manifest/\d{{5}}\.parquet|{INPUTS}/[0-9a-f]{{5,16}}(/[^/\0]+)+")
"""What an upload may write. An upload comes over the network, and must not reach anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFile:
    """One file of an upload.

    Attributes:
        path: where it goes, relative to the output folder.
        bytes: its size.
        mtime_ns: its modification time, which is part of its version in units; 0 where nobody cares.
        sha256: hex digest of its content.
    """

    path: str
    bytes: int
    mtime_ns: int
    sha256: str

    @property
    def pieces(self) -> int:
        """Number of pieces; an empty file has none."""
        return -(-self.bytes // PIECE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What a laptop sends: the files of a planned run, `run.json` last.

    Where the output folder holds a run of the same model already, the units that this one lacks are added to it.

    Attributes:
        run: id of the run that they make, unless they are added to another.
        output: absolute path of the output folder on the writer's machine.
        record: the run's record, as it will be announced.
        files: in the order in which they are sent.
        priority: what the run is to have, or None to leave it as it is; no part of what the upload is.
    """

    run: str
    output: str
    record: str
    files: tuple[UploadFile, ...]
    priority: int | None = None

    @property
    def name(self) -> str:
        """What the broker knows it by: a hash of what it is."""
        return content_hash([self.run, self.output, [[file.path, file.sha256] for file in self.files]])[:16]

    def to_json(self) -> str:
        """The upload as JSON text."""
        files = [[file.path, file.bytes, file.mtime_ns, file.sha256] for file in self.files]
        return json.dumps(
            {
                "v": protocol.VERSION,
                "run": self.run,
                "output": self.output,
                "record": self.record,
                "files": files,
                "priority": self.priority,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Upload | None:
        """The upload in `text`; None where another version of embq wrote it.

        Raises InputError where it names a path that no upload may write.
        """
        data = json.loads(text)
        if data.get("v") != protocol.VERSION:
            return None
        files = tuple(
            UploadFile(path=str(path), bytes=int(size), mtime_ns=int(mtime), sha256=str(digest))
            for path, size, mtime, digest in data["files"]
        )
        for file in files:
            if not _SAFE.fullmatch(file.path) or {".", ".."} & set(file.path.split("/")):
                raise InputError(f"an upload may not write {file.path!r}", code="outside_root")
        priority = data.get("priority")
        return cls(
            run=str(data["run"]),
            output=str(data["output"]),
            record=data["record"],
            files=files,
            priority=None if priority is None else int(priority),
        )


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


# --- what both sides do in the broker ---


def announce(client: redis.Redis, upload: Upload) -> None:
    """Say what will be sent; repeating it changes nothing, but for an end that it came to before."""
    if state(client, upload.name).get("end"):
        client.delete(upload_key(upload.name, "state"))
    client.hset(UPLOADS, upload.name, upload.to_json())


def names(client: redis.Redis) -> list[str]:
    """The uploads that have not ended."""
    return [name.decode() for name in cast("list[bytes]", client.hkeys(UPLOADS))]


def announced(client: redis.Redis, name: str) -> bytes:
    """What was announced under a name; b"" where that has ended."""
    return cast("bytes | None", client.hget(UPLOADS, name)) or b""


def send(client: redis.Redis, name: str, number: int, data: bytes) -> None:
    """Write one piece under its number."""
    client.hset(upload_key(name, "pieces"), str(number), zlib.compress(data, 6))


def piece(client: redis.Redis, name: str, number: int) -> bytes | None:
    """One piece, or None where it has not come yet; InputError where it cannot be one."""
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
    """Whether the broker knows of an upload that has not ended."""
    return bool(client.hexists(UPLOADS, name))


def state(client: redis.Redis, name: str) -> dict[str, Any]:
    """What the writer says: `taken` pieces, perhaps `why` it waits, and `end` once there is one (see `end_of`)."""
    raw = cast("dict[bytes, bytes]", client.hgetall(upload_key(name, "state")))
    said = {key.decode(): value.decode() for key, value in raw.items()}
    return {**said, "taken": int(said.get("taken", "0"))}


def say_taken(client: redis.Redis, name: str, taken: int) -> None:
    """Say that the first `taken` pieces are durable, and drop them; also those that were sent once more."""
    key = upload_key(name, "pieces")
    with client.pipeline() as pipe:
        pipe.hset(upload_key(name, "state"), "taken", str(taken))
        numbers = cast("list[bytes]", client.hkeys(key))
        if old := [number for number in numbers if int(number) < taken]:
            pipe.hdel(key, *old)
        pipe.execute()


def say_sent(client: redis.Redis, name: str) -> None:
    """Say that all pieces were written."""
    client.hset(upload_key(name, "state"), "sent", "1")


def say_why(client: redis.Redis, name: str, why: str) -> None:
    """Say what an upload waits for; "" where it goes on."""
    client.hset(upload_key(name, "state"), "why", why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What came of an upload that is whole.

    Attributes:
        units: of the run now.
        samples: of what was added, or of a new run; None where only reading tells.
        added: units that were added; None where the run is new.
    """

    units: int
    samples: int | None
    added: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What became of an upload.

    Attributes:
        end: "accepted" or "refused".
        code, why: of a refusal.
        run: the run that has its units now; "" where it was refused.
        added: units that were added to a run that was there before; None where the run is new.
        units: of the run, with all that was added.
        samples: of what was added, or of the run where it is new; None where only reading tells.
    """

    end: str
    code: str = ""
    why: str = ""
    run: str = ""
    added: int | None = None
    units: int = 0
    samples: int | None = None


def end_of(client: redis.Redis, name: str) -> End | None:
    """How an upload ended, for a day; None while it has not. `name` may also be the id of the run that was sent."""
    said = state(client, name)
    if "end" not in said:
        return None
    added, units, samples = (int(said[part]) if said.get(part) else None for part in ("added", "units", "samples"))
    return End(
        end=said["end"],
        code=said.get("code", ""),
        why=said.get("why", ""),
        run=said.get("run", ""),
        added=added,
        units=units or 0,
        samples=samples,
    )


def say_end(client: redis.Redis, name: str, run: str, end: End) -> None:
    """Say what became of an upload, also to who knows only the id of the run that was sent; forget the rest of it."""
    fields: dict[Any, Any] = {part: "" if value is None else str(value) for part, value in asdict(end).items()}
    with client.pipeline() as pipe:
        for known_as in (name, run):
            pipe.hset(upload_key(known_as, "state"), mapping=fields)
            pipe.expire(upload_key(known_as, "state"), 86_400)
        pipe.hdel(UPLOADS, name)
        pipe.unlink(upload_key(name, "pieces"))
        pipe.execute()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """An upload that has not ended.

    Attributes:
        bytes: taken by a writer and on its disk; `bytes_total` of all.
        sent: whether the broker has had all of it: the sender may be gone.
        why: what it waits for, as the writer says; "".
    """

    name: str
    upload: Upload
    bytes: int
    bytes_total: int
    sent: bool
    why: str


def under_way(client: redis.Redis) -> list[UnderWay]:
    """The uploads that have not ended; those of other versions, and what is none, are left out."""
    found = []
    for name in names(client):
        try:
            upload = Upload.from_json(announced(client, name))
        except (InputError, ValueError, KeyError, TypeError):
            continue
        if upload is not None:
            said, pieces = state(client, name), Pieces(upload.files)
            found.append(
                UnderWay(
                    name=name,
                    upload=upload,
                    bytes=pieces.bytes_before(said["taken"]),
                    bytes_total=pieces.bytes_before(pieces.count),
                    sent="sent" in said,
                    why=said.get("why", ""),
                )
            )
    return found


def drop_pieces(client: redis.Redis, name: str) -> None:
    """Remove what was sent to a writer that had ended the upload meanwhile."""
    client.unlink(upload_key(name, "pieces"))


def is_attended(client: redis.Redis, name: str) -> bool:
    """Whether a writer has looked at it, and said how much it has."""
    return bool(client.hexists(upload_key(name, "state"), "taken"))


def waits(client: redis.Redis, name: str, number: int) -> bool:
    """Whether a piece is in the broker."""
    return bool(client.hexists(upload_key(name, "pieces"), str(number)))
