"""A real sshd on a free port of this machine, and two names in an ssh configuration that lead to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers.sshd import ssh_daemons
from tests.training.launching import environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Two hosts, `one` and `two`, and a third, `gone`, at which nobody answers.

    Attributes:
        options: what a verb is given to reach them.
        config: the ssh configuration.
        log: of the sshd.
    """

    options: tuple[str, ...]
    config: Path
    log: Path


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[Hosts]:
    """Start the sshd as the current user, for the length of the block; skips where there is none to start."""
    with ssh_daemons(folder, {"one two": {"PYTHONPATH": environment()["PYTHONPATH"]}}) as made:
        yield Hosts(
            options=("--ssh-command", made.command, "--device", "cpu"), config=made.config, log=made.logs["one two"]
        )
