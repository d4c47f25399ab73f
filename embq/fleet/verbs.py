"""`embq fleet`: workers on many machines."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

import embq
from embq.app.cli.sections import GENERAL, SectionedCommand, option, section
from embq.app.cli.shared_options import broker_option, json_option, option_group, settings_with
from embq.app.doctor.check import print_checks
from embq.core.errors import Exit, UsageError
from embq.core.process.children import PYTHON

if TYPE_CHECKING:
    from embq.fleet.fleet import Fleet
    from embq.fleet.launcher import Launcher

F = TypeVar("F", bound=Callable[..., Any])
LAUNCHERS = ("ssh", "slurm", "kubernetes", "ray")
_OF_LAUNCHER = (
    *("launcher", "hosts", "ssh_command", "count", "sbatch", "ray_address", "gpus", "remote_python"),
    *("kubectl", "pod_image", "patch"),
)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WAIT = "Longest time until a started worker reports to the broker."
_DRAIN = "Seconds to finish begun units, as of `embq worker`."


@click.group("fleet", epilog="Example: embq fleet up --hosts hosts.txt --broker rediss://worker@10.0.0.5:6380")
def command() -> None:
    """Start, show, drain and end workers on many machines.

    Each machine gets a user of its own at the broker, worker-NAME.MACHINE, and is checked before its worker starts.
    """


_where = option_group(
    section("Machines"),
    option("--launcher", type=click.Choice(LAUNCHERS), help="Launcher of the workers.  [ssh with --hosts]"),
    option(
        "--fleet-name", "name", default="fleet", metavar="NAME", help="Name of the fleet, part of its users' names."
    ),
    option("--hosts", type=_FILE, metavar="FILE", help="Hosts for ssh, one a line."),
    option("--ssh-command", default="ssh", metavar="COMMAND", help="ssh with its options: 'ssh -o ConnectTimeout=60'."),
    option("--machines", "count", type=click.IntRange(min=1), metavar="N", help="Machines that `up` is to start."),
    option("--sbatch", default="", metavar="OPTIONS", help="Options of sbatch: '--partition gpu --gpus-per-node 8'."),
    option("--ray-address", default="auto", metavar="HOST:PORT", help="Head of the Ray cluster."),
    option(
        "--gpus-per-machine",
        "gpus",
        type=click.IntRange(min=0),
        default=1,
        metavar="N",
        help="GPUs of a machine on Kubernetes or Ray.",
    ),
    option("--kubectl", default="kubectl", metavar="COMMAND", help="kubectl with its options: 'kubectl -n ml'."),
    option("--pod-image", default=f"embq-worker:{embq.__version__}", metavar="IMAGE", help="Image of the pods."),
    option("--patch", type=_FILE, metavar="FILE", help="Patch of the Deployments, as `kubectl patch` takes it."),
    option("--remote-python", default="", metavar="PATH", help="Python with embq there.  [ours; in pods, python]"),
    option(
        "--secrets",
        default="secrets",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Folder that `embq broker init` has made.",
    ),
    section(GENERAL),
    broker_option,
    json_option,
)


def fleet_options(function: F) -> F:
    """Options of a fleet, which a verb gets as `fleet`."""

    @functools.wraps(function)
    def with_fleet(*, name: str, secrets: Path, broker: str, **options: Any) -> Any:
        from embq.fleet.fleet import Fleet

        engine, machines = _launcher(name, **{key: options.pop(key) for key in _OF_LAUNCHER})
        return function(fleet=Fleet(name, secrets, settings_with(broker), engine, machines), **options)

    return _where(with_fleet)  # type: ignore[return-value]


def _launcher(
    name: str,
    *,
    launcher: str | None,
    hosts: Path | None,
    ssh_command: str,
    count: int | None,
    sbatch: str,
    ray_address: str,
    gpus: int,
    remote_python: str,
    kubectl: str,
    pod_image: str,
    patch: Path | None,
) -> tuple[Launcher, list[str]]:
    """The launcher that the options name, and the machines that `up` starts by it."""
    from embq.app.remote.ssh import check_hosts, words
    from embq.fleet.ssh import read_hosts, ssh_launcher

    executable = remote_python or PYTHON
    if launcher in (None, "ssh"):
        if hosts is None:
            raise UsageError("nothing says which machines are meant", next_step="--hosts FILE, or --launcher slurm")
        read = read_hosts(hosts)
        names = [_machine(host) for host in read.values()]
        check_hosts(names, [*read])
        named = dict(zip(names, read.values(), strict=True))
        return ssh_launcher(name, named, words("--ssh-command", ssh_command), executable), names
    if hosts is not None:
        raise UsageError(f"--hosts belongs to ssh, not to --launcher {launcher}", next_step="leave one of them out")
    machines = [f"{name}-{number}" for number in range(count or 0)]
    if launcher == "ray":
        from embq.fleet.ray import ray_launcher

        return ray_launcher(name, ray_address, gpus), machines
    if launcher == "kubernetes":
        from embq.fleet.kubernetes import KubernetesLauncher

        calls, inner = words("--kubectl", kubectl), remote_python or "python"
        pods = KubernetesLauncher(fleet=name, kubectl=calls, image=pod_image, python=inner, gpus=gpus, patch=patch)
        return pods, machines
    from embq.fleet.slurm import SlurmLauncher

    return SlurmLauncher(name, words("--sbatch", sbatch), executable), machines


def _machine(host: str) -> str:
    """The machine's name: the host without its user, in the letters of a broker's user."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", host.rpartition("@")[2]).lstrip("_.-")[:40]


_machines = click.argument("machines", metavar="[MACHINE]...", nargs=-1)


@command.command(
    "up",
    cls=SectionedCommand,
    epilog="Example: embq fleet up --hosts hosts.txt --broker rediss://worker@10.0.0.5:6380 -- --devices cuda",
)
@click.argument("worker", metavar="[-- WORKER_OPTION...]", nargs=-1, type=click.UNPROCESSED)
@fleet_options
@option("--wait", "wait_s", type=click.FloatRange(min=0), default=120.0, metavar="SECONDS", help=_WAIT)
@option("--print", "printed", is_flag=True, help="Print the manifests of Kubernetes with the passwords; apply nothing.")
def up(fleet: Fleet, worker: tuple[str, ...], wait_s: float, printed: bool, as_json: bool) -> Exit:
    """Make a user for each machine, check it with `embq worker --check`, and start a worker on it.

    Prints a row for each machine when its worker reports to the broker, or what failed and what mends it. A machine
    that fails keeps nothing, and a machine that runs stays as it is: the same command again does the rest.

    Exit status: 0, or 69 if a machine fails.
    """
    from embq.app.verbs.services import worker as verb

    parsed = verb.make_context("embq worker", list(worker)).params
    if printed:
        click.echo(fleet.manifests(worker, drain_s=parsed["drain_timeout"]))
        return Exit.DONE
    return print_checks(fleet.up(worker, drain_s=parsed["drain_timeout"], wait_s=wait_s), as_json=as_json)


@command.command("status", cls=SectionedCommand, epilog="Example: embq fleet status --hosts hosts.txt")
@fleet_options
def status(fleet: Fleet, as_json: bool) -> Exit:
    """Show each machine of the fleet: whether its worker runs, and its devices and rates as `embq status` knows them.

    Exit status: 0, or 69 if a worker has ended.
    """
    return print_checks(fleet.status(), as_json=as_json)


@command.command("drain", cls=SectionedCommand, epilog="Example: embq fleet drain gpu2 --hosts hosts.txt")
@_machines
@fleet_options
@option("--drain-timeout", type=click.FloatRange(min=0), default=150.0, metavar="SECONDS", help=_DRAIN)
def drain(fleet: Fleet, machines: tuple[str, ...], drain_timeout: float, as_json: bool) -> Exit:
    """Have machines, all if none is named, finish their begun units and end; the others take what they had claimed.

    Returns when they have ended. `embq fleet up` starts them again, `embq fleet down` removes them.
    """
    return print_checks(fleet.drain(fleet.named(machines), drain_timeout), as_json=as_json)


@command.command("down", cls=SectionedCommand, epilog="Example: embq fleet down --hosts hosts.txt")
@_machines
@fleet_options
def down(fleet: Fleet, machines: tuple[str, ...], as_json: bool) -> Exit:
    """End the workers of machines, of all if none is named, and remove their files, users and passwords.

    Begun units go back to the queue after ten seconds; `embq fleet drain` lets them finish first. A machine that is not
    reached loses its user all the same, so that the broker disconnects its worker.
    """
    return print_checks(fleet.down(fleet.named(machines)), as_json=as_json)
