"""Plans one training of the benchmark: flags, launcher command and environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from embq.core.errors import ConfigError, UsageError
from embq.core.process.limits import cores
from embq.training.launch.child_process import MEMBER
from embq.training.launch.devices import processes_for, threads_of
from embq.training.launch.torchrun import python_command, srun_command, torchrun_command
from embq.training.mmoclip import required
from embq.training.run.options import COUNT, DEVICE, FROM_0, option

MODULE = "embq.training.openclip"
PORT = 12802
"""Port of the process group of a Slurm job, as in the benchmark's own job."""
FIRST_HOST = "FIRST_HOST_OF_THE_ALLOCATION"
SCONTROL_S = 30.0


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
    workers: int = option(
        required.WORKERS, "Worker processes per device, which read and decode.  [4]", FROM_0, metavar="N"
    )
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
        "Model of open_clip, or local-dir:DIR; of others the result is not comparable.  [ViT-L-14]",
        metavar="NAME",
        short="-m",
    )
    samples: int = option(
        required.SAMPLES,
        "Samples to train on; with another one the result is not comparable.  [3200000]",
        COUNT,
        metavar="N",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A training before its start."""

    request: BenchmarkRequest
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
        return self.request.nodes * self.processes

    @property
    def iterations(self) -> int:
        """Iterations of the training."""
        return required.iterations(self.request.samples, self.world_size, self.request.batch_size)


def processes_here(request: BenchmarkRequest) -> int:
    """Processes per node, checked against this machine.

    Raises:
        ConfigError: there are fewer GPUs than processes, or srun was asked for outside of a Slurm allocation.
        UsageError: srun needs --num-devices.
    """
    if request.launcher != "srun":
        return processes_for(request.device, request.processes or (1 if request.launcher == "python" else None))
    require_allocation()
    if request.processes is None:
        # The GPUs of the other nodes cannot be seen from here.
        raise UsageError(
            "--launcher srun needs to know how many GPUs a node has", next_step="give --num-devices N, one for each"
        )
    return request.processes


def new_place(out: Path) -> Path:
    """A folder below `out` that does not exist yet, named after the time."""
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    return next(out / name for name in names if not (out / name).exists()).absolute()


def plan(request: BenchmarkRequest, processes: int, place: Path) -> LaunchPlan:
    """Plan the training that was asked for.

    Args:
        processes: of each node.
        place: folder of this training alone; open_clip logs to place/logs/test/out.log.

    Raises:
        ConfigError: Slurm does not name the first node.
        UsageError: the launcher lacks something, or the training would have no second iteration.
    """
    launcher = request.launcher or ("torchrun" if request.nodes * processes > 1 else "python")
    _check(request, launcher, processes)
    flags = _flags(request, place / "logs")
    environment: dict[str, str] = {}
    if launcher == "srun":
        command = srun_command(MEMBER, [MODULE, *flags], nodes=request.nodes, processes=processes, cpus=request.cpus)
        environment |= {"MASTER_ADDR": first_host(), "MASTER_PORT": os.environ.get("MASTER_PORT", str(PORT))}
    elif launcher == "torchrun":
        command = torchrun_command(
            MEMBER, [MODULE, *flags], processes=processes, nodes=request.nodes, rendezvous=request.rendezvous
        )
    else:
        command = python_command(MEMBER, [MODULE, *flags])
    if request.device == "cpu" and launcher != "srun" and not os.environ.get("OMP_NUM_THREADS"):
        # In a series each process has as many threads as in the largest training.
        environment |= threads_of(request.processes or processes, cores())
    planned = LaunchPlan(
        request=request,
        place=place,
        launcher=launcher,
        processes=processes,
        flags=tuple(flags),
        command=tuple(command),
        environment=environment,
    )
    if planned.iterations < 2:
        raise UsageError(
            f"{request.samples:,} samples for {planned.world_size} processes of {request.batch_size} are "
            f"{planned.iterations} iterations, and the first is never counted",
            next_step="give fewer processes, a smaller --batch-size, or more --samples",
        )
    return planned


def _check(request: BenchmarkRequest, launcher: str, processes: int) -> None:
    if launcher == "python" and request.nodes * processes > 1:
        raise UsageError(
            f"--launcher python starts one process, and {request.nodes * processes} were asked for",
            next_step="take --launcher torchrun, or srun inside a Slurm allocation",
        )
    if launcher == "torchrun" and request.nodes > 1 and not request.rendezvous:
        raise UsageError(
            f"torchrun on {request.nodes} nodes needs to know where they meet",
            next_step="run the same command on each node with --rendezvous HOST:29500, HOST being the first of them",
        )
    if request.rendezvous and (launcher != "torchrun" or request.nodes == 1):
        raise UsageError(
            "--rendezvous is where several nodes of torchrun meet", next_step="leave it out, or give --nodes N with it"
        )
    if request.cpus and launcher != "srun":
        raise UsageError(
            f"--cpus is what srun gives each process, and {launcher} gives none",
            next_step="leave it out; OMP_NUM_THREADS says how many threads a process has",
        )


def _flags(request: BenchmarkRequest, logs: Path) -> list[str]:
    precision = request.precision or ("amp" if request.device == "cuda" else "fp32")
    return [
        *required.flags(model=request.model, samples=request.samples, batch_size=request.batch_size, logs=str(logs)),
        *("--workers", str(request.workers), "--precision", precision, "--device", request.device),
        *(["--grad-checkpointing"] if request.grad_checkpointing else []),
        *(["--torchcompile"] if request.torchcompile else []),
        *(["--no-set-device-rank"] if request.no_set_device_rank else []),
    ]


def require_allocation() -> None:
    """ConfigError outside of a Slurm allocation."""
    if shutil.which("srun") is None:
        raise ConfigError(
            "--launcher srun: there is no srun here, so this is no Slurm cluster",
            next_step="take --launcher torchrun, or go to a node of the cluster",
        )
    if not os.environ.get("SLURM_JOB_NODELIST") or not os.environ.get("SLURM_JOB_ID"):
        raise ConfigError(
            "--launcher srun: this is not inside a Slurm allocation (SLURM_JOB_ID is not set)",
            next_step="call it in a job script, or in a shell of `salloc --nodes N`; "
            "bench/mmoclip/submit.job.in is such a script",
        )


def first_host() -> str:
    """The first node of the Slurm allocation; a placeholder outside of one. ConfigError if Slurm does not name it."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes or not shutil.which("scontrol"):
        return FIRST_HOST
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"scontrol cannot name the nodes of this allocation, {nodes}: {error}",
            next_step="see that `scontrol show hostnames` works in this job",
        ) from error
    return (done.stdout.split() or [FIRST_HOST])[0]
