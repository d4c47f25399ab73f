"""`embq fleet` with machines that answer with anything, and with logs of any length."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import embq
from embq.core.errors import AwayError, EmbqError, TryLaterError, UsageError
from embq.core.process.children import MARK
from embq.fleet import launcher
from embq.fleet.kubernetes import KubernetesLauncher
from embq.fleet.launcher import FleetMember
from embq.fleet.member import LeftWorker, fleet_folder
from embq.fleet.slurm import SlurmLauncher
from embq.fleet.ssh import read_hosts, ssh_launcher
from embq.training.launch.ssh_connection import HostConnection, watch

ROW = {"name": "devices", "detail": "no card", "fix": "install one"}
ANSWERS = {
    "{": "malformed",
    "[]": "malformed",
    "[" * 100_000: "malformed",
    json.dumps({"embq": 3, "failed": []}): "malformed",
    json.dumps({"embq": embq.__version__, "failed": [{"name": "devices"}]}): "malformed",
    json.dumps({"embq": embq.__version__, "failed": [ROW] * 101}): "malformed",
    json.dumps({"embq": embq.__version__, "failed": [{**ROW, "detail": "x" * 500_000}]}): "malformed",
    json.dumps({"embq": "0.0.1"}): f"embq 0.0.1 there, {embq.__version__} here",
    json.dumps({"embq": embq.__version__, "failed": [{**ROW, "detail": "\x1b[2Jno card"}]}): "devices: \\x1b[2Jno card",
}


def row_of(answer: Path, *, then: str = "") -> str:
    """The row of a machine that prints a file, and then what a command prints, in place of embq."""
    script = answer.with_name("ssh")
    script.write_text(f"#!/bin/sh\ncat {answer}\n{then}\n")
    script.chmod(0o700)
    with_ssh = ssh_launcher("fleet", {"gpu1": "gpu1"}, [str(script)], "python")
    row = with_ssh.states(["gpu1"])["gpu1"]
    assert row.state == "fail"
    return row.detail


def test_a_machine_that_answers_with_anything_is_a_failed_row(tmp_path: Path) -> None:
    for text, expected in ANSWERS.items():
        (tmp_path / "answer").write_text(f"{MARK}{text}\n")
        assert expected in row_of(tmp_path / "answer"), text[:100]


def test_a_machine_that_sends_for_ever_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "OUTPUT_BYTES", 10_000)
    (tmp_path / "answer").write_text("hello\n")
    assert "signal 9" in row_of(tmp_path / "answer", then="exec cat /dev/zero")
    assert len(row_of(tmp_path / "answer", then="exec cat /dev/zero >&2")) < 4_000


def test_the_last_line_of_a_log_of_terabytes_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = fleet_folder("fleet") / "gpu1.log"
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.seek(1 << 40)  # a hole
        file.write(b"\nerror: no broker\n")
    (row,) = LeftWorker(FleetMember(fleet="fleet", name="gpu1")).state()
    assert row["detail"] == "error: no broker"


# --- what engines answer ---


def engine(folder: Path, name: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command on PATH that prints an answer to `squeue` or `kubectl get`; notes its arguments for the others."""
    (folder / "answer").write_text(answer)
    calls = folder / "calls"
    calls.touch()
    script = f'#!/bin/sh\necho "$0" "$@" >> {calls}\ncase "$0 $1" in *queue*|*get*) cat {folder}/answer;; esac\n'
    for command in (name, "scancel"):
        (folder / command).write_text(script)
        (folder / command).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return calls


HOSTILE_JOBS = {
    "an option for scancel": "--user=root_0|RUNNING|n1",
    "options and spaces": "-u root _0|RUNNING|n1",
    "no id": "_0|RUNNING|n1",
    "no place": "7_0|RUNNING",
    "a state of any length": f"7_0|{'R' * 100_000}|n1",
    "a number without end": f"{'7' * 100_000}_0|RUNNING|n1",
    "a task that is none of ours": "7_1|RUNNING|n1",
    "bytes": "\x00\x1b\ud800".encode(errors="replace").decode(),
}


@pytest.mark.parametrize("line", HOSTILE_JOBS.values(), ids=HOSTILE_JOBS)
def test_a_line_of_squeue_that_is_no_job_is_none(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = engine(tmp_path, "squeue", f"{line}\n", monkeypatch)
    slurm = SlurmLauncher("fleet", (), "python")
    assert slurm.states(["fleet-0"]) == {}
    assert list(slurm.remove(["fleet-0"])) == []
    assert "scancel" not in calls.read_text()


def test_what_squeue_says_of_a_job_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(tmp_path, "squeue", "7_0|PENDING|\x1b[2J(Resources)|x\n", monkeypatch)
    row = SlurmLauncher("fleet", (), "python").states(["fleet-0"])["fleet-0"]
    assert (row.state, row.detail) == ("warn", "pending: \\x1b[2J(Resources)|x")


POD: dict[str, Any] = {
    "kind": "Pod",
    "metadata": {"name": "embq-fleet-0-x", "labels": {"embq-machine": "fleet-0"}},
    "spec": {"nodeName": "n1"},
    "status": {"phase": "Running"},
}
DEPLOYMENT = {**POD, "kind": "Deployment", "spec": {"replicas": 1}}


def pod(**changes: Any) -> str:
    return json.dumps({"items": [DEPLOYMENT, {**POD, **changes}]})


HOSTILE_OBJECTS = {
    "no JSON": "<html>",
    "a list": "[]",
    "no items": "{}",
    "items of any kind": '{"items": [1]}',
    "items without names": '{"items": [{"kind": "Pod"}]}',
    "nesting": '{"items": ' + "[" * 200_000,
    "a number without end": '{"items": ' + "9" * 100_000,
    "labels of any kind": pod(metadata={"name": "x", "labels": {"embq-machine": {}}}),
    "a name that is an option": pod(metadata={"name": "--all", "labels": {"embq-machine": "fleet-0"}}),
    "a name that is a command": pod(metadata={"name": "x;reboot", "labels": {"embq-machine": "fleet-0"}}),
    "states of any kind": pod(status={"containerStatuses": [{"state": {"terminated": "yes"}}]}),
    "containers of any kind": pod(status={"containerStatuses": {"a": 1}}),
    "conditions of any kind": pod(status={"conditions": [{"type": 1, "status": []}]}),
    "a node of any kind": pod(spec={"nodeName": ["n1"]}),
    "replicas of any kind": json.dumps({"items": [{**DEPLOYMENT, "spec": {"replicas": "many"}}]}),
}


@pytest.mark.parametrize("answer", HOSTILE_OBJECTS.values(), ids=HOSTILE_OBJECTS)
def test_objects_of_kubernetes_that_are_none_are_one_error(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(tmp_path, "kubectl", answer, monkeypatch)
    with pytest.raises(EmbqError, match="the answer of Kubernetes is malformed") as caught:
        kubernetes().states(["fleet-0"])
    assert len(caught.value.message) < 1_000


def kubernetes(*command: str) -> KubernetesLauncher:
    return KubernetesLauncher(
        fleet="fleet", kubectl=command or ("kubectl",), image="", python="python", gpus=0, patch=None
    )


def test_what_pods_say_is_escaped_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"containerStatuses": [{"state": {"terminated": {"message": "\x1b[2J" + "x" * 100_000}}}]}
    delayed = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "\x1b[2J" * 100_000}]}
    for status in (failed, delayed, {"phase": "\x1b[2J"}):
        engine(tmp_path, "kubectl", pod(status=status), monkeypatch)
        row = kubernetes().states(["fleet-0"])["fleet-0"]
        assert "\x1b" not in row.detail
        assert len(row.detail) < 4_000


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("exec cat /dev/zero", "failed: \\x00"),
        ("exec cat /dev/zero >&2", "failed: \\x00"),
        ("exec sleep 60", "has not ended within 0.5 s"),
        ("printf '\\033[2Jno' >&2; exit 1", "failed: \\x1b[2Jno"),
    ],
)
def test_an_engine_that_sends_or_waits_for_ever_is_ended(
    command: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that never reads what it is sent."""
    monkeypatch.setattr(launcher, "ENGINE_BYTES", 100_000)
    if "sleep" in command:
        monkeypatch.setattr(launcher, "CHECK_S", 0.5)
    with pytest.raises(TryLaterError) as caught:
        launcher.called(["sh", "-c", command], needs="", see="", stdin="x" * (1 << 20))
    assert told in caught.value.message
    assert len(caught.value.message) < 4_000


def test_a_host_that_would_be_an_option_of_ssh_is_none(tmp_path: Path) -> None:
    marker, hosts = tmp_path / "ran", tmp_path / "hosts.txt"
    for host in (
        f"-oProxyCommand=touch${{IFS}}{marker}",
        "-F/etc/passwd",
        "--",
        "a b",
        "user@",
        "user@-oProxyCommand=x",
    ):
        hosts.write_text(f"{host}\n")
        with pytest.raises(UsageError, match="is no host"):
            read_hosts(hosts)
    assert not marker.exists()


# --- hosts of a training ---


def host(folder: Path, answer: str, then: str = "") -> HostConnection:
    (folder / "said").write_bytes(answer.encode(errors="surrogateescape"))
    return HostConnection("gpu1", ["sh", "-c", f"cat {folder}/said; {then}"], threading.Lock(), prefix="")


HOSTILE_REPORTS = ("{", "[]", "[" * 100_000, "9" * 100_000, '{"python": 3}', '{"status": "0", "outcomes": []}')


@pytest.mark.parametrize("report", HOSTILE_REPORTS, ids=range(len(HOSTILE_REPORTS)))
def test_a_host_of_a_training_that_answers_with_anything_is_one_error(report: str, tmp_path: Path) -> None:
    asked = host(tmp_path, f"{MARK}{report}\n")
    with pytest.raises(AwayError, match="the answer of gpu1 is malformed"):
        asked.answer("python")
    asked.close()
    with pytest.raises(AwayError, match="the connection to gpu1 ended"):
        watch([host(tmp_path, f"{MARK}{report}\n" * 20)])


def test_what_a_host_of_a_training_prints_moves_no_cursor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AwayError) as caught:
        watch([host(tmp_path, f"{MARK}{{}}\nstep\t1\r\x1b]0;title\x07\x9b2J\nno \x1b[2J" + "x" * 100_000)])
    told = capfd.readouterr().out
    assert told.startswith("step\t1\r\\x1b]0;title\\x07\\x9b2J\n")
    assert not set("\x1b\x9b\x07") & set(told + caught.value.message)
    assert len(caught.value.message) < 2_000


def test_a_line_without_end_of_a_host_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("embq.training.launch.ssh_connection.LINE_BYTES", 10_000)
    lengths: list[int] = []
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=lambda text: lengths.append(len(text)), flush=lambda: None))
    with pytest.raises(AwayError):
        watch([host(tmp_path, f"{MARK}{{}}\n", "head -c 100000 /dev/zero | tr '\\0' x")])
    assert (max(lengths), sum(lengths)) == (10_000, 100_000)
