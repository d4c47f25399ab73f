"""torchrun with embq's outcome files: `python -m embq.training.launch.torchrun FLAGS`, with torchrun's own flags.

torchrun's stores listen on all addresses of the machine without authentication, and torchrun unpickles what it reads in
its own, so any client of the port can run code. With --standalone, torchrun's own store is therefore in memory where no
other process needs it, and that of the training listens on the loopback alone.

torchrun itself prints nothing. A process that a signal ended, or a failure of torchrun, becomes an outcome beside those
of the other processes (`embq.training.launch.outcomes`).
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from embq.app.remote.slurm import srun
from embq.core.errors import Exit, UsageError
from embq.core.process.children import PYTHON, python
from embq.core.redaction import masked
from embq.training.launch.outcomes import OUTCOMES, ProcessOutcome, killed

MODULE = "embq.training.launch.torchrun"
LOOPBACK = "127.0.0.1"


def python_command(module: str, arguments: Sequence[str], *, executable: str = PYTHON) -> list[str]:
    """One process, with unbuffered output."""
    return python("-u", "-m", module, *arguments, executable=executable)


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
    executable: str = PYTHON,
) -> list[str]:
    """torchrun on one host. Of several hosts, its store listens on all addresses of the first one.

    Args:
        processes: on this host; "gpu" for one on each of its GPUs.
        nodes: number of hosts; with more than one, `rendezvous` is required.
        node_rank: this host's place. Ranks then follow the order of the hosts, and no host can be replaced. None lets
            torchrun choose, and restart with all hosts after a failure.
        rendezvous: HOST:PORT of the first host, as the others reach it.
        local_address: how the others reach this host, where torchrun chooses; "" for its own name.
        max_restarts: restarts of all processes after one of them failed.
    """
    # Without a folder for logs it makes one in the temporary directory, leaves it there and writes nothing to it.
    command = python("-m", MODULE, "--log-dir", os.devnull, executable=executable)
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
    return [*command, "--no-python", "--", *python_command(module, arguments, executable=executable)]


def restart_environment(max_restarts: int) -> dict[str, str]:
    """Environment of a torchrun that may restart its processes; empty for one that may not.

    Without it they meet in the store of the previous attempt, find the addresses of processes that have ended, and fail
    (dynamic_rendezvous.py of torch 2.15).
    """
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if max_restarts else {}


def srun_command(
    module: str,
    arguments: Sequence[str],
    *,
    nodes: int,
    processes: int,
    cpus: int | None,
    executable: str = PYTHON,
) -> list[str]:
    """Slurm's srun, with a task for each process; MASTER_ADDR and MASTER_PORT have to be in the environment.

    Args:
        processes: on each node.
        cpus: cores of each process; None leaves that to the partition.
    """
    return srun(python_command(module, arguments, executable=executable), nodes=nodes, tasks=processes, cpus=cpus)


def stay_on_loopback() -> None:
    """Make the stores that this process serves from now on listen on the loopback alone."""
    distributed: Any = importlib.import_module("torch.distributed")
    # As an attribute of the package, `rendezvous` is a function.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

    class LoopbackStore(distributed.TCPStore):  # type: ignore[misc]
        """A TCPStore with its own arguments."""

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            **options: Any,
        ) -> None:
            if is_master:
                listening = socket.create_server((LOOPBACK, port))
                port = listening.getsockname()[1]
                options = {**options, "master_listen_fd": listening.detach(), "use_libuv": True}
                host_name = LOOPBACK
            super().__init__(host_name, port, world_size, is_master, **options)

    distributed.TCPStore = rendezvous.TCPStore = LoopbackStore


def _meet_in_memory() -> None:
    """Keep in memory what torchrun writes for torchruns of other machines."""
    distributed: Any = importlib.import_module("torch.distributed")
    backend: Any = importlib.import_module("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
    backend._create_tcp_store = lambda _: distributed.HashStore()


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; returns 0, 130 after a request to stop, or 1 where a process failed."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with mock.patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="FATAL"):  # torch reads it now; the processes have their own
        run: Any = importlib.import_module("torch.distributed.run")
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = run.parse_args(list(arguments))
    member = options.training_script_args
    folder = Path(member[member.index(OUTCOMES) + 1]) if OUTCOMES in member else None
    if options.standalone:
        stay_on_loopback()
        _meet_in_memory()
    try:
        run.run(options)
        return 0
    except SignalException:
        return Exit.INTERRUPTED
    except ChildFailedError as error:
        ended = {rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0}
        host = socket.getfqdn()
        outcomes = [
            ProcessOutcome.of(rank, killed(f"process {rank} on {host}", f"the memory of {host}", number))
            for rank, number in ended.items()
        ]
    except Exception as error:
        if folder is None:
            raise
        text, trace = masked(f"{type(error).__name__}: {error}"), masked(traceback.format_exc())
        outcomes = [ProcessOutcome(rank=-1, status=Exit.BUG, code="launch", message=text, traceback=trace)]
    if folder is not None:
        for outcome in outcomes:
            outcome.write(folder)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
