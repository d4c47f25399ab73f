"""A training on two hosts by ssh: a real sshd, two names for it, torchrun on each."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from embq.core.errors import UsageError
from embq.training.launch.launch_options import Where, meeting_point
from tests.support.waiting import wait_until
from tests.training.launching import alive, descendants, finished, ranks, started
from tests.training.ssh_hosts import Hosts, ssh_hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("sshd")) as made:
        yield made


def on_hosts(folder: Path) -> list[int]:
    """The processes at the other end: all that have the folder among their arguments, but for the launch and ssh."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder).encode() in words and b"embq.training.launch.member" in words:
            found.append(int(line.parent.name))
    return alive(found)


def test_two_hosts_train_together_in_the_order_in_which_they_were_named(hosts: Hosts, tmp_path: Path) -> None:
    shard = tmp_path / "shard.tar"
    shard.touch()
    given = (*hosts.options, "--hosts", "one,two", "--input", str(shard), "--", str(tmp_path), "--sum")
    done = finished(*given)
    assert done.returncode == 0, done.stderr
    assert {rank: words[1:3] for rank, words in ranks(tmp_path, 2).items()} == {0: ["2", "3"], 1: ["2", "3"]}
    assert sorted(done.stdout.splitlines()) == ["[two] here is 1 of 2", "here is 0 of 2"]
    assert "[one] warning of 0" in done.stderr.splitlines()
    assert not on_hosts(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_nothing_stays_on_the_hosts_when_the_launch_ends(hosts: Hosts, tmp_path: Path, number: signal.Signals) -> None:
    given = (*hosts.options, "--hosts", "one,two", "--", str(tmp_path), "--wait")
    with started(*given) as process:
        ranks(tmp_path, 2)
        assert len(on_hosts(tmp_path)) >= 4  # torchrun and worker of each
        here = descendants(process.pid)[1:]
        process.send_signal(number)
        wait_until(lambda: not on_hosts(tmp_path) and not alive(here), 60)
        process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)


@pytest.mark.slow
def test_an_error_on_one_host_ends_the_other_and_is_told_once(hosts: Hosts, tmp_path: Path) -> None:
    done = finished(*hosts.options, "--hosts", "one,two", "--", str(tmp_path), "--fail", "1", "--wait")
    assert done.returncode == 65, done.stderr
    assert done.stderr.splitlines()[-2:] == ["error[not_there]: process 1 cannot read it", "  next:  mend it"]
    assert not on_hosts(tmp_path)


@pytest.mark.slow
def test_the_processes_of_all_hosts_begin_again_after_one_failed(hosts: Hosts, tmp_path: Path) -> None:
    again = ("--fail", "1", "--once", "--wait", "--sum", "--status", "3")
    done = finished(*hosts.options, "--hosts", "one,two", "--max-restarts", "1", "--", str(tmp_path), *again)
    assert done.returncode == 3, done.stderr
    assert sorted(line.rpartition("] ")[2] for line in done.stdout.splitlines()) == sorted(
        2 * ["here is 0 of 2", "here is 1 of 2"]
    )
    assert "error[" not in done.stderr


@pytest.mark.slow
def test_a_connection_that_is_lost_is_told_with_its_host(hosts: Hosts, tmp_path: Path) -> None:
    with started(*hosts.options, "--hosts", "one,two", "--", str(tmp_path), "--wait") as process:
        ranks(tmp_path, 2)
        (victim,) = (
            pid
            for pid in descendants(process.pid)
            if b"two" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ssh\0")
        )
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 69
    assert "error[host_away]: the connection to two ended in the middle of the training" in errors
    assert not on_hosts(tmp_path)


def test_a_host_that_cannot_be_reached_is_told_with_the_command_that_was_tried(hosts: Hosts, tmp_path: Path) -> None:
    done = finished(*hosts.options, "--hosts", "one,gone", "--", str(tmp_path))
    assert done.returncode == 69
    assert "error[host_away]: host gone cannot be reached: ssh: connect to host 127.0.0.1 port" in done.stderr
    assert f"tried: ssh -F {hosts.config} -o BatchMode=yes -o ConnectTimeout=10" in done.stderr
    assert not on_hosts(tmp_path)


def test_a_host_without_embq_or_the_shards_is_told_before_anything_starts(hosts: Hosts, tmp_path: Path) -> None:
    bare = finished(*hosts.options, "--hosts", "one", "--remote-python", "/usr/bin/false", "--", str(tmp_path))
    assert (bare.returncode, "error[host_lacks]: one has no embq to train with as /usr/bin/false" in bare.stderr) == (
        78,
        True,
    )
    inputs = ("--input", str(tmp_path), "--input", f"{tmp_path}/none.tar", "--input", "http://127.0.0.1:1/none.tar")
    lacks = finished(*hosts.options, "--hosts", "one", *inputs, "--", str(tmp_path))
    assert lacks.returncode == 65
    assert f"error[host_lacks]: one cannot read {tmp_path}/none.tar in " in lacks.stderr
    assert ": does not exist, and 1 more" in lacks.stderr
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken_is_told_with_one_that_is_free(hosts: Hosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = finished(*hosts.options, "--hosts", "one,two", "--rendezvous", str(port), "--", str(tmp_path))
    assert done.returncode == 78
    assert f"error[port_taken]: port {port} of one is taken by another program" in done.stderr
    free = done.stderr.partition("--rendezvous ")[2].split()[0]
    with socket.create_server(("127.0.0.1", int(free))):
        pass


def test_a_dry_run_prints_a_line_for_each_host_and_asks_none(hosts: Hosts, tmp_path: Path) -> None:
    given = ("--hosts", "one,gone", "--dry-run", "--remote-python", "/opt/py", "--remote-folder", "/data/my run")
    before = hosts.log.read_bytes()
    done = finished(*hosts.options, *given, "--", str(tmp_path), "it's")
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert (
        "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29500 --nproc-per-node 1 --no-python --"
        in first
    )
    assert "--node-rank 1 " in second
    assert " gone " in second
    assert "/opt/py -P -u -m embq.training.launch.ssh_host" in second
    assert hosts.log.read_bytes() == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hosts": "a,b,a"}, "--hosts: a is named 2 times"),
        ({"hosts": "a,,b"}, "'' is no host"),
        ({"hosts": "a,-oProxyCommand=x"}, "'-oProxyCommand=x' is no host"),
        ({"hosts": "a", "ray_address": "auto"}, "--hosts has ssh start the processes, and --ray-address Ray"),
        ({"hosts": "a", "launcher": "ray"}, "--hosts belongs to --launcher ssh, not to ray"),
        ({"launcher": "ssh"}, "--launcher ssh needs the hosts"),
        ({"rendezvous": "29500"}, "--rendezvous is for trainings on other hosts"),
        ({"ray_address": "auto", "remote_python": "/py"}, "--remote-python is for trainings on other hosts"),
        ({"hosts": "a", "rendezvous": "a:b"}, "--rendezvous a:b: this is no port"),
        ({"hosts": "a", "ssh_command": "ssh -F 'x"}, "--ssh-command ssh -F 'x: No closing quotation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_cannot_be_meant_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Where.from_options(**{"launcher": None, "hosts": "", "ssh_command": "ssh", "ray_address": "", **given})
    assert said in refused.value.message


def test_a_meeting_point_is_a_port_with_or_without_a_host() -> None:
    assert [meeting_point(text) for text in ("", "29500", "a:1", "[::1]:2")] == [
        ("", 0),
        ("", 29500),
        ("a", 1),
        ("[::1]", 2),
    ]
