"""A host's part of a training that ssh started: `python -m training.launch.ssh_remote [NAME=VALUE]... -- TORCHRUN ...`.

ssh does not end what it started when it ends itself. So this watches its standard input, which closes with the
connection, and ends torchrun then. What its processes came to, it tells as every command of embq does; or, with
`--mark` before all else, as its last line, for whoever has several hosts to look after.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict

from core.errors import EmbqError, Exit
from core.service.stopping import REPEAT_S
from embq.cli.entry_point import show_error
from training.launch.child_process import run
from training.launch.launcher import LOG, STDERR, kept_in, outcome_folder
from training.launch.outcomes import Outcome, verdict

STDIN, STDOUT = 0, 1
BEAT_S, SILENCE_S = 15.0, 60.0
"""Who started us writes a byte this often, and is missed after this long: no word comes of a machine that is gone."""
TO_BE_MARKED = "--mark"
MARK = "\x1eembq-outcomes "
"""Stands before the outcomes; no line that a training prints has a record separator."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun until it ends or nobody listens any more; gives its status, or that of the training."""
    # A connection that ends before torchrun is there ends us in order, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    marked, dashes = arguments[0] == TO_BE_MARKED, arguments.index("--")
    environment = dict(pair.split("=", 1) for pair in arguments[marked:dashes])
    with outcome_folder() as folder, open(folder / LOG, "w+", encoding="utf-8", errors="replace") as log:
        command = kept_in(folder, arguments[dashes + 1 :])
        silence_s = SILENCE_S if marked else None  # a terminal says nothing
        threading.Thread(target=_stop_with_the_connection, args=(silence_s,), daemon=True).start()
        try:
            status = run(command, environment=environment, stdin=STDERR, errors=log)
        except KeyboardInterrupt:
            status = int(Exit.INTERRUPTED)
        log.seek(0)
        return (_mark if marked else _show)(Outcome.read(folder), status, log.read())


def _mark(outcomes: Sequence[Outcome], status: int, said: str) -> int:
    told = {"status": status, "outcomes": [asdict(outcome) for outcome in outcomes], "said": said}
    sys.stdout.write(f"{MARK}{json.dumps(told)}\n")
    sys.stdout.flush()
    return status


def _show(outcomes: Sequence[Outcome], status: int, said: str) -> int:
    if status == Exit.INTERRUPTED:
        return status
    try:
        return verdict(outcomes, status, said)
    except EmbqError as error:
        show_error(error)
        return error.exit_code


def ended_by_silence(source: int, silence_s: float | None) -> bool:
    """Wait for the end of an input; true where nothing came from it for that long instead, None for any time."""
    while select.select([source], [], [], silence_s)[0]:
        if not os.read(source, 1024):
            return False
    return True


def _stop_with_the_connection(silence_s: float | None) -> None:
    """End torchrun in order when our input ends; at once where the connection is closed while that lasts.

    A connection that was lost takes both at the same time, and leaves torchrun the time to end in order.
    """
    if ended_by_silence(STDIN, silence_s):
        sys.stderr.write(f"nothing was heard for {silence_s:g} s of who started this training; it ends\n")
    os.kill(os.getpid(), signal.SIGTERM)
    connection = select.poll()
    connection.register(STDOUT, 0)  # that nobody reads any more is always told
    if not connection.poll(1000 * REPEAT_S):
        connection.poll()
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
