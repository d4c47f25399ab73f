"""A Slurm of one node on this machine: munge, slurmctld and slurmd with ports, keys and folders of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from embq.core.process.children import die_with_parent
from tests.support.servers.tls import free_ports
from tests.support.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """
ClusterName=embq
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
# A job that is queued again waits for the end of its credential: 2 minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=10
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=n1 Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of Slurm's commands, while the cluster runs; skips where it cannot be started."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"slurmctld, slurmd, slurm-client and munge are not all installed here: no {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("slurmd starts jobs as root")
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    key, configuration = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    configuration.write_text(
        CONFIGURATION.format(folder=folder, host=socket.gethostname().partition(".")[0], ports=free_ports(2))
    )
    environment = {"SLURM_CONF": str(configuration), "PATH": path}
    own = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *own]
    with ExitStack() as stack:
        stack.enter_context(_daemon(munged, folder / "munged.out", environment))
        wait_until((folder / "munge.socket").exists, 30)
        stack.enter_context(_daemon(["slurmctld", "-D"], folder / "slurmctld.out", environment))
        stack.enter_context(_daemon(["slurmd", "-D", "-N", "n1"], folder / "slurmd.out", environment))

        def said(*command: str) -> str:
            environ = {**os.environ, **environment}
            return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout.strip()

        wait_until(lambda: said("sinfo", "--noheader", "--format", "%T") == "idle", 90)
        try:
            yield environment
        finally:  # the daemons would leave jobs behind
            said("scancel", "--name", "embq-fleet")
            wait_until(lambda: not said("squeue", "--noheader"), 60)


@contextmanager
def _daemon(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    with open(log, "wb") as said:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
