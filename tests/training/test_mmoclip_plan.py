"""The command of each launcher: the benchmark's flags, torchrun's dashes, Slurm's addresses; and what is refused."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from embq.core.errors import ConfigError, UsageError
from embq.training.launch.child_process import MEMBER
from embq.training.launch.torchrun import python_command
from embq.training.mmoclip import required
from embq.training.mmoclip.launch_plan import (
    MODULE,
    BenchmarkRequest,
    LaunchPlan,
    plan,
    processes_here,
    require_allocation,
)
from tests.e2e.session import ended
from tests.training import emulated_slurm

PLACE = Path("/out/now")
REQUIRED = [
    "--dataset-type synthetic",
    "--train-num-samples 3200000",
    "--epochs 1",
    "--model ViT-L-14",
    "--local-loss",
    "--gather-with-grad",
    "--log-every-n-steps 1",
    "--dist-url env://",
    "--name test",
]


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def allocated(folder: Path, monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    """An environment with Slurm's commands."""
    monkeypatch.setenv("PATH", f"{emulated_slurm.commands(folder)}:{os.environ['PATH']}")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def planned(count: int = 1, /, **asked: object) -> LaunchPlan:
    """A plan, of a machine that has the GPUs."""
    return plan(BenchmarkRequest(**asked), count, PLACE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("launcher", "processes"), [("python", 1), ("torchrun", 4), ("srun", 4)])
def test_each_launcher_gets_all_flags_that_the_benchmark_requires(launcher: str, processes: int) -> None:
    command = shlex.join(planned(processes, launcher=launcher).command)
    assert [flag for flag in REQUIRED if flag not in command] == []
    assert "--logs /out/now/logs --batch-size 512 --workers 4 --precision amp --device cuda" in command


def test_open_clip_understands_the_flags_as_they_are_meant() -> None:
    params = pytest.importorskip("open_clip_train.params")
    made = planned(grad_checkpointing=True, torchcompile=True, no_set_device_rank=True)
    read = {name: str(value) for name, value in vars(params.parse_args(list(made.flags))).items()}
    assert required.differences({**read, "world_size": "32"}) == []
    assert read["grad_checkpointing"] == read["torchcompile"] == read["no_set_device_rank"] == "True"


def test_the_optimiser_of_the_tiny_model_is_that_of_vision_transformers() -> None:
    params = pytest.importorskip("open_clip_train.params")
    read = params.parse_args(list(planned(model="local-dir:bench/mmoclip/tiny-vit").flags))
    assert (read.beta2, read.eps) == (0.98, 1.0e-6)


def test_one_process_is_started_by_python_and_several_by_torchrun() -> None:
    assert planned(1).launcher == "python"
    made = planned(4)
    assert made.launcher == "torchrun"
    at = made.command.index("--")
    assert made.command[at - 1] == "--no-python"
    assert "--nproc-per-node 4" in shlex.join(made.command[:at])
    assert "--standalone" in made.command[:at]


def test_torchrun_takes_the_flags_for_the_training() -> None:
    run = pytest.importorskip("torch.distributed.run")
    arguments = list(planned(2).command)
    read = run.get_args_parser().parse_args(arguments[arguments.index("embq.training.launch.torchrun") + 1 :])
    assert [read.training_script, *read.training_script_args] == python_command(MEMBER, [MODULE, *planned(2).flags])


def test_several_nodes_meet_at_the_first() -> None:
    command = shlex.join(planned(4, launcher="torchrun", nodes=8, rendezvous="a:29500").command)
    assert "--nnodes 8" in command
    assert "--rdzv-backend c10d --rdzv-endpoint a:29500" in command


def test_in_a_series_on_a_cpu_each_process_has_the_same_threads() -> None:
    one, two = (planned(count, device="cpu", processes=2, samples=10_000) for count in (1, 2))
    assert one.launcher == "python"
    assert one.environment == two.environment
    assert int(one.environment["OMP_NUM_THREADS"]) >= 1
    assert planned(1, device="cpu", samples=10_000).environment == {}


def test_slurm_gets_tasks_and_the_address_of_the_first_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated(tmp_path / "bin", monkeypatch, SLURM_JOB_NODELIST="jwb0001")
    made = planned(4, launcher="srun", nodes=8, cpus=12)
    assert shlex.join(made.command).startswith("srun --nodes 8 --ntasks-per-node 4 --cpus-per-task 12 ")
    assert made.environment == {"MASTER_ADDR": "localhost", "MASTER_PORT": "12802"}
    assert (made.world_size, made.iterations) == (32, 195)


@pytest.mark.parametrize(
    ("processes", "asked", "said"),
    [
        (2, {"launcher": "python"}, "starts one process"),
        (4, {"launcher": "torchrun", "nodes": 2}, "where they meet"),
        (1, {"samples": 1000}, "the first is never counted"),
        (4, {"rendezvous": "a:29500"}, "several nodes of torchrun"),
        (4, {"cpus": 8}, "torchrun gives none"),
    ],
)
def test_what_cannot_be_is_said_with_the_next_step(processes: int, asked: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        planned(processes, **asked)
    assert error.value.next_step


@pytest.mark.parametrize(
    ("environ", "said"), [({}, "not inside a Slurm allocation"), ({"SLURM_JOB_ID": "1"}, "not inside")]
)
def test_outside_of_an_allocation_srun_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str
) -> None:
    with monkeypatch.context() as nowhere:
        nowhere.setenv("PATH", "")
        with pytest.raises(ConfigError, match="no srun here"):
            require_allocation()
    allocated(tmp_path / "bin", monkeypatch, **environ)
    with pytest.raises(ConfigError, match=said) as error:
        require_allocation()
    assert error.value.next_step


def test_inside_of_an_allocation_srun_has_to_know_the_gpus_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated(tmp_path / "bin", monkeypatch, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="jwb[1-8]")
    with pytest.raises(UsageError, match="how many GPUs"):
        processes_here(BenchmarkRequest(launcher="srun"))
    assert processes_here(BenchmarkRequest(launcher="srun", processes=4)) == 4


def test_gpus_that_are_not_there_are_told_before_anything_starts(tmp_path: Path) -> None:
    status, stdout, stderr = ended(
        "bench", "mmoclip", "--output", tmp_path / "out", environment={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert (status, stdout) == (78, "")
    assert "--device cuda was asked for" in stderr
    assert "--device cpu" in stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_the_command_of_a_machine_that_is_not_this_one(tmp_path: Path) -> None:
    arguments = ["--launcher", "srun", "--nodes", "8", "--num-devices", "4", "--grad-checkpointing", "--dry-run"]
    status, stdout, _ = ended("bench", "mmoclip", *arguments, "--output", tmp_path / "out")
    assert status == 0
    assert stdout.startswith("MASTER_ADDR=FIRST_HOST_OF_THE_ALLOCATION MASTER_PORT=12802 srun --nodes 8 ")
    assert "--grad-checkpointing" in stdout
    assert not (tmp_path / "out").exists()
