"""Options of the verbs that launch a training, and the addresses in them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

from embq.app.cli.sections import GENERAL, section
from embq.app.remote.ssh import check_hosts, words
from embq.core.errors import UsageError
from embq.training.run.options import COUNT, DEVICE, FROM_0, option, options_of

LAUNCHERS = ("local", "ssh", "ray")
PASSED_ON = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
"""Variables that are passed on to other hosts: they choose the network, and where models come from."""

_HOST_PORT = re.compile(r"(?P<host>[^\s:/@\[\]]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
_SCHEME = re.compile(r"(?P<scheme>[a-z]+)://(?P<rest>.*?)/?")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The machines and devices of a training, and its launcher. The help text of a field is its description.

    `launcher` is "local", "ssh" or "ray"; `hosts` are empty but for ssh. "" and None stand for what the help text
    shows in brackets.
    """

    device: str = option(
        "cuda",
        "Device to train on: all GPUs, unless --num-devices limits them, or the CPU.",
        DEVICE,
    )
    processes: int | None = option(
        None,
        "Devices per host, with a process each; with Ray in total.  [every GPU; one process on the CPU]",
        COUNT,
        metavar="N",
        name="--num-devices",
    )
    launcher: str = option(
        "local",
        "Launcher of the processes.  [ssh with --hosts, ray with --ray-address, else local]",
        click.Choice(LAUNCHERS),
        default=None,
    )
    hosts: tuple[str, ...] = option((), "Hosts to train on together, over ssh: a,b.", default="", metavar="LIST")
    ray_address: str = option(
        "",
        "Head of the Ray cluster to train on; auto for the one of this machine, local to start one.",
        metavar="HOST:PORT",
    )
    max_restarts: int = option(
        0, "Restart all processes from the last checkpoint after a failure, up to N times.", FROM_0, metavar="N"
    )
    rendezvous: str = option(
        "",
        "Address of the first host, as the others reach it.  [as for ssh, with a free port]",
        metavar="[HOST:]PORT",
    )
    ssh_command: tuple[str, ...] = option(
        ("ssh",), "ssh with its options: 'ssh -F cluster.conf'.", default="ssh", metavar="COMMAND"
    )
    remote_python: str = option(
        "", "Python interpreter with embq on the hosts.  [the path of this one]", metavar="PATH"
    )
    remote_folder: str = option("", "Working folder on the hosts.  [the path of this one]", metavar="PATH")
    dry_run: bool = option(False, "Print the commands without running them.", is_flag=True)

    @classmethod
    def from_options(cls, *, launcher: str | None, hosts: str, ssh_command: str, **settings: Any) -> Where:
        """From the options; UsageError if they contradict each other."""
        listed = tuple(host.strip() for host in hosts.split(",")) if hosts else ()
        implied = "ssh" if listed else "ray" if settings["ray_address"] else "local"
        if listed and settings["ray_address"]:
            raise UsageError(
                "--hosts has ssh start the processes, and --ray-address Ray", next_step="leave one of them out"
            )
        if launcher is not None and implied not in (launcher, "local"):
            belongs = "--hosts belongs" if listed else "--ray-address belongs"
            raise UsageError(f"{belongs} to --launcher {implied}, not to {launcher}", next_step="leave one of them out")
        if launcher == "ssh" and not listed:
            raise UsageError("--launcher ssh needs the hosts", next_step="such as --hosts a,b")
        if launcher == "ray" and not settings["ray_address"]:
            settings["ray_address"] = "auto"
        check_hosts(listed)
        for name in () if listed else ("rendezvous", "remote_python", "remote_folder"):
            if settings.get(name):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is for trainings on other hosts", next_step="leave it out, or --hosts a,b")
        check_address(settings["ray_address"])
        meeting_point(settings.get("rendezvous", ""))
        return cls(
            launcher=launcher or implied,
            hosts=listed,
            ssh_command=tuple(words("--ssh-command", ssh_command)) or ("ssh",),
            **settings,
        )


def meeting_point(text: str) -> tuple[str, int]:
    """Host ("" if absent) and port (0 if absent) of `--rendezvous [HOST:]PORT`."""
    host, colon, port = text.rpartition(":")
    if not text:
        return "", 0
    if not port.isdecimal() or not 0 < int(port) < 65536 or (colon and not host.strip("[]")):
        raise UsageError(f"--rendezvous {text}: this is no port", next_step="such as 29500, or 10.0.0.1:29500")
    return host, int(port)


def check_address(text: str) -> None:
    """UsageError, with the right form, for anything but an address of a Ray cluster."""
    if text in ("", "auto", "local"):
        return
    if (match := _SCHEME.fullmatch(text)) and match["scheme"] == "ray":
        raise UsageError(
            f"--ray-address {text}: ray:// is for Ray's client, which cannot hold a training",
            next_step="call embq on a node of the cluster, with the port of its head: --ray-address HOST:26379",
        )
    if match:
        raise UsageError(
            f"--ray-address {text}: an address of Ray has no {match['scheme']}:// before it",
            next_step=f"--ray-address {match['rest'] or 'HOST:26379'}",
        )
    if not (match := _HOST_PORT.fullmatch(text)) or not 0 < int(match["port"]) < 65536:
        raise UsageError(f"--ray-address {text}: this is no HOST:PORT", next_step="such as 10.0.0.1:26379, or auto")


def passed_on() -> dict[str, str]:
    """Those of `PASSED_ON` that are set here."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


def launch_options(function: F) -> F:
    """Add the options of a launcher to a verb, which gets them as one argument `where`."""

    @functools.wraps(function)
    def with_where(*args: Any, **kwargs: Any) -> Any:
        options = {field.name: kwargs.pop(field.name) for field in fields(Where)}
        return function(*args, where=Where.from_options(**options), **kwargs)

    return section("Machines")(options_of(Where)(section(GENERAL)(with_where)))  # type: ignore[return-value]
