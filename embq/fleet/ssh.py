"""The launcher of a fleet on hosts that ssh reaches."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import embq
from embq.app.doctor.check import Check
from embq.app.remote.ssh import FAILED, away, check_hosts, ssh_line
from embq.core.errors import ConfigError, UsageError
from embq.core.process.children import ending, python
from embq.fleet.launcher import CHECK_S, Answer, AskingLauncher, FleetMember, answer_in, output_of


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
