"""Checkpoint of a commit log: its state after some record, so that opening a long log reads only the later records.

A checkpoint is never the truth: one that is damaged, or does not fit the record it names, is ignored, and the log is
read from its beginning. `embq verify` never reads it.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any

import msgspec

from embq.core import wire
from embq.core.errors import MalformedError, OutputError
from embq.core.run.commit_log import LogState
from embq.core.run.commits import MOST_BYTES as RECORD_BYTES
from embq.core.run.commits import Commit
from embq.core.run.layout import Layout
from embq.core.storage.beneath import read_bytes
from embq.core.storage.durable import drop
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place
from embq.core.units import canonical_json
from embq.core.wire import Count, ShortText, UnitCount, Word

EVERY = 1_000
"""Records between two checkpoints: reading them takes about a quarter of a second."""

MOST_BYTES = 1 << 26
"""Limit of the file; the largest possible bitmap of units, as text, is a quarter of it."""


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the file: the fields of `LogState`, and its bitmap compressed."""

    n: Count
    epoch: Count
    next_id: Count
    rows: Count
    failures: Count
    quarantined: Count
    truncated: Count
    tokens: Count
    retries: Count
    count: Count
    units: UnitCount
    ended: bool
    prev: Word
    fingerprint: ShortText
    widths: dict[str, Count]
    done: str


def save(layout: Layout, state: LogState) -> None:
    """Write `state`, in place of an earlier one. Not synced: a torn one does not match its hash."""
    body: dict[str, Any] = {
        **{name: getattr(state, name) for name in _Kept.__struct_fields__},
        "done": base64.b64encode(zlib.compress(bytes(state.done))).decode(),
    }
    text = canonical_json({**body, "sha256": hashlib.sha256(canonical_json(body).encode()).hexdigest()})
    path, temporary = _path(layout), layout.temporary / f"checkpoint-{state.n:08d}.json"
    try:
        if isinstance(path, ObjectPath):
            path.replace(f"{text}\n".encode())
            return
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.rename(path)
    except OSError:  # the next commit reports the cause; nothing depends on this file
        drop(temporary)


def load(layout: Layout, units: int) -> LogState:
    """The last checkpoint, if it fits the record it names; else the state before the first record."""
    try:
        name = f"{layout.writer.name}/{_path(layout).name}"
        data = read_bytes(layout.root, name, most_bytes=MOST_BYTES)
        body = wire.read(dict[str, Any], data, what="checkpoint", most_bytes=MOST_BYTES)
        digest = body.pop("sha256", None)
        if hashlib.sha256(canonical_json(body).encode()).hexdigest() != digest:
            return LogState(units=units)
        stored = wire.convert(_Kept, body, what="checkpoint")
        name = f"{stored.n:08d}.json"
        record = read_bytes(layout.root, f"{layout.commits.name}/{name}", most_bytes=RECORD_BYTES)
        bitmap = zlib.decompressobj().decompress(base64.b64decode(stored.done), (stored.units + 7) // 8 + 1)
        if Commit.parse(record, name).sha256 != stored.prev or len(bitmap) != (stored.units + 7) // 8:
            return LogState(units=units)
        state = LogState(**{**msgspec.structs.asdict(stored), "done": bytearray(bitmap)})
    except (OSError, OutputError, MalformedError, ValueError, zlib.error):
        return LogState(units=units)
    state.grow(units)
    return state


def _path(layout: Layout) -> Place:
    return layout.writer / "checkpoint.json"
