"""The commands that start the processes of a training: one list of flags behind each launcher's own words."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from core.errors import UsageError
from training.launch.torchrun import LOOPBACK

TORCHRUN = "torch.distributed.run"
ON_ONE_HOST = "training.launch.torchrun"
"""The same, with stores that other machines do not reach."""
EACH_START_ITS_OWN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment of a torchrun that may start its processes again. Else they meet in the store of the start before, find
the addresses of processes that have ended, and fail (dynamic_rendezvous.py of torch 2.15)."""


def python_command(module: str, arguments: Sequence[str], *, python: str = sys.executable) -> list[str]:
    """One process, unbuffered, so that its lines are seen when they are written."""
    return [python, "-u", "-m", module, *arguments]


def torchrun_command(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int | str,
    nodes: int = 1,
    node_rank: int | None = None,
    rendezvous: str = "",
    local_address: str = "",
    max_restarts: int = 0,
    python: str = sys.executable,
) -> list[str]:
    """torchrun, by the name of its module, so that it is the one of this Python.

    On several hosts its store listens on all addresses of the first one, and trusts whoever reaches it.

    Args:
        processes: on this host; "gpu" for one on each of its GPUs.
        nodes: hosts; with more than one, `rendezvous` has to be given.
        node_rank: this host's place. The ranks then follow the order of the hosts, always; no host can be replaced.
            None lets torchrun choose, and start anew with all hosts after a failure.
        rendezvous: HOST:PORT of the first host, as the others reach it.
        local_address: how the others reach this host, where torchrun chooses; "" for its own name.
        max_restarts: how often all processes are started again after one of them failed.
    """
    # Else it makes a folder for logs, into which nothing goes, and leaves it in the temporary directory.
    command = [python, "-m", ON_ONE_HOST if nodes == 1 else TORCHRUN, "--log-dir", os.devnull]
    if nodes == 1:
        command += ["--standalone", "--local-addr", LOOPBACK]
    elif not rendezvous:
        raise UsageError(
            f"{nodes} hosts need to know where they meet", next_step="give HOST:PORT of the first one, such as a:29500"
        )
    elif node_rank is None:
        command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous]
        command += ["--local-addr", local_address] if local_address else []
    else:
        host, _, port = rendezvous.rpartition(":")
        command += ["--nnodes", str(nodes), "--node-rank", str(node_rank)]
        command += ["--master-addr", host.strip("[]"), "--master-port", port]
    command += ["--nproc-per-node", str(processes)]
    command += ["--max-restarts", str(max_restarts)] if max_restarts else []
    # Without the dashes torchrun takes flags of ours that begin like its own, such as --logs, for its own.
    return [*command, "-m", "--", module, *arguments]


def srun_command(
    module: str,
    arguments: Sequence[str],
    *,
    nodes: int,
    processes: int,
    cpus: int | None,
    python: str = sys.executable,
) -> list[str]:
    """Slurm's srun: a task for each process; MASTER_ADDR and MASTER_PORT have to stand in the environment.

    Args:
        processes: on each node.
        cpus: cores for each process; None leaves that to the partition.
    """
    command = ["srun", "--nodes", str(nodes), "--ntasks-per-node", str(processes)]
    command += ["--cpus-per-task", str(cpus)] if cpus else []
    return [*command, *python_command(module, arguments, python=python)]
