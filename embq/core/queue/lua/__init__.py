"""Lua scripts: decisions that the server takes atomically.

The comment above each script has its arguments and its answer. `embq.core.queue.keys` documents the keys and the rules
between them; `embq.core.queue.scripts` loads and runs the scripts.

A script about a run gets the keys `RUN_PARTS` of that run, which the prelude names.
"""

from __future__ import annotations

from embq.core.queue.lua.leases import ABANDON, BEAT, CLAIM, PUBLISH, RELEASE, START
from embq.core.queue.lua.prelude import BOUNDS, PRELUDE
from embq.core.queue.lua.services import (
    COMMIT,
    CONTROL,
    FORGET,
    GROW,
    NEXT,
    RATE,
    RECHECK,
    REJECT,
    REPORT,
    SWAP,
    WRITER_LOCK,
)

MAX_UNITS = 500
"""Most units that one call of `start`, `beat` or `commit` is about."""
MAX_TEXT_BYTES = 4096
"""Of an argument that is no result, report or record: messages have 1,000 characters."""
MAX_VALUE_BYTES = 16 << 20
"""Of an argument of the others: what servers that embq configures take at most."""
MAX_BLAMED = 4 * MAX_UNITS
"""Most units that a worker had in hand when it died; `abandon` needs all of them in one call."""
MAX_FIELDS = 64
"""Of a result; its largest has 32 pieces."""


def _bounded(text: str, arguments: int, argument_bytes: int = MAX_TEXT_BYTES, *, prelude: str = PRELUDE) -> str:
    bound = f"local refused = refusal({arguments}, {argument_bytes})\nif refused then return refused end"
    return prelude + bound + text


SCRIPTS = {
    "claim": _bounded(CLAIM, 7),
    "start": _bounded(START, 2 * MAX_UNITS),
    "beat": _bounded(BEAT, 2 + 4 * MAX_UNITS),
    "publish": _bounded(PUBLISH, 3 + 2 * MAX_FIELDS, MAX_VALUE_BYTES),
    "release": _bounded(RELEASE, 6),
    "abandon": _bounded(ABANDON, 5 + 2 * MAX_BLAMED),
    "next": _bounded(NEXT, 8),
    "commit": _bounded(COMMIT, 7 + 2 * MAX_UNITS),
    "reject": _bounded(REJECT, 6),
    "recheck": _bounded(RECHECK, 0),
    "grow": _bounded(GROW, 2),
    "control": _bounded(CONTROL, 5),
    "writer_lock": _bounded(WRITER_LOCK, 3, prelude=BOUNDS),
    "report": _bounded(REPORT, 3, MAX_VALUE_BYTES, prelude=BOUNDS),
    "rate": _bounded(RATE, 2, MAX_VALUE_BYTES, prelude=BOUNDS),
    "swap": _bounded(SWAP, 2, MAX_VALUE_BYTES, prelude=BOUNDS),
    "forget": _bounded(FORGET, 2, MAX_VALUE_BYTES, prelude=BOUNDS),
}
"""Name -> text of a script, which refuses more arguments, and longer ones, than its callers have."""

FREEING = frozenset(
    {"beat", "release", "abandon", "commit", "reject", "report", "rate", "swap", "forget", "recheck", "grow", "control"}
)
"""Scripts that must run although the server is out of memory, or the backlog could never drain (Redis >= 7)."""
