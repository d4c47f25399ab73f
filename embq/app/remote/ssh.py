"""Commands on other hosts over ssh."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from embq.core.errors import UsageError

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR")
"""No questions, a time-out, and no banners in the output. ssh takes the first value of an option, so those of
`--ssh-command` come before these, and these before those of its configuration."""
KEPT_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""A silent host is noticed within a minute."""
FAILED = 255
"""Exit status of ssh if it is no status of the remote command."""


def ssh_line(ssh_command: Sequence[str], host: str, command: Sequence[str], *, folder: str = "") -> list[str]:
    """The local command that runs another one on a host.

    Args:
        folder: working folder there; "" for the home.
    """
    enter = f"cd {shlex.quote(folder)} && " if folder else ""
    return [*ssh_command, *OPTIONS, *KEPT_ALIVE, host, f"{enter}exec {shlex.join(command)}"]


def words(option: str, command: str) -> list[str]:
    """The words of an option that is a command or a part of one; UsageError if a quote is not closed."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"{option} {command}: {error}", next_step="quoted as for a shell: 'ssh -F \"my hosts.conf\"'"
        ) from error


def away(host: str, why: str, command: Sequence[str]) -> tuple[str, str]:
    """Message and next step where ssh does not reach a host."""
    return (
        f"host {host} cannot be reached: {why}; tried: {shlex.join(command)}",
        f"`ssh {host} true` has to work without a question: a key in the agent, the host's own key known; "
        "--ssh-command 'ssh -F FILE' for another configuration, 'ssh -o ConnectTimeout=60' for a slow host",
    )


def check_hosts(hosts: Sequence[str], places: Sequence[str] = ()) -> None:
    """UsageError if a host has no name, is named twice, or would be an option of ssh.

    Args:
        places: where each host is named, for the error; --hosts if there are none.
    """
    named = list(zip(hosts, places or ["--hosts"] * len(hosts), strict=True))
    for host, place in named:
        name = host.rpartition("@")[2]
        is_text = host.isprintable() and not any(letter.isspace() for letter in host)
        if not name or host.startswith("-") or name.startswith("-") or not is_text:
            raise UsageError(f"{place}: {host!r} is no host", next_step="names or addresses as ssh calls them")
        if (count := hosts.count(host)) > 1:
            where = ", ".join(dict.fromkeys(place for other, place in named if other == host))
            raise UsageError(
                f"{where}: {host} is named {count} times, and would share its devices with itself",
                next_step="name each host once",
            )
