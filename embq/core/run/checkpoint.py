"""Checkpoint of a commit log: its state after some record, so that opening a long log reads only the later records.

A checkpoint is never the truth: one that is damaged, or does not fit the record it names, is ignored, and the log is
read from its beginning. `embq verify` never reads it.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import msgspec

from embq.core import wire
from embq.core.errors import MalformedError, OutputError
from embq.core.run.commit_log import CommitLog, LogState
from embq.core.run.commits import MOST_BYTES as RECORD_BYTES
from embq.core.run.commits import Commit, seal_of
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.storage.beneath import read_bytes
from embq.core.storage.durable import overwrite
from embq.core.storage.paths import Place
from embq.core.units import canonical_json, sealed

EVERY = 1_000
EVERY_UNITS = 20_000
"""Records, or committed units, between two checkpoints, whichever comes first: reading them takes about a quarter of a
second."""

MOST_SAVED = 250
"""Most checkpoints that a run gets because of its units: each has the bitmap of all of them."""

MOST_BYTES = 1 << 26
"""Limit of the file; the largest possible bitmap of units, as text, is a quarter of it."""


def is_due(state: LogState, added: int) -> bool:
    """True if a checkpoint is due after a record that added `added` units to `state`."""
    step = max(EVERY_UNITS, state.units // MOST_SAVED)
    return state.n % EVERY == 0 or (state.count - added) // step < state.count // step


def save(layout: Layout, state: LogState) -> None:
    """Write `state`, in place of an earlier one, if that is possible; an error of the folder or store is ignored."""
    body = msgspec.to_builtins(replace(state, done=bytearray(zlib.compress(state.done))))
    temporary = layout.temporary / f"checkpoint-{state.n:08d}.json"
    with suppress(OSError, OutputError):  # the next commit reports the cause; nothing depends on this file
        overwrite(_path(layout), f"{canonical_json(sealed(body))}\n".encode(), temporary=temporary)


def load(layout: Layout, units: int) -> LogState:
    """The last checkpoint, if it fits the record it names; else the state before the first record."""
    try:
        name = f"{layout.writer.name}/{_path(layout).name}"
        data = read_bytes(layout.root, name, most_bytes=MOST_BYTES)
        body = wire.read(dict[str, Any], data, what="checkpoint", most_bytes=MOST_BYTES)
        # A field that an earlier version did not keep would be taken for 0.
        if sealed(body) != body or body.keys() - {"sha256"} != {field.name for field in fields(LogState)}:
            return LogState(units=units)
        state = wire.convert(LogState, body, what="checkpoint")
        name = f"{state.n:08d}.json"
        record = read_bytes(layout.root, f"{layout.commits.name}/{name}", most_bytes=RECORD_BYTES)
        size = (state.units + 7) // 8
        state.done = bytearray(zlib.decompressobj().decompress(state.done, size + 1))
        if (seal_of(record) or Commit.parse(record, name).sha256) != state.prev or len(state.done) != size:
            return LogState(units=units)
    except (OSError, OutputError, MalformedError, ValueError, zlib.error):
        return LogState(units=units)
    state.grow(units)
    return state


def current(layout: Layout, units: int) -> LogState:
    """The state after the last record of the log, read from the last checkpoint on.

    Raises OutputError if a record since then is damaged, or missing before a later one.
    """
    return CommitLog(layout).replay(units, start=load(layout, units))


def committed(root: Place) -> tuple[RunInfo, LogState]:
    """The run of an output folder and the state of its commit log.

    Raises InputError if the folder holds no run, OutputError if a record is damaged.
    """
    state = current(Layout(root), load_run(root).units)
    info = load_run(root)  # after the log, which may name units that were added meanwhile
    state.grow(info.units)
    return info, state


def _path(layout: Layout) -> Place:
    return layout.writer / "checkpoint.json"
