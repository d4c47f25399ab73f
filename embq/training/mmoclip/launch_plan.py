"""Plans one training of the benchmark: flags, launcher command and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from embq.core.errors import ConfigError, UsageError
from embq.core.process.limits import cores
from embq.training.launch.child_process import MEMBER
from embq.training.launch.devices import processes_for, thread_share
from embq.training.launch.torchrun import python_command, srun_command, torchrun_command
from embq.training.mmoclip import required
from embq.training.run.options import COUNT, DEVICE, FROM_0, option

MODULE = "embq.training.openclip"
PORT = 12802
"""Port of the process group of a Slurm job, as in the benchmark's own job."""
FIRST_HOST = "FIRST_HOST_OF_THE_ALLOCATION"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest:
    """A training as asked for; None leaves a setting to the machine. The help text of a field is its description."""

    nodes: int = 1
    launcher: str | None = option(
        None,
        "Launcher of the processes; srun inside a Slurm allocation.  [python for one process, else torchrun]",
        click.Choice(["python", "torchrun", "srun"]),
    )
    processes: int | None = option(
        None,
        "Devices per node, with a process each.  [every GPU; one process on the CPU]",
        COUNT,
        metavar="N",
        name="--num-devices",
    )
    rendezvous: str = option(
        "",
        "Address of the first node, for torchrun on several; run the same command on each.",
        metavar="HOST:PORT",
    )
    cpus: int | None = option(None, "Cores per process under srun.", COUNT, metavar="C")
    device: str = option("cuda", "Device to train on, checked before the start.  [cuda]", DEVICE)
    batch_size: int = option(required.BATCH_SIZE, "Samples per GPU.  [512]", COUNT, metavar="N")
    workers: int = option(required.WORKERS, "Processes that read and decode, per device.  [4]", FROM_0, metavar="N")
    precision: str | None = option(
        None,
        "Compute precision, which the benchmark leaves open.  [amp; fp32 on the CPU]",
        click.Choice(["amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32"]),
    )
    grad_checkpointing: bool = option(
        False, "Recompute activations instead of storing them, so that a larger batch fits.", is_flag=True
    )
    torchcompile: bool = option(False, "Compile the model.", is_flag=True)
    no_set_device_rank: bool = option(False, "Under srun, each process sees only its own GPU.", is_flag=True)
    model: str = option(
        required.MODEL,
        "Another model of open_clip, or local-dir:DIR; the result is then not comparable.  [ViT-L-14]",
        metavar="NAME",
        short="-m",
    )
    samples: int = option(
        required.SAMPLES,
        "Number of samples; with another one the result is not comparable.  [3200000]",
        COUNT,
        metavar="N",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training before its start."""

    asked: BenchmarkRequest
    place: Path
    """Folder of this training alone."""
    launcher: str
    processes: int
    """Processes of each node."""
    flags: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Changes to the environment of this process."""

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.asked.nodes * self.processes

    @property
    def iterations(self) -> int:
        """Iterations of the training."""
        return required.iterations(self.asked.samples, self.world_size, self.asked.batch_size)


def processes_here(asked: BenchmarkRequest, environ: Mapping[str, str], srun: str | None) -> int:
    """Processes per node, checked against this machine.

    Args:
        environ: our environment.
        srun: its path; None where it is not there.

    Raises:
        ConfigError: there are fewer GPUs than processes, or srun was asked for outside of a Slurm allocation.
        UsageError: srun needs --num-devices.
    """
    if asked.launcher != "srun":
        one = asked.processes or (1 if asked.launcher == "python" else None)
        return processes_for(asked.device, one)
    in_allocation(environ, srun)
    if asked.processes is None:
        # The GPUs of the other nodes cannot be seen from here.
        raise UsageError(
            "--launcher srun needs to know how many GPUs a node has", next_step="give --num-devices N, one for each"
        )
    return asked.processes


def plan(
    asked: BenchmarkRequest, processes: int, place: Path, environ: Mapping[str, str], *, first_host: str = FIRST_HOST
) -> Plan:
    """Plan the training that was asked for.

    Args:
        processes: of each node.
        place: folder of this training alone; open_clip logs to place/logs/test/out.log.
        environ: our environment.
        first_host: of the Slurm allocation.

    Raises:
        UsageError: the launcher lacks something, or the training would have no second iteration.
    """
    launcher = asked.launcher or ("torchrun" if asked.nodes * processes > 1 else "python")
    _check(asked, launcher, processes)
    flags = _flags(asked, place / "logs")
    environment: dict[str, str] = {}
    if launcher == "srun":
        command = srun_command(MEMBER, [MODULE, *flags], nodes=asked.nodes, processes=processes, cpus=asked.cpus)
        environment |= {"MASTER_ADDR": first_host, "MASTER_PORT": environ.get("MASTER_PORT", str(PORT))}
    elif launcher == "torchrun":
        command = torchrun_command(
            MEMBER, [MODULE, *flags], processes=processes, nodes=asked.nodes, rendezvous=asked.rendezvous
        )
    else:
        command = python_command(MEMBER, [MODULE, *flags])
    if asked.device == "cpu" and launcher != "srun":
        # In a series each process has as many threads as in the largest training.
        threads = thread_share(asked.processes or processes, environ.get("OMP_NUM_THREADS", ""), cores())
        environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    made = Plan(
        asked=asked,
        place=place,
        launcher=launcher,
        processes=processes,
        flags=tuple(flags),
        command=tuple(command),
        environment=environment,
    )
    if made.iterations < 2:
        raise UsageError(
            f"{asked.samples:,} samples for {made.world_size} processes of {asked.batch_size} are {made.iterations} "
            "iterations, and the first is never counted",
            next_step="give fewer processes, a smaller --batch-size, or more --samples",
        )
    return made


def _check(asked: BenchmarkRequest, launcher: str, processes: int) -> None:
    if launcher == "python" and asked.nodes * processes > 1:
        raise UsageError(
            f"--launcher python starts one process, and {asked.nodes * processes} were asked for",
            next_step="take --launcher torchrun, or srun inside a Slurm allocation",
        )
    if launcher == "torchrun" and asked.nodes > 1 and not asked.rendezvous:
        raise UsageError(
            f"torchrun on {asked.nodes} nodes needs to know where they meet",
            next_step="run the same command on each node with --rendezvous HOST:29500, HOST being the first of them",
        )
    if asked.rendezvous and (launcher != "torchrun" or asked.nodes == 1):
        raise UsageError(
            "--rendezvous is where several nodes of torchrun meet", next_step="leave it out, or give --nodes N with it"
        )
    if asked.cpus and launcher != "srun":
        raise UsageError(
            f"--cpus is what srun gives each process, and {launcher} gives none",
            next_step="leave it out; OMP_NUM_THREADS says how many threads a process has",
        )


def _flags(asked: BenchmarkRequest, logs: Path) -> list[str]:
    precision = asked.precision or ("amp" if asked.device == "cuda" else "fp32")
    return [
        *required.flags(model=asked.model, samples=asked.samples, batch_size=asked.batch_size, logs=str(logs)),
        *("--workers", str(asked.workers), "--precision", precision, "--device", asked.device),
        *(["--grad-checkpointing"] if asked.grad_checkpointing else []),
        *(["--torchcompile"] if asked.torchcompile else []),
        *(["--no-set-device-rank"] if asked.no_set_device_rank else []),
    ]


def in_allocation(environ: Mapping[str, str], srun: str | None) -> str:
    """The nodes of the Slurm allocation of this process.

    Args:
        srun: its path; None where it is not there.

    Raises:
        ConfigError: this is no allocation.
    """
    if srun is None:
        raise ConfigError(
            "--launcher srun: there is no srun here, so this is no Slurm cluster",
            next_step="take --launcher torchrun, or go to a node of the cluster",
        )
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes or not environ.get("SLURM_JOB_ID"):
        raise ConfigError(
            "--launcher srun: this is not inside a Slurm allocation (SLURM_JOB_ID is not set)",
            next_step="call it in a job script, or in a shell of `salloc --nodes N`; "
            "bench/mmoclip/submit.job.in is such a script",
        )
    return nodes
