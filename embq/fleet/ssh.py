"""Commands on other hosts over ssh, and the launcher of a fleet by them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import embq
from embq.app.doctor.check import Check
from embq.core.errors import ConfigError, UsageError
from embq.core.process.children import ending, python
from embq.fleet.launcher import CHECK_S, Answer, AskingLauncher, FleetMember, answer_in, output_of

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


def read_hosts(path: Path) -> dict[str, str]:
    """Hosts of a file, one a line, by their places "FILE line N"; `#` begins a comment.

    Raises UsageError with the place of a host that `check_hosts` refuses, and for a file without hosts.
    """
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    hosts = {f"{path} line {n}": host for n, line in enumerate(lines, 1) if (host := line.partition("#")[0].strip())}
    if not hosts:
        raise UsageError(f"{path} names no host", next_step="write one host a line: gpu1, or user@10.0.0.5")
    check_hosts([*hosts.values()], [*hosts])
    return hosts


def ssh_launcher(fleet: str, hosts: Mapping[str, str], ssh_command: Sequence[str], executable: str) -> AskingLauncher:
    """Workers that stay on hosts when the connection ends.

    Args:
        hosts: machine -> host, as ssh calls it.
        ssh_command: ssh with its options.
        executable: Python with embq on the hosts.
    """

    def install(name: str) -> str:
        return f"ssh {hosts[name]} {executable} -m pip install 'embq[worker]=={embq.__version__}'"

    def request(action: str, member: FleetMember) -> Answer | Check:
        name, host = member.name, hosts.get(member.name, "")
        if not host:
            return Check(name, "fail", "it is not in the file of hosts", "name all hosts of the fleet in --hosts")
        command = ssh_line(ssh_command, host, python("-m", "embq.fleet.member", action, executable=executable))
        limit_s = CHECK_S + member.drain_s
        try:
            status, output, errors = output_of(command, member.order(), limit_s)
        except FileNotFoundError as error:
            raise ConfigError(f"{command[0]} is not installed here", next_step="install an ssh client") from error
        except subprocess.TimeoutExpired:
            return Check(name, "fail", f"host {host} did not answer in {limit_s:g} s", "see what it is busy with")
        if (answer := answer_in(output)) is not None:
            return answer
        detail = (errors.strip().splitlines() or [f"it ended with {ending(status)}"])[-1][-500:]
        if status == FAILED:
            return Check(name, "fail", *away(host, detail, command))
        return Check(name, "fail", f"no embq {embq.__version__} for {executable}: {detail}", install(name))

    return AskingLauncher(fleet, request, install)
