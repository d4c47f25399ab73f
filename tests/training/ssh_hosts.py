"""A real sshd on a free port of this machine, and two names in an ssh configuration that lead to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from embq.core.process.children import die_with_parent
from embq.training.launch.ssh_host import free_port
from tests.support.waiting import wait_until
from tests.training.launching import environment

SEPARATION = Path("/run/sshd")
"""Folder into which an sshd of root locks its unprivileged part; made by the service, which does not run here."""


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
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("openssh-server is not installed here")
    made = os.geteuid() == 0 and not SEPARATION.exists()
    if made:
        SEPARATION.mkdir(mode=0o755)
    folder.chmod(0o700)
    for name in ("host", "user"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True, stdin=subprocess.DEVNULL)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    port, path = free_port(), environment()["PYTHONPATH"]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nPidFile {folder / 'pid'}\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nPasswordAuthentication no\nPermitRootLogin yes\n"
        f"StrictModes no\nUsePAM no\nSetEnv PYTHONPATH={path}\n",
        encoding="utf-8",
    )
    common = (
        f"HostName 127.0.0.1\nIdentityFile {folder / 'user'}\nIdentitiesOnly yes\nStrictHostKeyChecking accept-new\n"
        f"UserKnownHostsFile {folder / 'known'}\n"
    )
    config, log = folder / "config", folder / "log"
    config.write_text(f"Host one two\nPort {port}\n{common}\nHost gone\nPort {free_port()}\n{common}", encoding="utf-8")
    command = [sshd, "-D", "-e", "-f", str(folder / "sshd_config")]
    with open(log, "wb") as said:
        server = subprocess.Popen(command, stderr=said, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    try:
        wait_until(lambda: b"Server listening" in log.read_bytes() or server.poll() is not None, 20)
        assert server.poll() is None, log.read_text(encoding="utf-8")
        yield Hosts(options=("--ssh-command", f"ssh -F {config}", "--device", "cpu"), config=config, log=log)
    finally:
        server.terminate()
        server.wait(20)
        if made:
            with suppress(OSError):
                SEPARATION.rmdir()
