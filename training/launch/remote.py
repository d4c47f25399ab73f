"""A host's part of a training that ssh started: `python -m training.launch.remote [NAME=VALUE]... -- TORCHRUN ...`.

ssh does not end what it started when it ends itself. So this watches its standard input, which closes with the
connection, and ends torchrun then. What its processes came to, it writes as its last line, after `MARK`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict

from core.errors import Exit
from training.launch.local import LOG, STDERR, kept_in, outcome_folder
from training.launch.outcomes import Outcome
from training.launch.running import run

MARK = "\x1eembq-outcomes "
"""Begins the last line; no line that a training prints begins with a record separator."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun until it ends or nobody listens any more; gives its status."""
    dashes = arguments.index("--")
    environment = dict(pair.split("=", 1) for pair in arguments[:dashes])
    with outcome_folder() as folder, open(folder / LOG, "w+", encoding="utf-8", errors="replace") as log:
        command = kept_in(folder, arguments[dashes + 1 :])
        threading.Thread(target=_stop_when_input_ends, daemon=True).start()
        try:
            status = run(command, environment=environment, stdin=STDERR, errors=log)
        except KeyboardInterrupt:
            status = int(Exit.INTERRUPTED)
        log.seek(0)
        outcomes = [asdict(outcome) for outcome in Outcome.read(folder)]
        sys.stdout.write(f"{MARK}{json.dumps({'status': status, 'outcomes': outcomes, 'said': log.read()})}\n")
        sys.stdout.flush()
    return status


def _stop_when_input_ends() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
