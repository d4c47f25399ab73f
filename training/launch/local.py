"""The processes of a training on this machine: one, or as many as torchrun looks after."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from core.errors import Exit
from core.settings import Settings
from training.launch.commands import python_command, torchrun_command
from training.launch.devices import processes_for, thread_share
from training.launch.options import Where
from training.launch.running import run
from training.launch.verdict import verdict

MEMBER = "training.launch.member"
STDERR = 2


def launch_local(module: str, arguments: Sequence[str], where: Where) -> int:
    """Train here; gives the exit status of the training, or raises what one of its processes raised."""
    processes = processes_for(where.device, where.processes)
    if where.dry_run:
        click.echo(shlex.join(_command([module, *arguments], processes, where)))
        return Exit.DONE
    folder = Path(tempfile.mkdtemp(prefix="embq-launch-"))
    command = _command(["--outcomes", str(folder), module, *arguments], processes, where)
    environment = {}
    if threads := thread_share(processes, Settings.from_environment().omp_threads):
        environment["OMP_NUM_THREADS"] = str(threads)
        each = "a thread" if threads == 1 else f"{threads} threads"
        click.echo(f"{processes} processes with {each} each; OMP_NUM_THREADS can say otherwise", err=True)
    return verdict(folder, watched(command, folder, environment))


def _command(of_member: Sequence[str], processes: int, where: Where) -> list[str]:
    if processes == 1 and not where.max_restarts:
        return python_command(MEMBER, of_member)
    return torchrun_command(MEMBER, of_member, processes=processes, max_restarts=where.max_restarts)


def watched(command: list[str], folder: Path, environment: dict[str, str]) -> int:
    """Run the processes to their end. What the launcher says itself goes into a log in the folder, see `member`."""
    try:
        with open(folder / "launcher.log", "w", encoding="utf-8") as log:
            return run(command, environment=environment, stdin=STDERR, errors=log)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
