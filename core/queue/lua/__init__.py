"""The Lua scripts, by who sends them: what must not come between a look and a decision is decided on the server.

Each is text, under a line that says what it is given and what it answers. `core.queue.keys` has the keys and the rules
between them; `core.queue.scripts` runs a script, and sees to it that the server knows it.

A script about a run is given the keys `RUN_PARTS` of that run, and stands behind the prelude, which names them.
"""

from __future__ import annotations

from core.queue.lua.leases import ABANDON, BEAT, CLAIM, PUBLISH, RELEASE, START
from core.queue.lua.prelude import PRELUDE
from core.queue.lua.services import COMMIT, CONTROL, FORGET, GROW, NEXT, RATE, REJECT, REPORT, SWAP, WRITER_LOCK

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
"""Each script, by the name that the rest of embq knows it by."""

FREEING = frozenset(
    {"beat", "release", "abandon", "commit", "reject", "report", "rate", "swap", "forget", "grow", "control"}
)
"""Scripts that must run although the server is out of memory, or the backlog could never drain (Redis >= 7)."""
