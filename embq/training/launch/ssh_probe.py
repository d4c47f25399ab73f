"""Describes a host before a training starts there: `python -m embq.training.launch.ssh_probe`.

Reads one line of JSON, the question, and writes one line of JSON, the answer. Imports nothing large, so that it
answers at once, and without the packages that it tells the versions of.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from threading import Thread
from typing import TypeVar

from embq.core.errors import ConfigError, InputError
from embq.core.process.limits import cores
from embq.core.redaction import masked
from embq.core.settings import Settings
from embq.training.launch.devices import gpu_count
from embq.training.shards.names import expand


def listener(port: int) -> socket.socket:
    """A listening socket on all addresses of this host.

    Args:
        port: 0 for a free one.

    Raises OSError where another program has it.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)


def greet(listening: socket.socket, greeting: bytes) -> None:
    """Send a greeting to every client, until the socket is shut down.

    Who connects hangs up first. Else the port would be kept from its next user for a minute.
    """
    with ExitStack() as connected, suppress(OSError):
        while True:
            one, _ = listening.accept()
            connected.enter_context(one)
            with suppress(OSError):
                one.sendall(greeting)


def free_port() -> int:
    """A port that is free now."""
    with listener(0) as found:
        return int(found.getsockname()[1])


def taken(host: str, port: int, free: int) -> ConfigError:
    """The error for a rendezvous port on which another program listens."""
    return ConfigError(
        f"port {port} of {host} is taken by another program, maybe by another training",
        next_step=f"--rendezvous {free} is free there; without --rendezvous a free port is found",
        code="port_taken",
    )


REACH_S = 10.0
"""A host that drops what it does not want is only known by its silence."""
PACKAGES = ("torch", "embq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to a host.

    Attributes:
        inputs: paths and URLs that it has to reach.
        listen: port to listen on until the question's stream ends, 0 for a free one; None for no port.
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
        torch: version, "" where it is not installed.
        embq: as torch.
        gpus: that a process there sees.
        why: why it sees none; "" where it sees some.
        cores: that a process there may use.
        port: on which it listens; 0 where the one that was asked for is taken.
        free: a port that is free.
        missing: inputs that it does not reach, each with the reason.
        unreached: why it does not reach HOST:PORT; "" where it does.
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


def from_json(kind: type[T], text: str) -> T:
    """Parse a question or an answer; fields that another version adds are ignored."""
    content = json.loads(text)
    return kind(**{field.name: content[field.name] for field in fields(kind) if field.name in content})


def look(question: Question, stack: ExitStack) -> HostReport:
    """Answer a question; what has to stay open for it goes on the stack."""
    from embq.worker.supervisor.devices import why_no_gpu

    visible = Settings.from_environment().cuda_visible
    gpus, port = gpu_count(visible), 0
    if question.listen is not None:
        try:
            listening = stack.enter_context(listener(question.listen))
        except OSError:
            port = 0
        else:
            port = listening.getsockname()[1]
            stack.callback(listening.shutdown, socket.SHUT_RDWR)
            Thread(target=greet, args=(listening, question.greeting.encode()), daemon=True).start()
    return HostReport(
        python=platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        gpus=gpus,
        why="" if gpus else why_no_gpu(visible)[0],
        cores=cores(),
        port=port,
        free=free_port(),
        missing=[[one, why] for named in question.inputs for one, why in _out_of_reach(named)],
        unreached=_unreached(question.reach, question.greeting.encode()),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _out_of_reach(named: str) -> list[tuple[str, str]]:
    """Parts of a path, a URL or an expression that cannot be read here, with reasons.

    Of shards behind http the first and the last are asked for.
    """
    if "://" not in named and os.path.exists(named):
        return [] if os.access(named, os.R_OK) else [(named, "not readable")]
    try:
        places = expand(named)
    except InputError as error:
        return [(named, error.message.removeprefix(f"{named}: "))]
    missing = [(one, "not readable") for one in places if "://" not in one and not os.access(one, os.R_OK)]
    urls = [one for one in places if "://" in one]
    return missing + [(one, why) for one in dict.fromkeys(urls[:1] + urls[-1:]) if (why := _unanswered(one))]


def _unanswered(url: str) -> str:
    """Why a server does not serve a URL; "" where it does."""
    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
    try:
        with urllib.request.urlopen(request, timeout=REACH_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"the server answers {error.code}"
    except (OSError, ValueError) as error:
        return masked(str(getattr(error, "reason", error)))


def _unreached(address: str, greeting: bytes) -> str:
    """Why HOST:PORT is not reached, or is another program; "" where the expected host answers."""
    host, _, port = address.rpartition(":")
    if not host:
        return ""
    try:
        found = socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S)
    except OSError as error:
        return error.strerror or str(error)
    with found, found.makefile("rb") as said, suppress(OSError):
        if said.read(len(greeting)) == greeting:
            return ""
    return "another machine or program answers there"


def main() -> None:
    """Answer the question on standard input, and stay until that closes."""
    with ExitStack() as stack:
        found = look(from_json(Question, sys.stdin.readline()), stack)
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
