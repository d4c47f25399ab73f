"""A training on this machine: its processes, its one outcome, and its end."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import ConfigError, UsageError
from embq.core.process.limits import cores
from embq.core.service.stopping import REPEAT_S
from embq.training.launch.child_process import GRACE_S
from embq.training.launch.devices import gpu_count, processes_for
from embq.training.launch.torchrun import python_command, srun_command, torchrun_command
from tests.support.fakes.nvml import Card, fake_nvml
from tests.support.waiting import wait_until
from tests.training.launching import alive, descendants, environment, finished, ranks, started

CPU = ("--device", "cpu", "--num-devices")


def test_two_processes_share_the_cores_and_have_one_outcome(tmp_path: Path) -> None:
    done = finished(*CPU, "2", "--", str(tmp_path), "--status", "3", TMPDIR=str(tmp_path))
    assert done.returncode == 3, done.stderr
    share = max(1, cores() // 2)
    told = {rank: words[1:] for rank, words in ranks(tmp_path, 2).items()}
    assert told == {0: ["2", "0", str(share)], 1: ["2", "0", str(share)]}
    assert sorted(done.stdout.splitlines()) == ["here is 0 of 2", "here is 1 of 2"]
    thread, *warnings = sorted(done.stderr.splitlines())
    assert thread.startswith("2 processes with ")
    assert warnings == ["warning of 0", "warning of 1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]  # and nothing of torchrun's


def test_one_process_needs_no_torchrun_and_has_all_cores(tmp_path: Path) -> None:
    done = finished("--device", "cpu", "--", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "here is 0 of 1\n", "warning of 0\n")
    assert ranks(tmp_path, 1)[0][1:] == ["1", "0", ""]


def test_the_error_of_a_process_is_told_once_with_its_own_status(tmp_path: Path) -> None:
    done = finished(*CPU, "2", "--", str(tmp_path), "--fail", "1", "--wait", OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    assert done.returncode == 65
    said = [line for line in done.stderr.splitlines() if not line.startswith("warning of ")]
    assert said == ["error[not_there]: process 1 cannot read it", "  next:  mend it"]
    assert not list(tmp_path.glob("embq-launch-*"))


def test_an_exception_of_a_process_is_told_in_a_line_with_the_place_of_the_traceback(tmp_path: Path) -> None:
    done = finished("--device", "cpu", "--", str(tmp_path), "--crash", "0", TMPDIR=str(tmp_path))
    assert done.returncode == 70
    assert "ended with RuntimeError: never heard of" in done.stderr
    assert "Traceback" not in done.stderr
    (report,) = tmp_path.glob("embq-training-*.txt")
    assert str(report) in done.stderr
    assert "never heard of" in report.read_text(encoding="utf-8")


@pytest.mark.parametrize("restarts", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_other_machines_do_not_reach_the_stores_of_one(tmp_path: Path, restarts: str) -> None:
    """Torchrun unpickles what stands in its store, and a store takes it from anybody."""
    with started(*CPU, "2", "--max-restarts", restarts, "--", str(tmp_path), "--sum", "--keep", "--wait") as process:
        ranks(tmp_path, 2)
        family = [psutil.Process(pid) for pid in descendants(process.pid)]
        listening = {
            one.laddr.ip
            for member in family
            for one in member.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }
    assert "127.0.0.1" in listening
    assert not listening & {"::", "0.0.0.0"}


@pytest.mark.slow
def test_of_a_process_that_was_killed_the_signal_is_told(tmp_path: Path) -> None:
    done = finished(*CPU, "2", "--", str(tmp_path), "--die", "1", "--wait", TMPDIR=str(tmp_path))
    assert done.returncode == 71
    told = f"error[killed]: process 1 on {socket.getfqdn()} was ended by signal 9, as the kernel does where memory"
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("victim", ["the command", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_nothing_stays_behind_when_a_parent_is_killed(tmp_path: Path, victim: str) -> None:
    with started(*CPU, "2", "--", str(tmp_path), "--wait", "--stubborn", TMPDIR=str(tmp_path)) as process:
        workers = [int(words[0]) for words in ranks(tmp_path, 2).values()]
        family = descendants(process.pid)
        assert set(workers) <= set(family)
        torchrun = family[1]
        os.kill(process.pid if victim == "the command" else torchrun, signal.SIGKILL)
        wait_until(lambda: not alive([pid for pid in family if pid != process.pid]), 20)
        process.communicate(timeout=60)
    assert process.returncode == (-9 if victim == "the command" else 71)
    assert len(list(tmp_path.glob("embq-launch-*"))) == (victim == "the command")
    assert finished(*CPU, "1", "--", str(tmp_path), TMPDIR=str(tmp_path)).returncode == 0
    assert not list(tmp_path.glob("embq-launch-*"))


def test_a_process_whose_torchrun_was_killed_before_it_began_does_not_begin(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "embq.training.launch.member",
        "--outcomes",
        str(tmp_path),
        "launched",
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment(TORCHELASTIC_RUN_ID="x"), stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 130
    assert not list(tmp_path.iterdir())


@pytest.fixture
def deaf_to_sigint() -> Iterator[None]:
    """Start a command as a script starts one in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_reaches_the_process_and_ends_in_130(
    tmp_path: Path, number: signal.Signals, deaf_to_sigint: None
) -> None:
    with started("--device", "cpu", "--", str(tmp_path), "--wait", TMPDIR=str(tmp_path)) as process:
        (pid,) = (int(words[0]) for words in ranks(tmp_path, 1).values())
        process.send_signal(number)
        _, errors = process.communicate(timeout=GRACE_S - 5)  # and not by force
    assert (process.returncode, errors) == (130, "warning of 0\n\n")
    assert not alive([pid])
    assert not list(tmp_path.glob("embq-launch-*"))


@pytest.mark.slow
def test_a_second_request_to_stop_does_not_wait_for_who_does_not_heed_the_first(tmp_path: Path) -> None:
    with started(*CPU, "2", "--", str(tmp_path), "--wait", "--stubborn", TMPDIR=str(tmp_path)) as process:
        workers = [int(words[0]) for words in ranks(tmp_path, 2).values()]
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        wait_until(lambda: time.monotonic() > asked + REPEAT_S)
        assert alive(workers) == workers
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    wait_until(lambda: not alive(workers), 10)


def test_a_dry_run_prints_the_command_and_starts_nothing(tmp_path: Path) -> None:
    done = finished(*CPU, "2", "--dry-run", "--max-restarts", "1", "--", str(tmp_path), "a b")
    member = python_command("embq.training.launch.member", ["launched", str(tmp_path), "a b"])
    assert done.returncode == 0
    assert done.stdout.startswith("env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ")
    assert done.stdout.endswith(
        "-m embq.training.launch.torchrun --log-dir /dev/null --standalone --local-addr 127.0.0.1 --nproc-per-node 2 "
        f"--max-restarts 1 --no-python -- {shlex.join(member)}\n"
    )
    assert not list(tmp_path.iterdir())


def test_where_no_gpu_is_the_devices_asked_for_and_seen_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        ConfigError, match=r"--device cuda was asked for.*no GPU.*hides them all; it has \d+ cores"
    ) as e:
        processes_for("cuda", None)
    assert "--device cpu" in e.value.next_step
    assert e.value.exit_code == 78


def test_every_visible_gpu_is_used_unless_fewer_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*(Card(uuid=f"GPU-{n}") for n in range(4))))
    assert processes_for("cuda", None) == 3
    assert processes_for("cuda", 2) == 2
    with pytest.raises(ConfigError, match="4 processes were asked for on GPUs, and this machine shows 3"):
        processes_for("cuda", 4)


def test_a_divided_gpu_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    divided = Card(instances=tuple(Card(uuid=f"MIG-{n}") for n in range(3)))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(divided, Card(uuid="GPU-b")))
    assert processes_for("cuda", None) == 1
    with pytest.raises(ConfigError, match="2 processes were asked for on GPUs, and this machine shows 1"):
        processes_for("cuda", 2)


@pytest.mark.gpu
def test_every_gpu_of_this_machine_has_a_process(tmp_path: Path) -> None:
    count = gpu_count(None)
    if not count:
        pytest.skip("needs a CUDA device")
    # One process is started without torchrun, and has no group to sum in.
    done = finished("--", str(tmp_path), *(["--sum"] if count > 1 else []))
    assert done.returncode == 0, done.stderr
    total = str(count * (count + 1) // 2) if count > 1 else "0"
    assert [words[1:3] for words in ranks(tmp_path, count).values()] == [[str(count), total]] * count


def test_no_processes_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "classify", str(tmp_path), "--output", str(tmp_path / "out"), "--num-devices", "0"]) == 2
    assert "--num-devices" in capsys.readouterr().err


def test_each_launcher_has_its_own_words_before_one_list_of_flags() -> None:
    flags = ["--logs", "x"]
    one = python_command("m", flags, executable="py")
    assert one == ["py", "-P", "-u", "-m", "m", "--logs", "x"]
    hosts = torchrun_command("m", flags, processes=4, nodes=2, node_rank=1, rendezvous="a:29500", executable="py")
    torchrun = "py -P -m embq.training.launch.torchrun --log-dir /dev/null --nnodes 2 --node-rank 1"
    torchrun += " --master-addr a --master-port 29500"
    assert " ".join(hosts) == f"{torchrun} --nproc-per-node 4 --no-python -- " + " ".join(one)
    slurm = srun_command("m", flags, nodes=2, processes=4, cpus=6, executable="py")
    assert " ".join(slurm) == "srun --nodes 2 --ntasks-per-node 4 --cpus-per-task 6 " + " ".join(one)
    six = torchrun_command("m", flags, processes=4, nodes=2, node_rank=0, rendezvous="[::1]:29500")
    assert six[six.index("--master-addr") + 1] == "::1"
    with pytest.raises(UsageError, match="2 hosts need to know where they meet"):
        torchrun_command("m", flags, processes=1, nodes=2)
