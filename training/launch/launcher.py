"""Starts a training where it was asked for, and gives its outcome."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from core.errors import Exit
from core.process.limits import cores
from core.settings import Settings
from training.launch.child_process import run
from training.launch.devices import processes_for, thread_share
from training.launch.member import OUTCOMES
from training.launch.options import Where
from training.launch.outcomes import Outcome, verdict
from training.launch.torchrun import EACH_START_ITS_OWN, python_command, torchrun_command
from training.run.scratch import scratch

MEMBER = "training.launch.member"
LOG = "launcher.log"
STDERR = 2


def launch_local(module: str, arguments: Sequence[str], where: Where) -> int:
    """Train here; gives the exit status of the training, or raises what one of its processes raised."""
    processes = processes_for(where.device, where.processes)
    environment = dict(EACH_START_ITS_OWN) if where.max_restarts else {}
    if where.dry_run:
        pairs = [f"{name}={value}" for name, value in environment.items()]
        click.echo(shlex.join([*(["env", *pairs] if pairs else []), *_command([module, *arguments], processes, where)]))
        return Exit.DONE
    if threads := thread_share(processes, Settings.from_environment().omp_threads, cores()):
        environment["OMP_NUM_THREADS"] = str(threads)
        each = "a thread" if threads == 1 else f"{threads} threads"
        click.echo(f"{processes} processes with {each} each; OMP_NUM_THREADS can say otherwise", err=True)
    with outcome_folder() as folder, open(folder / LOG, "w+", encoding="utf-8", errors="replace") as log:
        command = kept_in(folder, _command([module, *arguments], processes, where))
        # What torchrun says itself goes into the log; its workers find our standard error as their input, see `member`.
        status = run(command, environment=environment, stdin=STDERR, errors=log)
        log.seek(0)
        return verdict(Outcome.read(folder), status, log.read())


def kept_in(folder: Path, command: Sequence[str]) -> list[str]:
    """A command with the place in which its processes leave how they ended."""
    place = command.index(MEMBER) + 1
    return [*command[:place], OUTCOMES, str(folder), *command[place:]]


@contextmanager
def outcome_folder() -> Iterator[Path]:
    """Where the processes of this host leave how they ended, for as long as somebody asks."""
    with scratch(Path(tempfile.gettempdir()), "embq-launch-", mode=0o700) as folder:
        yield folder


def _command(of_member: Sequence[str], processes: int, where: Where) -> list[str]:
    if processes == 1 and not where.max_restarts:
        return python_command(MEMBER, of_member)
    return torchrun_command(MEMBER, of_member, processes=processes, max_restarts=where.max_restarts)


def launch(module: str, arguments: Sequence[str], where: Where, *, inputs: Sequence[str] = ()) -> int:
    """Run `main(arguments)` of `module.__main__` in every process of a training.

    Args:
        module: such as "training.classify".
        inputs: folders, files and URLs that every host has to reach; checked before a start on other hosts.

    Returns the exit status of the training: 0, or 3 where samples failed. Raises the error that one of its processes
    raised, with its own exit status; ConfigError where the devices are not there; KeyboardInterrupt after it was asked
    to stop and has.
    """
    if where.launcher == "local":
        return launch_local(module, arguments, where)
    if where.launcher == "ssh":
        from training.launch.ssh import launch_ssh

        return launch_ssh(module, arguments, where, inputs)
    from training.launch.ray import launch_ray

    return launch_ray(module, arguments, where)
