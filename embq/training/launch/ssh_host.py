"""A host's part of a training over ssh: `python -m embq.training.launch.ssh_host [[NAME=VALUE]... -- TORCHRUN ...]`.

Without arguments it answers a question about the host, and then runs the torchrun that it is sent; both are lines of
JSON on standard input, and its answers are lines after `MARK`. With arguments, as a dry run prints them, it runs
torchrun at once, and ends as every command of embq does.

sshd does not end what it started when the connection ends. So this watches its standard input, which closes with the
connection, and ends torchrun then. It imports nothing large, so that it answers at once, and without the packages whose
versions it reports.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from threading import Thread
from typing import Any, TypeVar

from embq.core.answers import opener
from embq.core.errors import EmbqError, Exit, InputError
from embq.core.process.children import MARK
from embq.core.process.libraries import version_of
from embq.core.process.limits import cores
from embq.core.redaction import masked
from embq.core.service.stopping import REPEAT_S
from embq.core.settings import Settings
from embq.training.launch.child_process import outcome_folder, run_with_outcomes
from embq.training.launch.devices import gpu_count
from embq.training.launch.outcomes import ProcessOutcome, verdict
from embq.training.shards.names import expand

STDIN, STDOUT = 0, 1
BEAT_S, SILENCE_S = 15.0, 60.0
"""The launching machine writes a line this often, and counts as gone after this long without one."""
REACH_S = 10.0
"""A host that drops what it does not want is only known by its silence."""


def listener(port: int) -> socket.socket:
    """A listening socket on all addresses of this host.

    Args:
        port: 0 for a free one.

    Raises OSError if another program has it.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)


def greet(listening: socket.socket, greeting: bytes) -> None:
    """Send a greeting to every client, until the socket is shut down.

    The client hangs up first. Otherwise the port would be kept from its next user for a minute.
    """
    with ExitStack() as connected, suppress(OSError):
        while True:
            client, _ = listening.accept()
            connected.enter_context(client)
            with suppress(OSError):
                client.sendall(greeting)


def free_port() -> int:
    """A port that is free now."""
    with listener(0) as listening:
        return int(listening.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to a host.

    Attributes:
        inputs: paths and URLs that it has to reach.
        listen: port to listen on until the next line of input, 0 for a free one; None for no port.
        reach: HOST:PORT that it has to reach; "" for none.
        greeting: text that it sends to clients of `listen`, or expects at `reach`; "" for none.
    """

    inputs: Sequence[str] = ()
    listen: int | None = None
    reach: str = ""
    greeting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The answer of a host.

    Attributes:
        python: version of the interpreter.
        torch: version, "" if it is not installed.
        embq: as torch.
        gpus: that a process there sees.
        why: reason why it sees none; "" if it sees some.
        cores: that a process there may use.
        port: on which it listens; 0 if the requested one is taken.
        free: a port that is free.
        missing: inputs that it does not reach, each with the reason.
        unreached: reason why it does not reach HOST:PORT; "" if it does.
    """

    python: str
    torch: str
    embq: str
    gpus: int
    why: str
    cores: int
    port: int = 0
    free: int = 0
    missing: Sequence[Sequence[str]] = ()
    unreached: str = ""


T = TypeVar("T", Question, HostReport)


def from_json(kind: type[T], content: Mapping[str, Any]) -> T:
    """A question or an answer from its fields; those that another version adds are ignored."""
    return kind(**{field.name: content[field.name] for field in fields(kind) if field.name in content})


def report_of(question: Question, stack: ExitStack) -> HostReport:
    """The answer to a question; what has to stay open for it goes on the stack."""
    from embq.worker.supervisor.devices import why_no_gpu

    visible = Settings.from_environment().cuda_visible
    gpus, port = gpu_count(visible), 0
    if question.listen is not None:
        with suppress(OSError):  # another program has the port
            listening = stack.enter_context(listener(question.listen))
            port = listening.getsockname()[1]
            stack.callback(listening.shutdown, socket.SHUT_RDWR)
            Thread(target=greet, args=(listening, question.greeting.encode()), daemon=True).start()
    return HostReport(
        python=platform.python_version(),
        torch=version_of("torch"),
        embq=version_of("embq"),
        gpus=gpus,
        why="" if gpus else why_no_gpu(visible)[0],
        cores=cores(),
        port=port,
        free=free_port(),
        missing=[[name, why] for named in question.inputs for name, why in _out_of_reach(named)],
        unreached=_unreached(question.reach, question.greeting.encode()),
    )


def _out_of_reach(named: str) -> list[tuple[str, str]]:
    """Parts of a path, a URL or an expression that cannot be read here, with reasons.

    Of shards behind http the first and the last are requested.
    """
    if "://" not in named and os.path.exists(named):
        return [] if os.access(named, os.R_OK) else [(named, "not readable")]
    try:
        shards = expand(named)
    except InputError as error:
        return [(named, error.message.removeprefix(f"{named}: "))]
    missing = [(path, "not readable") for path in shards if "://" not in path and not os.access(path, os.R_OK)]
    urls = [url for url in shards if "://" in url]
    return missing + [(url, why) for url in dict.fromkeys(urls[:1] + urls[-1:]) if (why := _unanswered(url))]


def _unanswered(url: str) -> str:
    """Reason why a server does not serve a URL; "" if it does."""
    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
    try:
        with opener(REACH_S).open(request):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"the server answers {error.code}"
    except (OSError, ValueError) as error:
        return masked(str(getattr(error, "reason", error)))


def _unreached(address: str, greeting: bytes) -> str:
    """Reason why HOST:PORT is not reached, or is another program; "" if the expected host answers."""
    host, _, port = address.rpartition(":")
    if not host:
        return ""
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S)
    except OSError as error:
        return error.strerror or str(error)
    with connection, connection.makefile("rb") as received, suppress(OSError):
        if received.read(len(greeting)) == greeting:
            return ""
    return "another machine or program answers there"


def main(arguments: Sequence[str]) -> int:
    """Answer and train, or train alone; returns the status of torchrun, or that of the training.

    Returns when the training or the connection ends.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments:
        dashes = arguments.index("--")
        environment = dict(pair.split("=", 1) for pair in arguments[:dashes])
        return _ended(*_trained(arguments[dashes + 1 :], environment, None))
    with ExitStack() as stack:
        if question := sys.stdin.readline():
            _answer(asdict(report_of(from_json(Question, json.loads(question)), stack)))
        job = sys.stdin.readline()
    if not job:
        return Exit.DONE
    command, environment = json.loads(job)
    outcomes, status = _trained(command, environment, SILENCE_S)
    _answer({"status": status, "outcomes": [asdict(outcome) for outcome in outcomes]})
    return status


def _answer(content: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(content)}\n")
    sys.stdout.flush()


def _trained(
    command: Sequence[str], environment: Mapping[str, str], silence_s: float | None
) -> tuple[list[ProcessOutcome], int]:
    """Run torchrun until it or the connection ends; returns the outcomes of its processes, and its status.

    Args:
        silence_s: see `ended_by_silence`; None for a terminal, which sends nothing.
    """
    with outcome_folder() as folder:
        Thread(target=_stop_with_the_connection, args=(silence_s,), daemon=True).start()
        try:
            return run_with_outcomes(command, folder, environment)
        except KeyboardInterrupt:
            return ProcessOutcome.read(folder), int(Exit.INTERRUPTED)


def _ended(outcomes: Sequence[ProcessOutcome], status: int) -> int:
    """Print the error of a training; returns its exit status."""
    from embq.app.cli.entry_point import show_error

    if status == Exit.INTERRUPTED:
        return status
    try:
        return verdict(outcomes, status)
    except EmbqError as error:
        show_error(error)
        return error.exit_code


def ended_by_silence(source: int, silence_s: float | None) -> bool:
    """Wait for the end of an input; true if nothing came for that many seconds instead, None for any time."""
    while select.select([source], [], [], silence_s)[0]:
        if not os.read(source, 1024):
            return False
    return True


def _stop_with_the_connection(silence_s: float | None) -> None:
    """Stop torchrun when our input ends, and kill it if our output closes later than that.

    A lost connection closes both at the same time, and leaves torchrun the time to end in order.
    """
    if ended_by_silence(STDIN, silence_s):
        sys.stderr.write(f"the launching machine was silent for {silence_s:g} s; this training ends\n")
    os.kill(os.getpid(), signal.SIGTERM)
    connection = select.poll()
    connection.register(STDOUT, 0)  # a closed output is always reported
    if not connection.poll(1000 * REPEAT_S):
        connection.poll()
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
