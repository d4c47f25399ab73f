"""bench/mmoclip/default.yaml under the real JUBE: the figures are those of our own reader of the same logs."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from embq.training.launch.ssh_host import free_port
from embq.training.mmoclip import folder, required
from embq.training.mmoclip.judgement import judge
from tests.support.waiting import wait_until
from tests.training import emulated_slurm
from tests.training.mmoclip_logs import line, whole, write

BENCH = Path(__file__).resolve().parents[2] / "bench" / "mmoclip"
JUBE = os.environ.get("EMBQ_TEST_JUBE") or shutil.which("jube")
needs_jube = pytest.mark.skipif(
    JUBE is None, reason="JUBE is not on PATH; EMBQ_TEST_JUBE may name its command (bench/mmoclip/README.md)"
)


class Bench:
    """A copy of the benchmark's folder, and JUBE's commands in it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.bin = emulated_slurm.commands(place / "bin")
        for name in ("default.yaml", "submit.job.in", "tiny-vit"):
            source = BENCH / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)

    def edit(self, change: Callable[[str], str]) -> None:
        """Change default.yaml, as a user does for a cluster."""
        path = self.place / "default.yaml"
        before = path.read_text()
        path.write_text(change(before))
        assert path.read_text() != before

    def jube(self, *arguments: str) -> str:
        """The output of one command of JUBE, which must end well."""
        done = subprocess.run(
            [str(JUBE), *arguments],
            cwd=self.place,
            env={**os.environ, "PATH": f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def rows(self) -> list[dict[str, str]]:
        """The table of `jube result`."""
        told = self.jube("result", "-a", "bench_run", "--style", "csv")
        return list(csv.DictReader(io.StringIO(told[told.index("nodes,") :].strip())))

    def work(self) -> list[Path]:
        """The working folders of all trainings."""
        return sorted(self.place.glob("bench_run/000000/*_submit/work"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def same_figures(row: dict[str, str], work: Path) -> None:
    """JUBE's row says what our reader says."""
    figures = judge(folder.find(work)).figures
    assert float(row["done_percent_last"]) == figures.done_percent_last
    assert row["throughput_avg"] == f"{figures.throughput_avg:.2f}"
    assert row["time_per_iteration_secs_avg"] == f"{figures.time_per_iteration_secs_avg:.3f}"
    total = figures.total_time_secs
    assert row["total_time_secs"] == ("nan" if total is None else f"{total:.3f}")


# --- what the file says ---


def nodes_of(tag: str) -> str:
    (parameters,) = (one["parameter"] for one in parametersets() if one["name"] == "systemParameter")
    return str([one["_"] for one in parameters if one["name"] == "nodes" and one.get("tag", tag) == tag][-1])


def parametersets() -> list[dict[str, list[dict[str, str]]]]:
    read: list[dict[str, list[dict[str, str]]]] = yaml.safe_load((BENCH / "default.yaml").read_text())["parameterset"]
    return read


@pytest.mark.parametrize(
    ("tag", "nodes"),
    [
        ("", "8"),
        ("test", "1"),
        ("scaling", "1,2,4,8,16,32,64,128,256"),
        ("strong_scaling", "4,6,8,12,16"),
        ("cpu", "1"),
    ],
)
def test_the_tags_are_those_of_the_benchmark(tag: str, nodes: str) -> None:
    assert nodes_of(tag) == nodes


def test_the_flags_are_the_ones_that_embq_gives_itself() -> None:
    (parameters,) = (one["parameter"] for one in parametersets() if one["name"] == "trainingParameter")
    flags = next(one["_"] for one in parameters if one["name"] == "flags").split()
    values = {f"${one['name']}": str(one["_"]) for one in reversed(parameters) if "tag" not in one}
    assert [values.get(flag, flag) for flag in flags][: len(required.flags())] == required.flags()


def test_the_job_starts_a_module_that_there_is(tmp_path: Path) -> None:
    (parameters,) = (one["parameter"] for one in parametersets() if one["name"] == "systemParameter")
    starters = [one["_"] for one in parameters if one["name"] == "starter"]
    assert len(starters) == 2
    (line,) = (line for line in (BENCH / "submit.job.in").read_text().splitlines() if line.startswith("#STARTER#"))
    for starter in starters:
        words = line.replace("#STARTER#", starter).replace("#FLAGS#", "--help").split()
        module = words[-2]
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(BENCH.parents[1])},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert "No module named" not in done.stderr
        assert "usage" in done.stdout.lower() + done.stderr.lower(), done.stderr


# --- what JUBE makes of it ---


@needs_jube
def test_a_node_list_becomes_a_job_for_each_of_its_numbers(bench: Bench) -> None:
    (bench.bin / "held").touch()
    bench.jube("run", "default.yaml", "--tag", "scaling")
    jobs = [(work / "submit.job").read_text() for work in bench.work()]
    found = [re.findall(r"--nodes=(\d+)\n.*--time=(\d+)\n", job, re.DOTALL)[0] for job in jobs]
    assert [int(nodes) for nodes, _ in found] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    # One node of four A100 needs 2.8 h; the published eight 21 min.
    assert 190 < int(found[0][1]) < 300
    assert 25 < int(found[3][1]) < 60
    assert not any(re.search(r"#[A-Z_]+#", job) for job in jobs)
    assert "MASTER_ADDR=$(scontrol show hostnames" in jobs[0]
    assert "pip" not in "".join(jobs)


@needs_jube
def test_the_table_of_a_whole_and_of_a_cut_log_is_that_of_our_reader(bench: Bench) -> None:
    (bench.bin / "held").touch()
    bench.edit(lambda text: text.replace('tag: strong_scaling, _: "4,6,8,12,16"', 'tag: strong_scaling, _: "6,8,16"'))
    bench.jube("run", "default.yaml", "--tag", "strong_scaling")
    logs = {
        0: whole(world=24)[:-1],  # cut before its last line, and at 100 % all the same
        1: [*whole(next_s=6.4614)[:-1], line(195, 6.5)],
        2: whole(world=64, next_s=0.1),
    }
    for number, work in enumerate(bench.work()):
        write(work / "logs" / "test", logs[number])
        (work / "ready").touch()
    bench.jube("continue", "bench_run")
    rows = bench.rows()
    assert [row["nodes"] for row in rows] == ["6", "8", "16"]
    assert "(100%)" in logs[0][-1]
    assert ", 327680./s, " in logs[2][-1]
    assert rows[0]["total_time_secs"] == "nan"
    assert float(rows[1]["total_time_secs"]) == pytest.approx(1253.5, abs=0.1)
    assert [row["model"] for row in rows] == ["ViT-L-14"] * 3
    for row, work in zip(rows, bench.work(), strict=True):
        same_figures(row, work)


@needs_jube
@pytest.mark.slow
def test_a_training_on_this_cpu_under_jube_gives_the_figures_of_our_reader(bench: Bench) -> None:
    bench.jube("run", "default.yaml", "--tag", "test", "cpu")
    rows = bench.rows()
    assert [(row["nodes"], row["n_gpu"], row["batch_size"]) for row in rows] == [("1", "1", "16"), ("1", "2", "16")]
    for row, work in zip(rows, bench.work(), strict=True):
        same_figures(row, work)
        assert float(row["total_time_secs"]) > 0
        assert not (work / "logs" / "test" / "checkpoints").exists()


@needs_jube
@pytest.mark.slow
def test_a_queue_that_returns_at_once_is_polled_until_the_job_is_done(bench: Bench) -> None:
    # As on a cluster: sbatch, and srun that gives two tasks their ranks.
    def on_a_cluster(text: str) -> str:
        text = text.replace("tag: cpu, _: bash", "tag: cpu, _: sbatch").replace('tag: cpu, _: "1,2"', "tag: cpu, _: 2")
        return re.sub(r"- name: starter\n +tag: cpu\n", "- name: starter_of_cpus\n", text)

    bench.edit(on_a_cluster)
    job = bench.place / "submit.job.in"
    job.write_text(job.read_text().replace("12802", str(free_port())))
    bench.jube("run", "default.yaml", "--tag", "cpu")
    (work,) = bench.work()
    assert [row["total_time_secs"] for row in bench.rows()] == [""]
    wait_until(lambda: (work / "ready").exists())
    bench.jube("continue", "bench_run")
    (row,) = bench.rows()
    same_figures(row, work)
    figures = judge(folder.find(work)).figures
    assert (figures.world_size, figures.iterations) == (2, 2)
    assert float(row["total_time_secs"]) > 0
