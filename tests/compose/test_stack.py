"""The stack on one machine, used as people use it: by a laptop that leaves, with workers that come and die."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from tests.compose.engine import (
    Stack,
    address_of_this_machine,
    docker,
    image_of,
    ip_of,
    kill_from_inside,
    own_ids,
    published,
)
from tests.compose.laptop import by_worker, done_units, enqueue_and_leave, notes, run_named_in, workers_heard_of, works
from tests.compose.scan import PORT_NUMBERS, open_ports
from tests.e2e.check import check_complete, read_output
from tests.support.waiting import wait_until

ROWS, UNIT, DIM = 4_000, 20, 16
SLOW = f"stub:{DIM}?ms_per_sample=10"
"""40 s of one worker: long enough to kill two containers in."""
BUDGETS_MB = {"producer": 350, "writer": 400, "worker": 6_700}
"""On top of Python's image, which is the user's choice; 5.2 GB of the worker are torch and CUDA."""
SENTENCES = (
    "a red bicycle leans against a white wall",
    "the committee postponed its vote on the budget until spring",
    "two dogs run along the beach in the evening",
    "water boils at a lower temperature in the mountains",
)


def test_images_keep_to_their_budgets(built: Path, account: dict[str, Any]) -> None:
    own = account["on_top_of_python_mb"]
    assert {role: size for role, size in own.items() if size > BUDGETS_MB[role]} == {}


def test_a_run_of_a_laptop_that_has_left_survives_killed_containers(
    stack: Stack, tmp_path: Path, account: dict[str, Any]
) -> None:
    expected = notes(tmp_path / "laptop", ROWS)
    began = time.monotonic()

    told = enqueue_and_leave(stack, tmp_path / "laptop", "-o", "/out/notes", "-m", SLOW, "--unit-size", str(UNIT))
    run = run_named_in(told)
    wait_until(lambda: done_units(stack, run) >= 10)
    stack.compose("up", "--detach", "--no-build", "--scale", "worker=2", "worker")
    added = time.monotonic()
    wait_until(lambda: len(workers_heard_of(stack)) == 2)
    heard_after_s = time.monotonic() - added
    wait_until(lambda: done_units(stack, run) >= 50)
    first = stack.containers("worker")[0]
    kill_from_inside(first, image_of("producer"))
    wait_until(lambda: done_units(stack, run) >= 80)
    kill_from_inside(stack.containers("broker")[0], image_of("producer"))
    wait_until(lambda: works(lambda: done_units(stack, run) >= 100))
    wait_until(lambda: stack.status(run)["state"] == "done")
    took_s = time.monotonic() - began

    output = check_complete(stack.folder / "out" / "notes", expected, units=ROWS // UNIT, dim=DIM)
    assert "violation" not in stack.compose("run", "--rm", "-T", "embq", "verify", "/out/notes")
    restarts = {name: restarts_of(stack, name) for name in ("broker", "worker", "producer", "writer")}
    # Docker has started again what was killed, and nothing else had to be.
    assert restarts == {"broker": [1], "worker": [0, 1], "producer": [0], "writer": [0]}
    account["laptop_run"] = {
        "rows": len(output.keys),
        "units": len(output.manifest),
        "units_by_worker_process": by_worker(output.tokens),
        "second_worker_in_status_after_s": round(heard_after_s, 1),
        "seconds": round(took_s, 1),
        "restarts": restarts,
    }


def restarts_of(stack: Stack, service: str) -> list[int]:
    """Number of restarts of each container of a service."""
    return sorted(int(docker("inspect", "--format", "{{.RestartCount}}", one)) for one in stack.containers(service))


def test_a_real_model_from_inputs_to_answers(stack: Stack, tmp_path: Path, account: dict[str, Any]) -> None:
    folder = stack.folder / "data"
    lines = [json.dumps({"id": f"s{i}", "text": text}) for i, text in enumerate(SENTENCES)]
    (folder / "sentences.jsonl").write_text("\n".join(lines) + "\n")
    began = time.monotonic()

    stack.compose("run", "--rm", "-T", "embq", "enqueue", "/data/sentences.jsonl", "-o", "/out/real", "-m", "minilm")
    wait_until(lambda: any(one["state"] == "done" and one["output"] == "/out/real" for one in stack.status()["runs"]))
    stack.compose("run", "--rm", "-T", "embq", "index", "/out/real")
    url = f"http://127.0.0.1:{stack.ui_port}"
    question = "someone parked a bike beside a building"
    wait_until(lambda: works(lambda: stack.embq("search", url, question, "--json")))
    answer = json.loads(stack.embq("search", url, question, "--json").splitlines()[-1])

    assert answer["results"][0]["key"] == "s0"
    assert sorted(read_output(stack.folder / "out" / "real").keys) == ["s0", "s1", "s2", "s3"]
    account["minilm_from_enqueue_to_answer_s"] = round(time.monotonic() - began, 1)


def test_strangers_find_nothing_but_what_is_documented(stack: Stack, account: dict[str, Any]) -> None:
    inside = {name: open_ports(f"{stack.project}_default", name) for name in ("broker", "producer", "writer", "ui")}
    inside["worker"] = open_ports(f"{stack.project}_default", ip_of(stack, "worker"))
    # Other programs of this machine may listen there; of the stack's ports none may answer.
    outside = open_ports("bridge", address_of_this_machine()) & {stack.broker_port, stack.ui_port}
    beside = {name: open_ports("bridge", ip_of(stack, name), PORT_NUMBERS) for name in ("broker", "producer", "ui")}

    assert inside == {"broker": {6379}, "producer": {9101}, "writer": {9102}, "worker": {9103}, "ui": {1234}}
    assert outside == set()
    assert beside == {"broker": set(), "producer": set(), "ui": set()}
    assert published(stack) == {
        f"127.0.0.1:{stack.broker_port}->6379/tcp",
        f"127.0.0.1:{stack.tls_port}->6380/tcp",
        f"127.0.0.1:{stack.ui_port}->1234/tcp",
    }
    account["open_ports"] = {
        "in the stack's network": {name: sorted(ports) for name, ports in inside.items()},
        "from outside": sorted(outside),
    }


def test_the_broker_answers_nobody_who_does_not_say_who_he_is(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", stack.broker_port), timeout=10) as line:
        for command in (b"PING", b"INFO", b"KEYS *", b"CONFIG GET dir"):
            line.sendall(command + b"\r\n")
            assert line.recv(200).startswith(b"-NOAUTH")


def test_no_container_runs_as_root_or_holds_a_password_in_its_description(stack: Stack) -> None:
    uid, gid = own_ids()
    secrets = [path.read_text().strip() for path in (stack.folder / "secrets").glob("*/password")]
    for service in ("broker", "producer", "writer", "worker", "ui"):
        for container in stack.containers(service):
            described = docker("inspect", container)
            assert json.loads(described)[0]["Config"]["User"] == f"{uid}:{gid}"
            assert not [secret for secret in secrets if secret in described]
            assert not [secret for secret in secrets if secret in stack.logs(service)]
    assert len(secrets) == 5
