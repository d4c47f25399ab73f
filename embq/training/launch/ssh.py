"""Launches a training on several hosts over ssh, after checking each of them."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

import embq
from embq.app.remote.ssh import ssh_line
from embq.core.errors import AwayError, ConfigError, Exit, InputError
from embq.core.process.children import PYTHON, python
from embq.training.launch.child_process import MEMBER
from embq.training.launch.devices import threads_of
from embq.training.launch.launch_options import Where, meeting_point, passed_on
from embq.training.launch.ssh_connection import HostConnection, watch
from embq.training.launch.ssh_host import HostReport, Question
from embq.training.launch.torchrun import restart_environment, torchrun_command

PORT = 29500
"""Port that a dry run shows: torchrun's default."""


def launch_ssh(module: str, arguments: Sequence[str], where: Where, inputs: Sequence[str]) -> int:
    """Train on the hosts; returns the exit status of the training, or raises the error of one of its processes.

    A dry run asks no host: it shows a port and a number of processes that a real one finds out.

    Raises:
        AwayError: a host cannot be reached, or does not reach the first one.
        ConfigError: a host lacks Python, embq or GPUs, they have different versions, or the port is taken.
        InputError: a host does not reach the inputs.
    """
    folder = where.remote_folder or str(Path.cwd())
    where = replace(where, remote_python=where.remote_python or PYTHON, remote_folder=folder)
    member = [module, *arguments]
    address = address_of(where, where.hosts[0])  # fails if there is no ssh here
    if where.dry_run:
        name, port = meeting_point(where.rendezvous)
        processes = where.processes or ("gpu" if where.device == "cuda" else 1)
        pairs = [f"{variable}={value}" for variable, value in restart_environment(where.max_restarts).items()]
        for rank, host in enumerate(where.hosts):
            command = _torchrun(member, where, rank, processes, f"{name or address}:{port or PORT}")
            click.echo(shlex.join(_ssh_line(where, host, *pairs, "--", *command)))
        return Exit.DONE
    return _train(member, where, address, inputs)


def _train(member: Sequence[str], where: Where, address: str, inputs: Sequence[str]) -> int:
    screen = threading.Lock()
    with ExitStack() as connected:
        hosts = []
        for host in where.hosts:
            # Process 0 has the result, which may be JSON: on the first host, or where torchrun chooses, on any.
            prefix = "" if where.max_restarts or host == where.hosts[0] else f"[{host}] "
            hosts.append(HostConnection(host, _ssh_line(where, host), screen, prefix=prefix))
            connected.callback(hosts[-1].close)
        reports, rendezvous = _checked(hosts, where, address, inputs)
        for rank, (connection, report) in enumerate(zip(hosts, reports, strict=True)):
            processes = where.processes or (report.gpus if where.device == "cuda" else 1)
            device = "GPUs" if where.device == "cuda" else f"of {report.cores} cores"
            click.echo(
                f"{connection.host}: {processes} {device}, torch {report.torch}, Python {report.python}", err=True
            )
            connection.train(
                _torchrun(member, where, rank, processes, rendezvous),
                {**restart_environment(where.max_restarts), **threads_of(processes, report.cores), **passed_on()},
            )
        return watch(hosts)


def _ssh_line(where: Where, host: str, *arguments: str) -> list[str]:
    """The local command that runs `embq.training.launch.ssh_host` on a host, in the training's folder there."""
    command = python("-u", "-m", "embq.training.launch.ssh_host", *arguments, executable=where.remote_python)
    return ssh_line(where.ssh_command, host, command, folder=where.remote_folder)


def _torchrun(member: Sequence[str], where: Where, rank: int, processes: int | str, rendezvous: str) -> list[str]:
    """A host's torchrun."""
    restarts = where.max_restarts
    return torchrun_command(
        MEMBER,
        member,
        processes=processes,
        nodes=len(where.hosts),
        # Only without a fixed rank can torchrun gather all hosts again after a failure.
        node_rank=None if restarts else rank,
        rendezvous=rendezvous,
        local_address=address_of(where, where.hosts[rank]) if restarts else "",
        max_restarts=restarts,
        executable=where.remote_python,
    )


SETTINGS_S = 60.0
"""For ssh to print its settings of a host; it connects nowhere, but may run commands of its configuration."""


def address_of(where: Where, host: str) -> str:
    """The address of a host by ssh's own configuration, because others do not know its aliases."""
    try:
        done = subprocess.run(
            [*where.ssh_command, "-G", host],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=SETTINGS_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{where.ssh_command[0]} -G {host} has not ended within {SETTINGS_S:g} s",
            next_step="see what `Match exec` in ~/.ssh/config runs, or see --ssh-command",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{where.ssh_command[0]} cannot be started: {error.strerror}", next_step="install ssh, or see --ssh-command"
        ) from error
    names = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.rpartition("@")[2]


def _checked(
    hosts: Sequence[HostConnection], where: Where, address: str, inputs: Sequence[str]
) -> tuple[list[HostReport], str]:
    """Check every host, and that it reaches the first one; returns their reports, and HOST:PORT of the first.

    Args:
        address: of the first host, by ssh's configuration.
    """
    name, port = meeting_point(where.rendezvous)
    greeting = secrets.token_hex(8)  # shows the others that the first host answers
    hosts[0].send_question(Question(inputs=inputs, listen=port, greeting=greeting))
    first = hosts[0].answer(where.remote_python)
    _check(where, hosts[0].host, first, first)
    if not first.port:
        raise ConfigError(
            f"port {port} of {hosts[0].host} is taken by another program, maybe by another training",
            next_step=f"--rendezvous {first.free} is free there; without --rendezvous a free port is found",
            code="port_taken",
        )
    rendezvous = f"{name or address}:{first.port}"
    for connection in hosts[1:]:
        connection.send_question(Question(inputs=inputs, reach=rendezvous, greeting=greeting))
    reports = [first, *(connection.answer(where.remote_python) for connection in hosts[1:])]
    for connection, report in zip(hosts, reports, strict=True):
        _check(where, connection.host, report, first)
        if report.unreached:
            raise AwayError(
                f"{connection.host} does not reach {hosts[0].host} at {rendezvous}, where the hosts are to meet: "
                f"{report.unreached}",
                next_step=f"open that port of {hosts[0].host} for the others (--rendezvous PORT fixes it), or name "
                "another address of it: --rendezvous HOST:PORT",
                code="host_away",
            )
    return reports, rendezvous


def _check(where: Where, host: str, report: HostReport, first: HostReport) -> None:
    """Raise if a host cannot train together with the first one."""
    for what, its, of_first in (
        ("Python", _minor(report.python), _minor(first.python)),
        ("torch", report.torch.partition("+")[0], first.torch.partition("+")[0]),
    ):
        if not its:
            raise _unequal(f"{host} has no {what} for {where.remote_python}")
        if its != of_first:
            raise _unequal(f"{host} has {what} {its}, {where.hosts[0]} has {of_first}")
    if report.embq != embq.__version__:
        raise _unequal(f"{host} has embq {report.embq or 'not installed'}, this machine has {embq.__version__}")
    if where.device == "cuda" and report.gpus < (where.processes or 1):
        few = f"{where.processes} processes were asked for on the GPUs of each host, and {host} shows {report.gpus}"
        none = f"--device cuda was asked for, and host {host} shows no GPU: {report.why}"
        raise ConfigError(
            few if report.gpus else none,
            next_step=f"leave {host} out, or train on the cores: --device cpu --num-devices N",
            code="no_device",
        )
    if report.missing:
        name, why = report.missing[0]
        further = f", and {len(report.missing) - 1} more" if len(report.missing) > 1 else ""
        raise InputError(
            f"{host} cannot read {name} in {where.remote_folder}: {why}{further}",
            next_step="put the shards where every host finds them under the same name: a shared folder, or "
            "`embq shards serve` and an http:// URL",
            code="host_lacks",
        )


def _unequal(message: str) -> ConfigError:
    return ConfigError(message, next_step="install the same versions on all of them", code="other_versions")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
