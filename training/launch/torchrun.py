"""torchrun for the processes of one machine: `python -m training.launch.torchrun FLAGS`, with torchrun's own flags.

torchrun's stores listen on all addresses of the machine and ask nobody who they are, and torchrun unpickles what it
reads in its own, so that whoever reaches the port runs code. Here torchrun's own store is in its memory, where no other
process needs it, and that of the training listens on the loopback alone.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from core.errors import UsageError

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


LOOPBACK = "127.0.0.1"


def stay_on_loopback() -> None:
    """Have the stores that this process serves from now on listen on the loopback alone."""
    distributed: Any = importlib.import_module("torch.distributed")
    # Its name in the package is that of a function.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

    class LoopbackStore(distributed.TCPStore):  # type: ignore[misc]
        """A TCPStore; the arguments are its own."""

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            **more: Any,
        ) -> None:
            if is_master:
                listening = socket.create_server((LOOPBACK, port))
                port = listening.getsockname()[1]
                more = {**more, "master_listen_fd": listening.detach(), "use_libuv": True}
                host_name = LOOPBACK
            super().__init__(host_name, port, world_size, is_master, **more)

    distributed.TCPStore = rendezvous.TCPStore = LoopbackStore


def meet_in_memory() -> None:
    """Have torchrun keep in its memory what it says to torchruns of other machines."""
    distributed: Any = importlib.import_module("torch.distributed")
    backend: Any = importlib.import_module("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
    backend._create_tcp_store = lambda _: distributed.HashStore()


if __name__ == "__main__":
    stay_on_loopback()
    meet_in_memory()
    from torch.distributed.run import main

    main()
