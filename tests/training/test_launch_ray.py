"""A training on a Ray cluster: a real head, real workers; and whatever else may answer at its address."""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from embq.app.remote.ray_cluster import FilteredStream, check_answer
from embq.core.broker.embedded import server_binary
from embq.core.errors import AwayError, ConfigError, UsageError
from embq.core.process.limits import cores
from embq.training.launch.launch_options import check_address
from embq.training.launch.ray import share_cores
from embq.training.launch.ssh_host import free_port
from tests.support.servers.storage import serving
from tests.support.waiting import wait_until
from tests.training.launching import alive, finished, ranks, started
from tests.training.ray_cluster import QUIET, ray_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    pytest.importorskip("ray", reason="Ray is an extra of its own: pip install 'embq[ray]'")
    with ray_cluster(3) as address:
        yield address


@pytest.mark.parametrize("text", ["", "auto", "local", "10.0.0.1:26379", "head.example.org:26379", "[::1]:26379"])
def test_addresses_of_a_head_are_taken(text: str) -> None:
    check_address(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://10.0.0.1:6379", "--ray-address 10.0.0.1:6379"),
        ("redis://10.0.0.1:6379/", "--ray-address 10.0.0.1:6379"),
        ("ray://10.0.0.1:10001", "call embq on a node of the cluster"),
        ("10.0.0.1", "such as 10.0.0.1:26379, or auto"),
        ("10.0.0.1:99999", "such as 10.0.0.1:26379, or auto"),
        ("a b:1", "such as 10.0.0.1:26379, or auto"),
    ],
)
def test_what_is_no_address_is_refused_with_the_right_form(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_address(text)
    assert said in refused.value.next_step


def test_where_nobody_answers_the_command_that_starts_a_head_is_told() -> None:
    with pytest.raises(AwayError, match="no Ray answers at ") as refused:
        check_answer(f"127.0.0.1:{free_port()}")
    assert "ray start --head --port=26379" in refused.value.next_step
    assert refused.value.exit_code == 69


@pytest.mark.parametrize("password", ["", "secret"])
def test_a_redis_at_the_address_is_told_from_a_ray(tmp_path: Path, password: str) -> None:
    port = free_port()
    command = [str(server_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen([*command, "--requirepass", password], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port), 20)
        with pytest.raises(ConfigError, match=f"a Redis answers at 127.0.0.1:{port}, not Ray") as refused:
            check_answer(f"127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(20)
    assert "6379, which Ray takes by default, is also Redis' port" in refused.value.next_step


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_web_server_at_the_address_is_told_from_a_ray() -> None:
    with serving(BaseHTTPRequestHandler) as port, pytest.raises(ConfigError, match="another program answers at"):
        check_answer(f"127.0.0.1:{port}")


def test_lines_of_ray_that_say_nothing_of_the_training_are_dropped() -> None:
    shown = io.StringIO()
    screen = FilteredStream(shown)
    for text in ("a", "\n", "(PlacementGroupCleaner pid=1) Failed", "\nb\nc"):
        screen.write(text)
    assert shown.getvalue() == "a\nb\n"


@pytest.mark.slow
def test_two_workers_of_a_cluster_train_together(cluster: str, tmp_path: Path) -> None:
    given = ("--ray-address", cluster, "--device", "cpu", "--num-devices", "2")
    done = finished(*given, "--", str(tmp_path), "--sum", "--status", "3", **QUIET, HOME=str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert {rank: words[1:3] for rank, words in ranks(tmp_path, 2).items()} == {0: ["2", "3"], 1: ["2", "3"]}
    assert done.stdout == "here is 0 of 2\n"
    assert "PlacementGroupCleaner" not in done.stderr
    assert not list(tmp_path.glob(".ray/auth_token"))


@pytest.mark.slow
def test_the_error_of_a_worker_is_the_last_thing_told_with_its_own_status(cluster: str, tmp_path: Path) -> None:
    given = ("--ray-address", cluster, "--device", "cpu", "--num-devices", "2")
    done = finished(*given, "--", str(tmp_path), "--fail", "1", "--wait", **QUIET)
    assert done.returncode == 65, done.stderr
    assert done.stderr.splitlines()[-2:] == ["error[not_there]: process 1 cannot read it", "  next:  mend it"]


@pytest.mark.slow
def test_a_worker_that_was_killed_is_told_once(cluster: str, tmp_path: Path) -> None:
    given = ("--ray-address", cluster, "--device", "cpu", "--num-devices", "2")
    with started(*given, "--", str(tmp_path), "--wait", **QUIET, TMPDIR=str(tmp_path)) as process:
        os.kill(int(ranks(tmp_path, 2)[1][0]), signal.SIGKILL)
        out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (71, "")
    assert "error[killed]: process 1 died in its Ray worker without a word" in errors
    assert "A worker died" not in errors
    (report,) = tmp_path.glob("embq-training-*.txt")
    assert f"what Ray knows of it is in {report}" in errors


def test_a_worker_has_the_cores_that_the_others_leave_unless_it_was_told_how_many() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(cores() + 1)
        share_cores(1, "3")
        assert torch.get_num_threads() == cores() + 1
        share_cores(1, "")
        assert torch.get_num_threads() == cores()
        share_cores(cores(), "")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_stays_when_the_launch_ends(cluster: str, tmp_path: Path, number: signal.Signals) -> None:
    given = ("--ray-address", cluster, "--device", "cpu", "--num-devices", "2")
    with started(*given, "--", str(tmp_path), "--wait", **QUIET) as process:
        workers = [int(words[0]) for words in ranks(tmp_path, 2).values()]
        os.kill(process.pid, number)
        wait_until(lambda: not alive(workers), 60)
        process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGTERM else -9)


@pytest.mark.slow
def test_more_workers_than_the_cluster_has_places_are_refused(cluster: str, tmp_path: Path) -> None:
    done = finished("--ray-address", cluster, "--device", "cpu", "--num-devices", "4", "--", str(tmp_path), **QUIET)
    assert done.returncode == 78
    assert f"the Ray cluster at {cluster} has 3 CPUs" in done.stderr
    assert "--num-devices 3, or more nodes" in done.stderr
    gpus = finished("--ray-address", cluster, "--", str(tmp_path), **QUIET)
    assert gpus.returncode == 78
    assert f"the Ray cluster at {cluster} has 0 GPUs" in gpus.stderr


@pytest.mark.slow
def test_a_cluster_of_another_ray_is_refused_with_both_versions(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is an extra of its own: pip install 'embq[ray]'")
    with ray_cluster(1, version="2.1.0") as address:
        done = finished("--ray-address", address, "--device", "cpu", "--", str(tmp_path), **QUIET)
    assert done.returncode == 78
    assert f"error[other_versions]: the Ray cluster at {address} has Ray 2.1.0" in done.stderr
    assert f"this machine Ray {ray.__version__}" in done.stderr


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_is_told_from_one_that_is_away(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an extra of its own: pip install 'embq[ray]'")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef"}
    with ray_cluster(1, **token) as address:
        done = finished("--ray-address", address, "--device", "cpu", "--", str(tmp_path), **QUIET)
    assert done.returncode == 78
    assert done.stderr.splitlines() == [
        f"error[ray_away]: the Ray cluster at {address} asks for a token, and takes none of ours",
        "  next:  on every node RAY_AUTH_MODE=token, and in RAY_AUTH_TOKEN_PATH the file of its head's token",
    ]


@pytest.mark.slow
def test_a_cluster_of_our_own_leaves_nothing_behind_and_no_token_in_the_home_of_the_user(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an extra of its own: pip install 'embq[ray]'")
    home = tmp_path / "home"
    home.mkdir()
    given = ("--ray-address", "local", "--device", "cpu", "--num-devices", "1")
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # the names of Ray's sockets are long
    done = finished(*given, "--", str(tmp_path), HOME=str(home), TMPDIR=str(folder))
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith("torchinductor"))
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert not left
    assert not (home / ".ray").exists()
    shutil.rmtree(home)
