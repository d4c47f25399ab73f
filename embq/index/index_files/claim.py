"""Claim on an index in a bucket, in place of the lock of a folder.

```
INDEX/_lock/000007   the claim: who holds it. Written again every BEAT_S: its time, by the store's clock, is that of the
                     last sign of life
```

Of several processes that create the next number, one succeeds. It holds the index once no claim before it has given a
sign of life for STALE_S, or the process of that claim, on this machine, has ended. A process that was taken for dead
and goes on does no harm: units count once, versions are numbered by conditional create, and it checks its claim before
it removes anything.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from embq.core import wire
from embq.core.errors import EmbqError, TryLaterError
from embq.core.storage.durable import drop
from embq.core.storage.objects import ObjectPath, probe

BEAT_S = 15.0
STALE_S = 60.0
MAX_NUMBER = 10**9
"""Claims are numbered up, one a process."""
_MOST_BYTES = 1_000


@contextmanager
def claimed(index: ObjectPath, name: str) -> Iterator[Callable[[], None]]:
    """Hold the claim `index / name` for the length of the block; returns a check that it is still held.

    Raises TryLaterError, also by the check, where another process holds it; ConfigError if the store lets one name
    be created twice; and what the store refuses.
    """
    folder = index / name
    probe(folder)
    data = json.dumps({"host": _host(), "pid": os.getpid(), "nonce": os.urandom(8).hex()}).encode()
    mine = _created(index, folder, data)
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(mine, data, stop), daemon=True)
    try:
        _acquire(index, folder, mine)
        beat.start()
        yield lambda: _check(index, mine)
    finally:
        stop.set()
        if beat.is_alive():
            beat.join()
        drop(mine)


def _created(index: ObjectPath, folder: ObjectPath, data: bytes) -> ObjectPath:
    numbers = [number for path in folder.iterdir() if (number := _number(path)) is not None]
    mine = folder / f"{max(numbers, default=0) + 1:06d}"
    try:
        mine.create(data)
    except FileExistsError:
        raise _busy(index, "it began at this moment") from None
    return mine


def _number(path: ObjectPath) -> int | None:
    """The number of a claim; None for another object, or one of a number after which there is none for us."""
    number = wire.decimal(path.name)
    return number if number is not None and number < MAX_NUMBER else None


def _acquire(index: ObjectPath, folder: ObjectPath, mine: ObjectPath) -> None:
    """Remove the claims before `mine`; TryLaterError if one of them, or a later one, is alive."""
    times = {path: status.st_mtime for path, status in folder.listing()}
    silent = {path: times.get(mine, 0.0) - at for path, at in times.items() if path != mine}
    for path, silent_s in silent.items():
        if (number := _number(path)) is None:
            continue
        if number > int(mine.name):
            raise _busy(index, "it began at this moment")
        holder = _holder(path)
        if silent_s < STALE_S and holder is not None and not _has_ended(holder):
            raise _busy(
                index, f"process {holder['pid']} of {holder['host']}, last heard of {max(0, round(silent_s))} s ago"
            )
    for path, silent_s in silent.items():
        if _number(path) is not None or silent_s >= STALE_S:  # or of a probe, which another process may be at
            drop(path)


def _holder(path: ObjectPath) -> dict[str, Any] | None:
    """Content of a claim; None if it is gone, or none of ours."""
    try:
        data = bytes(path.call(lambda store, key: store.cat_file(key, start=0, end=_MOST_BYTES + 1)))
        holder = wire.read(dict[str, Any], data, what=str(path), most_bytes=_MOST_BYTES)
    except (FileNotFoundError, wire.MalformedError):
        return None
    return holder if isinstance(holder.get("pid"), int) and isinstance(holder.get("host"), str) else None


def _host() -> str:
    """Name of this machine, with that of its processes where a container has its own."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _has_ended(holder: dict[str, Any]) -> bool:
    if holder["host"] != _host():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _beat(mine: ObjectPath, data: bytes, stop: threading.Event) -> None:
    while not stop.wait(BEAT_S):
        with suppress(OSError, EmbqError):  # a store that is away is asked again
            if not mine.exists():
                return  # taken over
            mine.replace(data)


def _check(index: ObjectPath, mine: ObjectPath) -> None:
    if not mine.exists():
        raise _busy(index, "this one gave no sign of life for too long, and was taken for dead")


def _busy(index: ObjectPath, who: str) -> TryLaterError:
    return TryLaterError(
        f"another embq process is at work on the index {index} ({who})",
        next_step=f"wait for it, or stop it; {STALE_S:.0f} s after its last sign of life the index is free",
    )
