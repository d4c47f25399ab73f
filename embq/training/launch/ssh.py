"""Launches a training on several hosts over ssh, after checking each of them."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

import embq
from embq.core.errors import AwayError, ConfigError, EmbqError, Exit, InputError
from embq.core.process.children import PYTHON, python
from embq.training.launch.child_process import MEMBER
from embq.training.launch.devices import thread_share
from embq.training.launch.launch_options import Where, meeting_point
from embq.training.launch.ssh_probe import HostReport, Question, from_json, taken
from embq.training.launch.ssh_remote import TO_BE_MARKED
from embq.training.launch.ssh_watch import HostConnection, watch
from embq.training.launch.torchrun import EACH_START_ITS_OWN, torchrun_command

CONNECT_S = 10
ANSWER_S = 60.0
"""From the call of ssh to the answer: connecting, a login shell's start, Python's on a cold network disk."""
SSH_FAILED = 255

OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "LogLevel=ERROR")
"""No questions, a time-out, and no banners in the output."""
KEPT_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""A silent host is noticed within a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHosts:
    """The checked hosts, in the order of the command line.

    Attributes:
        found: what each host has.
        rendezvous: HOST:PORT of the first, as the others reach it.
    """

    found: dict[str, HostReport]
    rendezvous: str


def ssh_line(where: Where, host: str, command: Sequence[str], *options: str) -> list[str]:
    """The local command that runs a command on a host, in the training's folder there."""
    there = f"cd {shlex.quote(where.remote_folder)} && exec {shlex.join(command)}"
    return [*where.ssh_command, *OPTIONS, *options, host, there]


def address_of(where: Where, host: str) -> str:
    """The address of a host by ssh's own configuration, because others do not know its aliases."""
    try:
        done = subprocess.run(
            [*where.ssh_command, "-G", host], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise ConfigError(
            f"{where.ssh_command[0]} cannot be started: {error.strerror}", next_step="install ssh, or see --ssh-command"
        ) from error
    names = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.rpartition("@")[2]


def assemble(where: Where, inputs: Sequence[str]) -> CheckedHosts:
    """Check every host, and that it reaches the first one.

    Raises:
        AwayError: a host cannot be reached, or does not reach the first one.
        ConfigError: a host lacks Python, embq or GPUs, they have different versions, or the port is taken.
        InputError: a host does not reach the inputs.
    """
    first, *others = where.hosts
    named, port = meeting_point(where.rendezvous)
    greeting = secrets.token_hex(8)  # by which the others know that it is the first host that answers
    with HostQuery(where, first, Question(inputs=inputs, listen=port, greeting=greeting)) as asked:
        found = asked.answer()
        _check(where, first, found, found, first)
        if not found.port:
            raise taken(first, port, found.free)
        rendezvous = f"{named or address_of(where, first)}:{found.port}"
        question = Question(inputs=inputs, reach=rendezvous, greeting=greeting)
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            answers = list(pool.map(lambda host: _ask(where, host, question), others))
    for host, answer in zip(others, answers, strict=True):
        _check(where, host, answer, found, first)
        if answer.unreached:
            raise AwayError(
                f"{host} does not reach {first} at {rendezvous}, where the hosts are to meet: {answer.unreached}",
                next_step=f"open that port of {first} for the others (--rendezvous PORT fixes it), or name another "
                "address of it: --rendezvous HOST:PORT",
                code="host_away",
            )
    return CheckedHosts(found={first: found, **dict(zip(others, answers, strict=True))}, rendezvous=rendezvous)


def _ask(where: Where, host: str, question: Question) -> HostReport:
    with HostQuery(where, host, question) as asked:
        return asked.answer()


class HostQuery:
    """A question to a host, which holds its port until the block ends."""

    def __init__(self, where: Where, host: str, question: Question) -> None:
        self.where, self.host = where, host
        self.command = ssh_line(
            where, host, python("-m", "embq.training.launch.ssh_probe", executable=where.remote_python)
        )
        self._question = json.dumps(asdict(question)) + "\n"

    def __enter__(self) -> HostQuery:
        address_of(self.where, self.host)  # whether there is an ssh at all
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=ANSWER_S)
        except (subprocess.TimeoutExpired, ValueError):
            self._process.kill()
            self._process.communicate()

    def answer(self) -> HostReport:
        """The answer; raises as `assemble` where there is none."""
        return from_json(HostReport, self._line())

    def _line(self) -> str:
        patience = threading.Timer(ANSWER_S, self._process.kill)
        patience.start()
        try:
            text = self._asked()
        finally:
            patience.cancel()
        if text:
            return text
        _, said = self._process.communicate()
        raise self._silent(said)

    def _asked(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(self._question)
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        # What a login shell greets with is no answer.
        return next((line for line in self._process.stdout if line.startswith('{"python"')), "")

    def _silent(self, said: str) -> EmbqError:
        """The error where the other end closed the connection without an answer."""
        if self._process.returncode == -signal.SIGKILL:
            return self._away(f"it did not answer in {ANSWER_S:g} s")
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        if self._process.returncode == SSH_FAILED:
            return self._away(last)
        return ConfigError(
            f"{self.host} has no embq to train with as {self.where.remote_python}: {last}",
            next_step="install embq[train] there as here; --remote-python PATH names its Python, --remote-folder its "
            "working folder",
            code="host_lacks",
        )

    def _away(self, why: str) -> EmbqError:
        return AwayError(
            f"host {self.host} cannot be reached: {why}; tried: {shlex.join(self.command)}",
            next_step=f"`ssh {self.host} true` has to work without a question: a key in the agent, the host's own key "
            "known; --ssh-command 'ssh -F FILE' for another configuration",
            code="host_away",
        )


def _check(where: Where, host: str, found: HostReport, first: HostReport, named: str) -> None:
    """Raise where a host cannot train together with the first one."""
    for what, mine, theirs in (
        ("Python", _minor(found.python), _minor(first.python)),
        ("torch", found.torch.partition("+")[0], first.torch.partition("+")[0]),
    ):
        if not mine:
            raise _unequal(f"{host} has no {what} for {where.remote_python}")
        if mine != theirs:
            raise _unequal(f"{host} has {what} {mine}, {named} has {theirs}")
    if found.embq != embq.__version__:
        raise _unequal(f"{host} has embq {found.embq or 'not installed'}, this machine has {embq.__version__}")
    if where.device == "cuda" and found.gpus < (where.processes or 1):
        asked = f"{where.processes} processes were asked for on the GPUs of each host, and {host} shows {found.gpus}"
        none = f"--device cuda was asked for, and host {host} shows no GPU: {found.why}"
        raise ConfigError(
            asked if found.gpus else none,
            next_step=f"leave {host} out, or train on the cores: --device cpu --num-devices N",
            code="no_device",
        )
    if found.missing:
        one, why = found.missing[0]
        more = f", and {len(found.missing) - 1} more" if len(found.missing) > 1 else ""
        raise InputError(
            f"{host} cannot read {one} in {where.remote_folder}: {why}{more}",
            next_step="put the shards where every host finds them under the same name: a shared folder, or "
            "`embq shards serve` and an http:// URL",
            code="host_lacks",
        )


def _unequal(message: str) -> ConfigError:
    return ConfigError(message, next_step="install the same versions on all of them", code="other_versions")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


PORT = 29500
"""Port that a dry run shows: torchrun's default."""
PASSED_ON = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
"""Variables that are passed on to hosts: they choose the network, and where models come from."""


def launch_ssh(module: str, arguments: Sequence[str], where: Where, inputs: Sequence[str]) -> int:
    """Train on the hosts; returns the exit status of the training, or raises the error of one of its processes.

    A dry run asks no host: it shows a port and a number of processes that a real one finds out.
    """
    folder = where.remote_folder or str(Path.cwd())
    where = replace(where, remote_python=where.remote_python or PYTHON, remote_folder=folder)
    if where.dry_run:
        named, port = meeting_point(where.rendezvous)
        rendezvous = f"{named or address_of(where, where.hosts[0])}:{port or PORT}"
        asked = where.processes or ("gpu" if where.device == "cuda" else 1)
        for rank, host in enumerate(where.hosts):
            click.echo(shlex.join(_line([module, *arguments], where, rank, host, asked, rendezvous, {})))
        return Exit.DONE
    team = assemble(where, inputs)
    lines = {}
    for rank, (host, found) in enumerate(team.found.items()):
        processes = where.processes or (found.gpus if where.device == "cuda" else 1)
        environment = _environment(processes, found)
        lines[host] = _line([module, *arguments], where, rank, host, processes, team.rendezvous, environment)
        device = "GPUs" if where.device == "cuda" else f"of {found.cores} cores"
        click.echo(f"{host}: {processes} {device}, torch {found.torch}, Python {found.python}", err=True)
    screen = threading.Lock()
    # Process 0 has the result, which may be JSON: on the first host, or where torchrun chooses, on any.
    prefixes = {host: "" if where.max_restarts or host == where.hosts[0] else f"[{host}] " for host in lines}
    return watch([HostConnection(host, line, screen, prefix=prefixes[host]) for host, line in lines.items()])


def _environment(processes: int, found: HostReport) -> dict[str, str]:
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    share = thread_share(processes, passed.get("OMP_NUM_THREADS", ""), found.cores)
    return {"OMP_NUM_THREADS": str(share), **passed} if share else passed


def _line(
    launched: Sequence[str],
    where: Where,
    rank: int,
    host: str,
    processes: int | str,
    rendezvous: str,
    environment: Mapping[str, str],
) -> list[str]:
    """The local command that starts a host's part."""
    restarts = where.max_restarts
    torchrun = torchrun_command(
        MEMBER,
        launched,
        processes=processes,
        nodes=len(where.hosts),
        # Only without a fixed rank can torchrun gather all hosts again after a failure.
        node_rank=None if restarts else rank,
        rendezvous=rendezvous,
        local_address=address_of(where, host) if restarts else "",
        max_restarts=restarts,
        executable=where.remote_python,
    )
    marked = [] if where.dry_run else [TO_BE_MARKED]
    each = EACH_START_ITS_OWN if restarts else {}
    pairs = [f"{name}={value}" for name, value in {**each, **environment}.items()]
    module = "embq.training.launch.ssh_remote"
    remote = python("-u", "-m", module, *marked, *pairs, "--", *torchrun, executable=where.remote_python)
    return ssh_line(where, host, remote, *KEPT_ALIVE)
