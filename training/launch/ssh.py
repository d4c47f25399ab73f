"""A training on several hosts: torchrun on each of them, started and stopped from here by ssh."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from core.errors import Exit
from training.launch.commands import EACH_START_ITS_OWN, torchrun_command
from training.launch.devices import thread_share
from training.launch.hosts import KEPT_ALIVE, address_of, assemble, ssh_line
from training.launch.local import MEMBER
from training.launch.options import Where
from training.launch.parts import Part, watch
from training.launch.ports import meeting_point
from training.launch.probe import Found
from training.launch.remote import TO_BE_MARKED

PORT = 29500
"""What a dry run shows where no port is named: torchrun's own default."""
PASSED_ON = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
"""What decides here over which network the hosts talk and where models come from, decides it there."""


def launch_ssh(module: str, arguments: Sequence[str], where: Where, inputs: Sequence[str]) -> int:
    """Train on the hosts; gives the exit status of the training, or raises what one of its processes raised.

    A dry run asks no host: it shows a port and a number of processes that a real one finds out.
    """
    python, folder = where.remote_python or sys.executable, where.remote_folder or str(Path.cwd())
    where = replace(where, remote_python=python, remote_folder=folder)
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
    return watch([Part(host, line, screen, prefix=prefixes[host]) for host, line in lines.items()])


def _environment(processes: int, found: Found) -> dict[str, str]:
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
    """The local command that has a host do its part."""
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
        python=where.remote_python,
    )
    marked = [] if where.dry_run else [TO_BE_MARKED]
    each = EACH_START_ITS_OWN if restarts else {}
    pairs = [f"{name}={value}" for name, value in {**each, **environment}.items()]
    remote = [where.remote_python, "-u", "-m", "training.launch.remote", *marked, *pairs, "--", *torchrun]
    return ssh_line(where, host, remote, *KEPT_ALIVE)
