"""A host's part of a training by ssh: `python -m embq.training.launch.ssh_remote [NAME=VALUE]... -- TORCHRUN ...`.

sshd does not end what it started when the connection ends. So this watches its standard input, which closes with the
connection, and ends torchrun then. It ends as every command of embq does; with `--mark` as its first argument, it
prints the outcomes of its processes as its last line instead.
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

from embq.app.cli.entry_point import show_error
from embq.core.errors import EmbqError, Exit
from embq.core.service.stopping import REPEAT_S
from embq.training.launch.child_process import outcome_folder, run_with_outcomes
from embq.training.launch.outcomes import Outcome, verdict

STDIN, STDOUT = 0, 1
BEAT_S, SILENCE_S = 15.0, 60.0
"""The launching machine writes a byte this often, and counts as gone after this long without one."""
TO_BE_MARKED = "--mark"
MARK = "\x1eembq-outcomes "
"""Precedes the outcomes; no line that a training prints has a record separator."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun until it ends or the connection does; returns its status, or that of the training."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    marked, dashes = arguments[0] == TO_BE_MARKED, arguments.index("--")
    environment = dict(pair.split("=", 1) for pair in arguments[marked:dashes])
    with outcome_folder() as folder:
        silence_s = SILENCE_S if marked else None  # a terminal sends nothing
        threading.Thread(target=_stop_with_the_connection, args=(silence_s,), daemon=True).start()
        try:
            outcomes, status = run_with_outcomes(arguments[dashes + 1 :], folder, environment)
        except KeyboardInterrupt:
            outcomes, status = Outcome.read(folder), int(Exit.INTERRUPTED)
    if marked:
        report = {"status": status, "outcomes": [asdict(outcome) for outcome in outcomes]}
        sys.stdout.write(f"{MARK}{json.dumps(report)}\n")
        sys.stdout.flush()
    elif status != Exit.INTERRUPTED:
        try:
            return verdict(outcomes, status)
        except EmbqError as error:
            show_error(error)
            return error.exit_code
    return status


def ended_by_silence(source: int, silence_s: float | None) -> bool:
    """Wait for the end of an input; true where nothing came for that many seconds instead, None for any time."""
    while select.select([source], [], [], silence_s)[0]:
        if not os.read(source, 1024):
            return False
    return True


def _stop_with_the_connection(silence_s: float | None) -> None:
    """Stop torchrun when our input ends, and kill it where our output closes later than that.

    A lost connection closes both at the same time, and leaves torchrun the time to end in order.
    """
    if ended_by_silence(STDIN, silence_s):
        sys.stderr.write(f"the launching machine was silent for {silence_s:g} s; this training ends\n")
    os.kill(os.getpid(), signal.SIGTERM)
    connection = select.poll()
    connection.register(STDOUT, 0)  # a closed output is always reported
    if not connection.poll(1000 * REPEAT_S):
        connection.poll()
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
