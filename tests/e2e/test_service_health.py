"""/healthz and `embq health`: what real services say while the broker, or they themselves, stand still."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from embq.app.broker_admin.certificates import make
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit
from tests.e2e.session import Command, await_in, called, process_ended, started
from tests.support.servers.tls import HOSTS, needs_tls_server, tls_server

SERVICES = {"producer": [], "writer": [], "worker": ["--devices", "cpu"]}
Answer = tuple[int, str]


def ask(url: str, timeout_s: float = 3.0) -> Answer:
    """Status and text; 0 where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (URLError, OSError) as error:
        return 0, str(error)


class Watched:
    """A service with a port of its own."""

    def __init__(self, command: Command) -> None:
        self.command = command
        await_in(command, lambda: "metrics_served" in command.stderr)
        found = re.search(r"url=(http://\S+)/metrics", command.stderr)
        assert found is not None
        self.url = found[1]

    def says(self, status: int, text: str = "") -> None:
        """Wait until it says so."""
        said: list[Answer] = []

        def heard() -> bool:
            said.append(ask(f"{self.url}/healthz"))
            return said[-1][0] == status and text in said[-1][1]

        try:
            await_in(self.command, heard)
        except AssertionError as error:
            raise AssertionError(f"wanted {status} {text!r}, heard {said[-3:]}") from error


@pytest.fixture(params=["writer", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("producer", "worker"))])
def service(request: pytest.FixtureRequest, own_server: EmbeddedServer) -> Iterator[Watched]:
    verb = str(request.param)
    environment = {"EMBQ_BROKER_URL": own_server.url, "EMBQ_METRICS": "0"}
    with ExitStack() as stack:
        yield Watched(stack.enter_context(started(verb, *SERVICES[verb], environment=environment)))


def test_a_service_is_well_until_its_broker_stands_still_or_is_gone_and_well_again_after(
    service: Watched, own_server: EmbeddedServer
) -> None:
    service.says(200, "ok")
    assert own_server.process is not None
    own_server.process.send_signal(signal.SIGSTOP)
    try:
        service.says(503, "the broker has not answered for")
    finally:
        own_server.process.send_signal(signal.SIGCONT)
    service.says(200, "ok")

    own_server.process.kill()
    own_server.process.wait()
    service.says(503, "the broker has not answered for")
    own_server.start()
    service.says(200, "ok")

    service.command.signal(signal.SIGSTOP)
    try:
        assert ask(f"{service.url}/healthz", timeout_s=1.0)[0] == 0, "who stands still cannot answer"
        status, _, told = called("health", "--url", f"{service.url}/healthz")
        assert (status, "error[unwell]" in told) == (Exit.UNAVAILABLE, True)
    finally:
        service.command.signal(signal.SIGCONT)
    service.says(200, "ok")

    status, told, _ = called("health", environment={"EMBQ_METRICS": service.url.rpartition(":")[2]})
    assert (status, told) == (Exit.DONE, "ok\n")
    service.command.signal(signal.SIGTERM)
    assert service.command.wait() == Exit.DONE


@pytest.mark.parametrize("verb", list(SERVICES))
def test_a_port_that_is_taken_is_said_at_once_and_nothing_is_started(verb: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # No broker either: the port comes first.
        status, _, told = called(
            verb, *SERVICES[verb], "--metrics", str(port), environment={"EMBQ_BROKER_URL": "redis://127.0.0.1:1"}
        )
    assert status == Exit.TRY_LATER
    assert told.splitlines() == [
        f"error[port_in_use]: port {port} of 127.0.0.1 is taken by another program",
        "  next:  stop that program, or take another port with --metrics or EMBQ_METRICS; 0 finds a free one",
    ]


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "said"),
    [
        ([], {}, Exit.CONFIG, "error[config]: nothing says which service is meant"),
        (["--url", "file:///etc/passwd"], {}, Exit.CONFIG, "is no URL of a service"),
        ([], {"EMBQ_METRICS": "box"}, Exit.CONFIG, "EMBQ_METRICS: 'box' is not [HOST:]PORT"),
        (["--url", "http://127.0.0.1:1/healthz"], {}, Exit.UNAVAILABLE, "error[unwell]: no service answers at"),
    ],
    ids=["nothing set", "a file", "a setting that is none", "nobody there"],
)
def test_a_health_check_that_cannot_be_made_says_why(
    arguments: list[str], environment: dict[str, str], status: Exit, said: str
) -> None:
    ended = called("health", *arguments, environment={"EMBQ_METRICS": None, **environment})
    assert ended[0] == status
    assert said in ended[2]
    assert "  next:  " in ended[2]


@needs_tls_server
def test_a_service_hears_a_broker_by_tls_and_with_a_password_too(tmp_path: Path) -> None:
    make(tmp_path / "secrets", HOSTS, 825)
    (tmp_path / "password").write_text("kept-apart\n")
    with tls_server(tmp_path / "data", tmp_path / "secrets", "requirepass kept-apart") as server:
        environment = {
            "EMBQ_BROKER_URL": server.url(),
            "EMBQ_BROKER_PASSWORD_FILE": str(tmp_path / "password"),
            "EMBQ_BROKER_CA": server.ca,
            "EMBQ_METRICS": "0",
        }
        with started("producer", environment=environment) as command:
            service = Watched(command)
            service.says(200, "ok")
            status, told = ask(f"{service.url}/metrics")
            assert (status, "embq_broker_up 1.0" in told) == (200, True)
            server.process.kill()
            service.says(503, "the broker has not answered for")
            status, told = ask(f"{service.url}/metrics")
            assert (status, "embq_broker_up 0.0" in told, "embq_runs" in told) == (200, True, False)
            assert "kept-apart" not in told + ask(f"{service.url}/healthz")[1]


@pytest.mark.slow
def test_the_services_of_one_command_do_not_fight_for_the_port_of_a_resident_one(tmp_path: Path) -> None:
    """`embq run` in a shell in which EMBQ_METRICS is set for a service."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"id": "a", "text": "one"}\n')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = {"EMBQ_METRICS": str(listener.getsockname()[1])}
        arguments = ("run", texts, "-o", tmp_path / "out", "-m", "stub:4", "--quiet")
        status, _, told = process_ended(*arguments, environment=environment)
    assert status == Exit.DONE, told
    assert "metrics_served" not in "".join(log.read_text() for log in (tmp_path / "out" / "_logs").iterdir())


def test_a_process_that_is_killed_is_counted_and_its_place_is_taken_again(own_server: EmbeddedServer) -> None:
    environment = {"EMBQ_BROKER_URL": own_server.url, "EMBQ_METRICS": "0"}
    with started("worker", "--devices", "cpu", environment=environment) as command:
        service = Watched(command)

        def told(line: str) -> bool:
            return line in ask(f"{service.url}/metrics")[1].splitlines()

        await_in(command, lambda: told('embq_slots{device="cpu",state="idle"} 1.0'))
        (process,) = command.workers()
        process.kill()
        await_in(command, lambda: told('embq_slot_deaths_total{device="cpu",status="-9"} 1.0'))
        await_in(command, lambda: told('embq_slots{device="cpu",state="idle"} 1.0'))
        service.says(200, "ok")
