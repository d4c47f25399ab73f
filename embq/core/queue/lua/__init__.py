"""Lua scripts: decisions that the server takes atomically.

The comment above each script has its arguments and its answer. `embq.core.queue.keys` documents the keys and the rules
between them; `embq.core.queue.scripts` loads and runs the scripts.

A script about a run gets the keys `RUN_PARTS` of that run, which the prelude names.
"""

from __future__ import annotations

from embq.core.queue.lua.leases import ABANDON, BEAT, CLAIM, PUBLISH, RELEASE, START
from embq.core.queue.lua.prelude import PRELUDE
from embq.core.queue.lua.services import COMMIT, CONTROL, FORGET, GROW, NEXT, RATE, REJECT, REPORT, SWAP, WRITER_LOCK

SCRIPTS = {
    "claim": PRELUDE + CLAIM,
    "start": PRELUDE + START,
    "beat": PRELUDE + BEAT,
    "publish": PRELUDE + PUBLISH,
    "release": PRELUDE + RELEASE,
    "abandon": PRELUDE + ABANDON,
    "next": PRELUDE + NEXT,
    "commit": PRELUDE + COMMIT,
    "reject": PRELUDE + REJECT,
    "grow": PRELUDE + GROW,
    "control": PRELUDE + CONTROL,
    "writer_lock": WRITER_LOCK,
    "report": REPORT,
    "rate": RATE,
    "swap": SWAP,
    "forget": FORGET,
}
"""Name -> text of a script."""

FREEING = frozenset(
    {"beat", "release", "abandon", "commit", "reject", "report", "rate", "swap", "forget", "grow", "control"}
)
"""Scripts that must run although the server is out of memory, or the backlog could never drain (Redis >= 7)."""
