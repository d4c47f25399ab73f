"""The state of a commit log after some record, kept so that opening a long log reads only the records behind it.

It is a shortcut and no truth: one that is damaged, or does not fit the record it names, is passed over, and the log is
read from its beginning. `embq verify` never looks at it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any

from core.commit_log import LogState
from core.commits import Commit
from core.durable import drop
from core.errors import OutputError
from core.layout import Layout
from core.objects import ObjectPath
from core.places import Place
from core.units import canonical_json

EVERY = 1_000
"""Records between two checkpoints: reading so many takes about a quarter of a second."""

_COUNTS = ("n", "epoch", "next_id", "rows", "failures", "quarantined", "truncated", "tokens", "retries", "count")


def save(layout: Layout, state: LogState) -> None:
    """Keep `state`, in place of an earlier one. Not synced: a torn one does not match its hash."""
    body: dict[str, Any] = {
        **{name: getattr(state, name) for name in _COUNTS},
        "units": state.units,
        "ended": state.ended,
        "prev": state.prev,
        "fingerprint": state.fingerprint,
        "widths": state.widths,
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
    except OSError:  # the next commit will say what is wrong; nothing depends on this file
        drop(temporary)


def load(layout: Layout, units: int) -> LogState:
    """The state that was kept last, where it fits the record it names; else the state before the first record."""
    try:
        body = json.loads(_path(layout).read_bytes())
        digest = body.pop("sha256")
        if hashlib.sha256(canonical_json(body).encode()).hexdigest() != digest:
            return LogState(units=units)
        name = f"{body['n']:08d}.json"
        if Commit.parse((layout.commits / name).read_bytes(), name).sha256 != body["prev"]:
            return LogState(units=units)
        state = LogState(
            units=body["units"],
            prev=body["prev"],
            fingerprint=body["fingerprint"],
            ended=body["ended"],
            widths=body["widths"],
            done=bytearray(zlib.decompress(base64.b64decode(body["done"]))),
            **{name: body[name] for name in _COUNTS},
        )
    except (OSError, OutputError, ValueError, KeyError, TypeError, zlib.error):
        return LogState(units=units)
    state.grow(units)
    return state


def _path(layout: Layout) -> Place:
    return layout.writer / "checkpoint.json"
