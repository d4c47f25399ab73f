"""A verb in a process of its own, for `embq.app.embedding.runs`: `python -m embq.app.embedding.child VERB ARGUMENT...`.

Its standard output ends with one line of JSON: {"status": n} or {"error": fields}. It ends when its standard input
does, which is when its parent has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import click

from embq.core.errors import EmbqError, Exit, UsageError, error_fields

STOPS_APART_S = 2.0
"""Between two requests to stop, of which the second gives begun units back."""


def main() -> None:
    """Entry point."""
    from embq.app.cli.entry_point import cli

    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: dict[str, Any]
    try:
        result: Any = cli.main(sys.argv[1:], prog_name="embq", standalone_mode=False)
        answer = {"status": int(result) if isinstance(result, int) else 0}
    except EmbqError as error:
        answer = {"error": error_fields(error), "status": int(error.exit_code)}
    except click.ClickException as error:
        answer = {"error": error_fields(UsageError(error.format_message())), "status": int(Exit.USAGE)}
    sys.stdout.flush()
    click.echo(json.dumps(answer))
    sys.exit(answer["status"])


def _end_with_parent() -> None:
    """Stop as after Ctrl-C, twice, when the parent closes the pipe or ends."""
    while os.read(sys.stdin.fileno(), 1024):
        continue
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(STOPS_APART_S)


if __name__ == "__main__":
    main()
