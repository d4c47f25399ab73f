"""A further machine: another project on a network of its own, which shares nothing with the stack but TLS and http."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from embq.core.errors import Exit
from tests.compose.engine import (
    WORKER_CPU,
    Stack,
    address_of_this_machine,
    checkout,
    docker,
    free_port,
    image_of,
    in_container,
    published,
    said,
)
from tests.compose.laptop import by_worker, enqueue_and_leave, notes, run_named_in, workers_heard_of
from tests.compose.scan import open_ports
from tests.e2e.check import check_complete
from tests.support.outputs.build import write_tar
from tests.support.waiting import wait_until

SHARDS, SAMPLES, DIM = 60, 20, 16
SLOW = f"stub:{DIM}?ms_per_sample=10"
SLOWER = f"stub:{DIM}?ms_per_sample=50"
TLS_BROKER = """
FROM {base}
RUN apt-get update -q && apt-get install -y -q --no-install-recommends redis-server \\
 && ln -s /usr/bin/redis-server /usr/local/bin/valkey-server && ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli
"""
"""A server with TLS where the image of the stack has none: Debian's Redis under the names of Valkey."""


@pytest.fixture(scope="module")
def gateway(built: Path) -> str:
    """The address of the box that the others reach."""
    return address_of_this_machine()


@pytest.fixture(scope="module")
def tls_broker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of a broker that was built with TLS, as the official ones are."""
    image = "valkey/valkey:9"
    look = "ldd $(command -v valkey-server) | grep -q libssl && echo yes || echo no"
    if docker("run", "--rm", "--entrypoint=sh", image, "-c", look).endswith("yes"):
        return image
    folder = tmp_path_factory.mktemp("broker")
    (folder / "Dockerfile").write_text(TLS_BROKER.format(base="python:3.11-slim-bookworm"))
    docker("build", "--network=host", "--tag=embq-test-broker-with-tls", folder)
    return "embq-test-broker-with-tls"


@pytest.fixture(scope="module")
def box(built: Path, tmp_path_factory: pytest.TempPathFactory, gateway: str, tls_broker: str) -> Iterator[Stack]:
    """The stack with TLS for other machines and its shards over http."""
    ports = {"EMBQ_BROKER_TLS_PORT": str(free_port(gateway)), "EMBQ_SHARDS_PORT": str(free_port(gateway))}
    stack = Stack(
        checkout(tmp_path_factory.mktemp("box"), tls=True),
        settings={
            "EMBQ_BROKER_IMAGE": tls_broker,
            "EMBQ_BROKER_BIND": gateway,
            "EMBQ_SHARDS_BIND": gateway,
            "EMBQ_ROOTS": f"/data:/out:http://{gateway}:{ports['EMBQ_SHARDS_PORT']}",
            **ports,
        },
    )
    try:
        stack.compose("--profile", "shards", "up", "--detach", "--no-build")
        stack.wait_for_health("broker", "producer", "writer", "worker", "ui")
        yield stack
    finally:
        stack.take_down()


@contextmanager
def further_machine(box: Stack, folder: Path, name: str) -> Iterator[Stack]:
    """A machine as its user makes it: a clone, and the folder of secrets of a user of its own from the box."""
    box.compose("run", "--rm", "-T", "users", "--user", f"worker-{name}")
    checkout(folder)
    secrets = folder / "secrets" / "worker"
    shutil.copytree(box.folder / "secrets" / f"worker-{name}", secrets)
    said("chown", "-R", "--reference", box.folder / "secrets" / "worker" / "password", secrets.parent)
    address = f"{box.settings['EMBQ_BROKER_BIND']}:{box.settings['EMBQ_BROKER_TLS_PORT']}"
    settings = {
        "EMBQ_BROKER_URL": f"rediss://worker-{name}@{address}",
        "EMBQ_MACHINE": name,
        "EMBQ_ROOTS": box.settings["EMBQ_ROOTS"],
    }
    stack = Stack(folder, files=WORKER_CPU, settings=settings)
    try:
        yield stack
    finally:
        stack.take_down()


@pytest.fixture(scope="module")
def other(box: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The second machine."""
    with further_machine(box, tmp_path_factory.mktemp("other"), "gpu2") as stack:
        yield stack


def shards(folder: Path) -> dict[str, bytes]:
    """Write shards of texts; gives what each key's row is computed from."""
    expected: dict[str, bytes] = {}
    for number in range(SHARDS):
        captions = {key: f"caption of {key}".encode() for key in (f"{number:02d}{n:04d}" for n in range(SAMPLES))}
        write_tar(folder / f"{number:02d}.tar", [(f"{key}.txt", caption) for key, caption in captions.items()])
        expected |= captions
    (folder / "secret.txt").write_text("not for everybody")
    return expected


def laptop(box: Stack, *arguments: str, status: int = 0, role: str = "laptop", **changes: str) -> str:
    """`embq` in a container of no network of the stack, over TLS, with a role's folder of secrets."""
    address = f"{box.settings['EMBQ_BROKER_BIND']}:{box.settings['EMBQ_BROKER_TLS_PORT']}"
    environment = {
        "EMBQ_BROKER_URL": f"rediss://{role}@{address}",
        "EMBQ_BROKER_PASSWORD_FILE": "/run/secrets/embq/password",
        "EMBQ_BROKER_CA": "/run/secrets/embq/ca.crt",
        **changes,
    }
    return in_container(
        *arguments,
        image=image_of("producer"),
        networks="bridge",
        mounts={box.folder / "secrets" / role: "/run/secrets/embq"},
        environment=environment,
        status=status,
    )


def test_a_machine_that_shares_no_folder_takes_its_part_of_a_run(
    box: Stack, other: Stack, gateway: str, account: dict[str, Any]
) -> None:
    expected = shards(box.folder / "data")
    url = f"http://{gateway}:{box.settings['EMBQ_SHARDS_PORT']}/{{00..{SHARDS - 1}}}.tar"

    other.compose("run", "--rm", "-T", "worker", "worker", "--check")
    other.compose("up", "--detach", "--no-build")
    wait_until(lambda: len(workers_heard_of(box)) == 2)
    told = laptop(box, "enqueue", url, "--upload", "-o", "/out/shards", "-m", SLOW, "--modality", "text", "--json")
    run = run_named_in(told)
    wait_until(lambda: box.status(run)["state"] == "done")

    output = check_complete(box.folder / "out" / "shards", expected, units=SHARDS, dim=DIM)
    hosts = {
        docker("inspect", "--format", "{{.Config.Hostname}}", one): name
        for name, one in (("box", box.containers("worker")[0]), ("other machine", other.containers("worker")[0]))
    }
    counts = {hosts[worker.split(".")[0]]: units for worker, units in by_worker(output.tokens).items()}
    assert set(counts) == {"box", "other machine"}
    assert "violation" not in box.compose("run", "--rm", "-T", "embq", "verify", "/out/shards")
    mounts = json.loads(docker("inspect", "--format", "{{json .Mounts}}", other.containers("worker")[0]))
    assert {one["Destination"] for one in mounts} == {"/models", "/data", "/run/secrets/embq", "/run/secrets/storage"}
    account["two_networks"] = {"rows": len(output.keys), "units_by_machine": counts}


def test_what_a_laptop_has_sent_is_left_to_the_box(
    box: Stack, other: Stack, tmp_path: Path, account: dict[str, Any]
) -> None:
    expected = notes(tmp_path / "in", 400)
    wait_until(lambda: len(workers_heard_of(box)) == 2)
    told = enqueue_and_leave(box, tmp_path / "in", "-o", "/out/notes", "-m", SLOW, "--unit-size", "20")
    run = run_named_in(told)
    wait_until(lambda: box.status(run)["state"] == "done")

    output = check_complete(box.folder / "out" / "notes", expected, units=20, dim=DIM)
    (worker,) = {name.split(".")[0] for name in by_worker(output.tokens)}
    assert worker == docker("inspect", "--format", "{{.Config.Hostname}}", box.containers("worker")[0])
    assert " inputs_not_here " in docker("logs", other.containers("worker")[0])
    account["sent_along"] = {"rows": len(output.keys), "units_left_to_the_box": 20}


def test_a_third_machine_whose_user_is_revoked_ends_and_the_others_take_its_units(
    box: Stack, other: Stack, gateway: str, tmp_path: Path, account: dict[str, Any]
) -> None:
    expected = shards(box.folder / "data")
    url = f"http://{gateway}:{box.settings['EMBQ_SHARDS_PORT']}/{{00..{SHARDS - 1}}}.tar"
    with further_machine(box, tmp_path / "third", "gpu3") as third:
        third.compose("up", "--detach", "--no-build")
        wait_until(lambda: {one["host"] for one in workers_heard_of(box)} == {"box", "gpu2", "gpu3"})
        told = laptop(box, "enqueue", url, "--upload", "-o", "/out/three", "-m", SLOWER, "--modality", "text", "--json")
        run = run_named_in(told)

        def computing() -> set[str]:
            return {one["name"].split(".")[0] for one in box.status(run)["workers"] if one["unit"]}

        wait_until(lambda: computing() == {"box", "gpu2", "gpu3"})
        box.compose("run", "--rm", "-T", "users", "--remove", "worker-gpu3")
        assert box.status(run)["state"] == "running"
        wait_until(lambda: "the broker's user was removed or has a new password" in third.logs("worker"))
        wait_until(lambda: box.status(run)["state"] == "done")
    counts = by_worker(check_complete(box.folder / "out" / "three", expected, units=SHARDS, dim=DIM).tokens)
    account["three_machines_one_revoked"] = {
        name: sum(units for worker, units in counts.items() if worker.split(".")[0] == name)
        for name in ("box", "gpu2", "gpu3")
    }


def test_shards_are_read_in_ranges_and_nothing_else_is(box: Stack, gateway: str) -> None:
    shards(box.folder / "data")
    address = f"http://{gateway}:{box.settings['EMBQ_SHARDS_PORT']}"

    def status(path: str, *options: str) -> str:
        return said(
            "curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", *options, address + path
        )

    assert status("/00.tar") == "200"
    assert status("/00.tar", "--range", "0-511") == "206"
    assert status("/") == "404"
    assert status("/secret.txt") == "404"
    assert status("/../etc/passwd", "--path-as-is") in ("400", "404")
    assert status("/00.tar", "--request", "PUT") == "403"
    assert status("/00.tar", "--request", "DELETE") == "403"


def test_a_wrong_password_is_told_as_one(box: Stack, tmp_path: Path) -> None:
    told = laptop(box, "status", status=Exit.CONFIG, EMBQ_BROKER_PASSWORD_FILE="/run/secrets/embq/ca.crt")
    assert "does not take this password for the user 'laptop'" in told
    assert "next:" in told


def test_a_role_may_do_what_it_is_for_and_is_told_what_it_may_not(box: Stack, account: dict[str, Any]) -> None:
    run = box.status()["runs"][0]["run"]
    assert laptop(box, "status", run, "--json")
    told = laptop(box, "pause", run, role="worker", status=Exit.CONFIG)
    assert "worker" in told
    assert "next:" in told
    told = laptop(box, "producer", role="laptop", status=Exit.CONFIG)
    assert "laptop" in told
    assert "next:" in told


def test_plain_text_is_not_spoken_on_the_port_for_tls(box: Stack) -> None:
    url = f"redis://laptop@{box.settings['EMBQ_BROKER_BIND']}:{box.settings['EMBQ_BROKER_TLS_PORT']}"
    told = laptop(box, "status", status=Exit.CONFIG, EMBQ_BROKER_URL=url)
    assert "speaks TLS" in told
    assert "write rediss:// instead" in told


def test_a_certificate_of_an_authority_that_nobody_named_is_refused(box: Stack) -> None:
    told = laptop(box, "status", status=Exit.CONFIG, EMBQ_BROKER_CA="")
    assert "certificate" in told
    assert "EMBQ_BROKER_CA" in told


def test_the_box_shows_other_machines_tls_and_shards_and_nothing_else(
    box: Stack, gateway: str, account: dict[str, Any]
) -> None:
    tls, http = int(box.settings["EMBQ_BROKER_TLS_PORT"]), int(box.settings["EMBQ_SHARDS_PORT"])
    asked = (box.broker_port, box.ui_port, tls, http, 6379, 6380, 9101, 9102, 9103)
    found = open_ports("bridge", gateway, asked) - {6379, 6380, 9101, 9102, 9103}
    assert found == {tls, http}
    assert published(box) == {
        f"127.0.0.1:{box.broker_port}->6379/tcp",
        f"127.0.0.1:{box.ui_port}->1234/tcp",
        f"{gateway}:{tls}->6380/tcp",
        f"{gateway}:{http}->8080/tcp",
    }
    account.setdefault("open_ports", {})["from outside, with TLS and shards"] = ["broker, TLS", "shards, http"]
