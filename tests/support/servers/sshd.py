"""Real sshds on free ports of this machine, each a host with a name in one ssh configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from embq.core.process.children import die_with_parent
from tests.support.servers.tls import free_ports
from tests.support.waiting import wait_until

SEPARATION = Path("/run/sshd")
"""Folder into which an sshd of root locks its unprivileged part; made by the service, which does not run here.

It stays: other tests' sshds may use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHosts:
    """Hosts by name, and `gone`, at which nobody answers.

    Attributes:
        config: the ssh configuration.
        logs: name -> log of its sshd.
    """

    config: Path
    logs: Mapping[str, Path]

    @property
    def command(self) -> str:
        """The value of --ssh-command."""
        return f"ssh -F {self.config}"


@contextmanager
def ssh_daemons(folder: Path, names: Mapping[str, Mapping[str, str]]) -> Iterator[SshHosts]:
    """Start an sshd for each entry as the current user, for the length of the block; skips where there is none.

    Args:
        names: names of a host, with spaces between -> the environment of what runs there.
    """
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("openssh-server is not installed here")
    if os.geteuid() == 0:
        SEPARATION.mkdir(mode=0o755, exist_ok=True)
    folder.chmod(0o700)
    for name in ("host", "user"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True, stdin=subprocess.DEVNULL)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    common = (
        f"HostName 127.0.0.1\nIdentityFile {folder / 'user'}\nIdentitiesOnly yes\nStrictHostKeyChecking accept-new\n"
        f"UserKnownHostsFile {folder / 'known'}\n"
    )
    *ports, gone = free_ports(len(names) + 1)
    logs = {}
    with ExitStack() as stack:
        for (name, environment), port in zip(names.items(), ports, strict=True):
            logs[name] = folder / f"log{port}"
            stack.enter_context(_daemon(sshd, folder, port, environment, logs[name]))
        entries = [*zip(names, ports, strict=True), ("gone", gone)]
        config = folder / "config"
        config.write_text("\n".join(f"Host {name}\nPort {port}\n{common}" for name, port in entries))
        yield SshHosts(config=config, logs=logs)


@contextmanager
def _daemon(sshd: str, folder: Path, port: int, environment: Mapping[str, str], log: Path) -> Iterator[None]:
    config = folder / f"sshd_config{port}"
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nPidFile {folder / f'pid{port}'}\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nPasswordAuthentication no\nPermitRootLogin yes\n"
        f"StrictModes no\nUsePAM no\nSetEnv {variables}\n",
        encoding="utf-8",
    )
    with open(log, "wb") as said:
        command = [sshd, "-D", "-e", "-f", str(config)]
        server = subprocess.Popen(command, stderr=said, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    try:
        wait_until(lambda: b"Server listening" in log.read_bytes() or server.poll() is not None, 20)
        assert server.poll() is None, log.read_text(encoding="utf-8")
        yield
    finally:
        server.terminate()
        server.wait(20)
