"""Faults at the start of a stack, and the messages about them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from embq.core.errors import Exit
from tests.compose.engine import CPU, Stack, checkout, docker, image_of
from tests.compose.laptop import enqueue_and_leave, notes, run_named_in, works
from tests.e2e.check import check_complete
from tests.support.waiting import wait_until

READ_ONLY = """
services:
  producer: {volumes: ["${EMBQ_OUT:-./out}:/out:ro"]}
  writer: {volumes: ["${EMBQ_OUT:-./out}:/out:ro"]}
"""


@pytest.fixture
def stack(built: Path, tmp_path: Path) -> Iterator[Stack]:
    """A stack that is not started yet."""
    stack = Stack(checkout(tmp_path / "box"), files=CPU)
    try:
        yield stack
    finally:
        stack.take_down()


def test_a_port_that_is_taken_is_named(stack: Stack) -> None:
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", stack.broker_port))
        somebody.listen()
        told = stack.compose("up", "--detach", "--no-build", "broker", status=1)
    assert str(stack.broker_port) in told
    assert "address already in use" in told or "port is already allocated" in told


def test_a_machine_without_a_gpu_is_told_of_it_by_docker_and_by_the_worker(stack: Stack) -> None:
    stack.files = CPU[:1]
    docker("tag", image_of("worker"), "embq-worker:test")
    told = stack.compose("up", "--no-build", "--no-deps", "--detach", "worker", status=1)
    assert "nvidia" in told
    # With Docker's runtime and without a device in it.
    told = docker(
        "run", "--rm", "--network=none", image_of("worker"), "worker", "--devices", "cuda", status=Exit.UNAVAILABLE
    )
    assert "no CUDA device" in told
    assert "deploy/docker-compose.cpu.yml" in told
    assert "next:" in told


def test_a_folder_for_outputs_that_cannot_be_written_is_named_and_waited_for(stack: Stack, tmp_path: Path) -> None:
    (stack.folder / "read-only.yml").write_text(READ_ONLY)
    stack.files = (*CPU, "read-only.yml")
    stack.compose("up", "--detach", "--no-build")
    stack.wait_for_health("broker", "producer", "writer")
    expected = notes(tmp_path / "laptop", rows=20)
    told = enqueue_and_leave(stack, tmp_path / "laptop", "-o", "/out/notes", "-m", "stub:8")
    wait_until(lambda: "/out/notes" in stack.logs("writer"))
    waits = stack.status(run_named_in(told))["uploads"][0]["waits"]

    stack.files = CPU
    stack.compose("up", "--detach", "--no-build")
    wait_until(lambda: works(lambda: stack.status(run_named_in(told))["state"] == "done"))

    assert "/out" in waits
    check_complete(stack.folder / "out" / "notes", expected, units=1, dim=8)
