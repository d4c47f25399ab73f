"""The way into an output folder that only the writer can reach: files in numbered pieces through the broker.

A laptop announces what it will send, and sends pieces in order. The writer takes them, makes them durable in its
folder, and says how many it has taken; no more than a window of pieces waits in the broker. Announcing and sending are
repeatable: the name of an upload follows from its content, and a piece is written under its number. So a laptop that
was cut off begins again where the writer stands.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import Any, cast

import redis

from core.errors import InputError
from core.protocol import UPLOADS, upload_key
from core.upload_files import PIECE_BYTES, Pieces, Upload

WINDOW = 64
"""Most pieces that wait in the broker."""


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
