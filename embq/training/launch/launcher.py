"""Starts the processes of a training where the options say, and returns its outcome."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

from embq.core.errors import Exit
from embq.core.process.limits import cores
from embq.core.settings import Settings
from embq.training.launch.child_process import MEMBER, outcome_folder, run_with_outcomes
from embq.training.launch.devices import processes_for, threads_of
from embq.training.launch.launch_options import Where
from embq.training.launch.outcomes import verdict
from embq.training.launch.torchrun import python_command, restart_environment, torchrun_command


def launch(module: str, arguments: Sequence[str], where: Where, *, inputs: Sequence[str] = ()) -> int:
    """Run `main(arguments)` of `module.__main__` in every process of a training.

    Args:
        module: such as "embq.training.classify".
        inputs: folders, files and URLs that every host has to reach; checked before a start on other hosts.

    Returns the exit status of the training: 0, or 3 if samples failed. Raises the error that one of its processes
    raised, with its own exit status; ConfigError if the devices are not there; KeyboardInterrupt after a request to
    stop.
    """
    if where.launcher == "local":
        return _launch_local(module, arguments, where)
    if where.launcher == "ssh":
        from embq.training.launch.ssh import launch_ssh

        return launch_ssh(module, arguments, where, inputs)
    from embq.training.launch.ray import launch_ray

    return launch_ray(module, arguments, where)


def _launch_local(module: str, arguments: Sequence[str], where: Where) -> int:
    processes = processes_for(where.device, where.processes)
    environment = restart_environment(where.max_restarts)
    member = [module, *arguments]
    if processes == 1 and not where.max_restarts:
        command = python_command(MEMBER, member)
    else:
        command = torchrun_command(MEMBER, member, processes=processes, max_restarts=where.max_restarts)
    if where.dry_run:
        pairs = [f"{name}={value}" for name, value in environment.items()]
        click.echo(shlex.join([*(["env", *pairs] if pairs else []), *command]))
        return Exit.DONE
    if not Settings.from_environment().omp_threads and (threads := threads_of(processes, cores())):
        environment |= threads
        number = threads["OMP_NUM_THREADS"]
        each = "a thread" if number == "1" else f"{number} threads"
        click.echo(f"{processes} processes with {each} each; OMP_NUM_THREADS can say otherwise", err=True)
    with outcome_folder() as folder:
        return verdict(*run_with_outcomes(command, folder, environment))
