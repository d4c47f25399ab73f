"""What stands on a command line that everybody on the machine can read, and must not."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from core.redaction import masked
from core.settings import child_environment

_OPTION = "--broker"


def keep_off_the_process_list(arguments: Sequence[str]) -> None:
    """Start this command anew where --broker names a password, so that `ps` does not show it any longer.

    The URL goes into EMBQ_BROKER_URL, which only this user can read; on the command line its password is masked, and
    `embq.options.settings_with` takes the one for the other. Returns where there is nothing to hide.

    Args:
        arguments: of the command, without its name.
    """
    shown, url = list(arguments), ""
    for at, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if argument == _OPTION and at + 1 < len(arguments):
            shown[at + 1], url = _hidden(arguments[at + 1], url)
        elif name == _OPTION and given:
            hidden, url = _hidden(value, url)
            shown[at] = f"{_OPTION}={hidden}"
    if shown == list(arguments):
        return
    # What Python was started with besides: the script, or -m embq, and its own options.
    own = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *own, *shown], child_environment(EMBQ_BROKER_URL=url))


def _hidden(value: str, before: str) -> tuple[str, str]:
    """(what may be shown of it, the URL to keep): the last one with a password counts, as of options given twice."""
    return (masked(value), value) if masked(value) != value else (value, before)
