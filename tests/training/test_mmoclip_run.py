"""Trainings of a tiny model on this CPU, as a user starts them: figures, loss and pictures; and their early ends."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from embq.training.launch.ssh_host import free_port
from embq.training.mmoclip import folder
from embq.training.mmoclip.judgement import UNFINISHED
from tests.e2e.session import Command, await_in, ended, started
from tests.training import emulated_slurm

pytest.importorskip("open_clip_train")

TINY = Path(__file__).resolve().parents[2] / "bench" / "mmoclip" / "tiny-vit"
ON_CPU = ["--device", "cpu", "--model", f"local-dir:{TINY}", "--batch-size", "16", "--workers", "0"]
SAMPLES = 96


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One and two processes, by one command: its folder, its JSON, and what it said."""
    out = tmp_path_factory.mktemp("mmoclip") / "out"
    arguments = [*ON_CPU, "--samples", str(SAMPLES), "--scaling", "--num-devices", "2", "--json", "--output", str(out)]
    status, stdout, stderr = ended("bench", "mmoclip", *arguments, deadline_s=200)
    assert status == 0, stderr
    return out, json.loads(stdout), stderr


@pytest.mark.slow
def test_a_short_training_has_its_figures_and_the_loss_of_its_batch(tmp_path: Path) -> None:
    arguments = [*ON_CPU, "--samples", "32", "--num-devices", "1", "--json", "--output", str(tmp_path / "out")]
    status, stdout, stderr = ended("bench", "mmoclip", *arguments, deadline_s=200)
    assert status == 0, stderr
    told = json.loads(stdout)
    assert (told["done_percent_last"], told["iterations"], told["comparable"], told["faults"]) == (100, 2, False, [])
    assert told["total_time_secs"] > 0
    assert folder.find(Path(told["log"])).log.losses == (pytest.approx(math.log(16), abs=0.001),) * 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_training_gives_the_columns_of_the_benchmark(series: tuple[Path, dict[str, Any], str], world: int) -> None:
    one = series[1]["trainings"][world - 1]
    assert (one["nodes"], one["n_gpu"], one["world_size"], one["batch_size"]) == (1, world, world, 16)
    assert one["done_percent_last"] == 100
    assert one["iterations"] == one["iterations_expected"] == SAMPLES // world // 16
    assert one["total_time_secs"] > 0
    assert one["total_time_secs"] == pytest.approx(
        one["time_per_iteration_secs_avg"] * one["iterations"] - one["first_iteration_s"], abs=0.001
    )
    assert (one["verdict"], one["comparable"], one["faults"]) == ("not comparable", False, [])
    assert any("ViT-L-14 is required" in reason for reason in one["reasons"])
    assert "it was trained on the CPU" in one["reasons"]
    assert one["extrapolated_secs_on_32_gpus"] is None
    assert one["precision"] == "fp32"
    assert one["versions"]["open_clip_torch"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_loss_is_that_of_the_global_batch(series: tuple[Path, dict[str, Any], str], world: int) -> None:
    one = series[1]["trainings"][world - 1]
    losses = folder.find(Path(one["log"])).log.losses
    assert losses == (pytest.approx(math.log(16 * world), abs=0.001),) * (SAMPLES // world // 16)
    assert one["loss_expected"] == pytest.approx(math.log(16 * world), abs=0.0001)


@pytest.mark.slow
def test_a_rate_of_the_cpu_stands_beside_no_gpus(series: tuple[Path, dict[str, Any], str]) -> None:
    status, stdout, stderr = ended("bench", "mmoclip", series[1]["trainings"][0]["log"])
    assert status == 0, stderr
    assert re.search(r"^[\d.]+ samples/s per process from the second iteration on$", stdout, re.MULTILINE)


@pytest.mark.slow
def test_each_training_has_a_folder_with_its_log_its_figures_and_its_picture(
    series: tuple[Path, dict[str, Any], str],
) -> None:
    out, _, stderr = series
    places = sorted(path for path in out.iterdir() if path.is_dir())
    assert len(places) == 2
    for place in places:
        assert {path.name for path in place.iterdir()} == {
            "console.log", "launch.json", "logs", "result.json", "throughput.png",
        }  # fmt: skip
        assert (place / "throughput.png").read_bytes().startswith(b"\x89PNG")
        assert "--dataset-type synthetic" in stderr
        assert str(place) in stderr
        # The weights have learned nothing.
        assert not (place / "logs" / "test" / "checkpoints").exists()
        assert json.loads((place / "result.json").read_text())["schema"] == 1


@pytest.mark.slow
def test_the_series_has_an_efficiency_and_a_picture(series: tuple[Path, dict[str, Any], str]) -> None:
    out, told, _ = series
    one, two = told["trainings"]
    assert one["efficiency"] == 1
    assert two["efficiency"] == pytest.approx(two["samples_per_s_per_gpu"] / one["samples_per_s_per_gpu"])
    assert json.loads((out / "scaling.json").read_text()) == told
    assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_folder_of_a_training_is_judged_again_as_it_was(series: tuple[Path, dict[str, Any], str]) -> None:
    out, told, _ = series
    place = sorted(path for path in out.iterdir() if path.is_dir())[1]
    status, stdout, _ = ended("bench", "mmoclip", place, "--json")
    assert status == 0
    expected = {name: value for name, value in told["trainings"][1].items() if name != "efficiency"}
    assert json.loads(stdout) == expected


# --- early ends ---


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[Command, Path]]:
    """Two processes that are in the middle of many iterations, and their log."""
    out = tmp_path / "out"
    arguments = [*ON_CPU, "--samples", "1600000", "--num-devices", "2", "--json", "--output", str(out)]
    with started("bench", "mmoclip", *arguments) as command:

        def iterations() -> int:
            return sum(path.read_text().count("Train Epoch") for path in out.glob("*/logs/test/out.log"))

        await_in(command, lambda: iterations() > 3)
        yield command, next(out.glob("*/logs/test/out.log"))


def trainers(command: Command) -> list[psutil.Process]:
    """The processes that train."""
    return [one for one in command.descendants() if "embq.training.launch.torchrun" not in one.cmdline()]


@pytest.mark.slow
def test_a_training_that_is_killed_has_no_total_and_says_how_far_it_was(endless: tuple[Command, Path]) -> None:
    command, _ = endless
    trainers(command)[-1].send_signal(signal.SIGKILL)
    assert command.wait() == 65
    told = json.loads(command.stdout)
    assert told["verdict"] == UNFINISHED
    assert told["total_time_secs"] is None
    assert told["estimated_total_secs"] > told["counted_secs"] > 0
    assert told["faults"][0].startswith(f"unfinished, {told['iterations']} of 50000 iterations")
    assert "signal 9" in told["faults"][0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_stopped_leaves_no_process_and_a_judgement(
    endless: tuple[Command, Path], number: int
) -> None:
    command, log = endless
    trainers(command)
    command.signal(number)
    assert command.wait() == 130
    told = json.loads((log.parents[2] / "result.json").read_text())
    assert (told["verdict"], told["total_time_secs"]) == (UNFINISHED, None)
    assert "it was stopped" in told["faults"][0]
    assert "stopped; what it did until then is in" in command.stderr


@pytest.mark.slow
def test_a_command_that_is_killed_leaves_no_process(endless: tuple[Command, Path]) -> None:
    command, _ = endless
    assert len(trainers(command)) == 2
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL  # and the wait fails where one is left


@pytest.mark.slow
def test_a_training_that_cannot_begin_says_what_open_clip_said(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--model", "ViT-of-nobody", "--samples", "64", "--batch-size", "16"]
    status, stdout, stderr = ended("bench", "mmoclip", *arguments, "--output", tmp_path / "out")
    assert status == 65
    assert "unfinished, no iteration is in the log; the training ended with status" in stdout
    assert "ViT-of-nobody" in stdout, stdout + stderr


@pytest.mark.slow
def test_inside_a_slurm_allocation_srun_starts_the_tasks(tmp_path: Path) -> None:
    path = f"{emulated_slurm.commands(tmp_path / 'bin')}:{os.environ['PATH']}"
    port = str(free_port())
    allocation = {"PATH": path, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": port}
    arguments = [*ON_CPU, "--launcher", "srun", "--num-devices", "2", "--samples", "96", "--json", "--output"]
    status, stdout, stderr = ended("bench", "mmoclip", *arguments, tmp_path / "out", environment=allocation)
    assert status == 0, stderr
    told = json.loads(stdout)
    assert (told["world_size"], told["iterations"]) == (2, 3)
    assert told["loss"] == pytest.approx(math.log(32), abs=0.001)
    assert f"MASTER_ADDR=localhost MASTER_PORT={port} srun --nodes 1 --ntasks-per-node 2" in stderr


@pytest.mark.slow
def test_torchrun_on_two_nodes_has_one_table(tmp_path: Path) -> None:
    meet = ["--launcher", "torchrun", "--nodes", "2", "--rendezvous", f"localhost:{free_port()}"]
    arguments = ["bench", "mmoclip", *ON_CPU, *meet, "--samples", "96", "--json", "--output"]
    with started(*arguments, tmp_path / "a") as one, started(*arguments, tmp_path / "b") as other:
        assert (one.wait(), other.wait()) == (0, 0), one.said + other.said
        first, second = sorted((one, other), key=lambda command: not command.stdout)
        told = json.loads(first.stdout)
        assert (told["nodes"], told["n_gpu"], told["world_size"], told["iterations"]) == (2, 1, 2, 3)
        assert told["total_time_secs"] > 0
        assert second.stdout == ""
        assert "its table is on the node of its first process" in second.stderr
