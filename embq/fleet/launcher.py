"""The launcher interface of `embq fleet`, and what its launchers have in common."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Annotated, Protocol

from msgspec import Meta

import embq
from embq.app.doctor.check import Check
from embq.core import wire
from embq.core.errors import ConfigError, TryLaterError
from embq.core.process.children import MARK, ending, kill, start
from embq.core.redaction import printable

AT_ONCE = 32
"""Machines that are asked at the same time."""
CHECK_S = 600.0
"""Longest check of a machine: the first import of torch from a network disk takes minutes."""
LOOK_S = 1.0
GRACE_S = 30.0
"""Beyond its drain timeout, a worker gives leases back and frees devices."""
OUTPUT_BYTES = 1 << 20
"""Of each stream of a machine; a machine that sends more is cut off."""
ENGINE_BYTES = 64 << 20
"""Of each stream of an engine's command: 600 machines on Kubernetes have 10 MB."""
WATCH_S = 0.05
"""Between two checks of a running command: of its time, and of how much it has sent."""
LOG_BYTES = 64 << 10
"""Read of the end of a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """A machine of a fleet, with what it needs to work.

    Attributes:
        fleet, name: of the fleet, and of the machine within it.
        url: of the broker, with the machine's own user and without the password.
        password: of that user.
        ca: certificate authority that vouches for the broker, as PEM; "" for the system's.
        arguments: options of `embq worker`.
        drain_s: time that it has to finish begun units.
    """

    fleet: str
    name: str
    url: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    arguments: Sequence[str] = ()
    drain_s: float = 0.0

    def order(self) -> str:
        """A line of JSON for `embq.fleet.member`."""
        return json.dumps(asdict(self)) + "\n"


class Launcher(Protocol):
    """Starts and ends workers on machines, by an engine that exists.

    A machine that fails is a failed row with its name; EmbqError is raised where the engine itself cannot be used.
    """

    def start(self, members: Sequence[FleetMember]) -> Iterable[Check]:
        """Check machines with `embq worker --check` and start workers on them, where none run; rows of those that fail.

        An engine with a queue may show failures later, in `states`.
        """

    def states(self, names: Sequence[str]) -> Mapping[str, Check]:
        """What the engine knows: ok for a machine that runs, warn for one that is to run, fail for one that ended."""

    def drain(self, names: Sequence[str], drain_s: float) -> Iterable[Check]:
        """Have machines finish their begun units within `drain_s` seconds and end; rows of those that have not."""

    def remove(self, names: Sequence[str]) -> Iterable[Check]:
        """End what still runs, and remove all that `start` has left on the machines; rows of those that fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A row of a machine's answer."""

    name: wire.ShortText
    detail: wire.LongText
    fix: wire.LongText


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of `embq.fleet.member`.

    Attributes:
        embq: its version.
        failed: what keeps the machine from doing what it was asked.
    """

    embq: wire.Word
    failed: Annotated[Sequence[FailedRow], Meta(max_length=100)] = ()


Ask = Callable[[str, FleetMember], Answer | Check]
"""Asks `embq.fleet.member` on a machine to do something: its answer, or a row that says why there is none."""


class AskingLauncher:
    """A launcher by questions to each machine; see `Launcher`.

    Args:
        install: machine -> the command that installs embq there.
    """

    def __init__(self, fleet: str, request: Ask, install: Callable[[str], str]) -> None:
        self._fleet = fleet
        self._request = request
        self._install = install

    def start(self, members: Sequence[FleetMember]) -> Iterable[Check]:
        """Check and start all machines side by side."""
        return self._all("start", members)

    def states(self, names: Sequence[str]) -> Mapping[str, Check]:
        """Whether workers run; for one that has ended, the last line of its log."""
        failed = {row.name: row for row in self._all("state", self._members(names))}
        return {name: failed.get(name) or Check(name, "ok", "running") for name in names}

    def drain(self, names: Sequence[str], drain_s: float) -> Iterable[Check]:
        """Signal the workers, and wait."""
        return self._all("drain", self._members(names, drain_s))

    def remove(self, names: Sequence[str]) -> Iterable[Check]:
        """End the workers, and remove their files."""
        return self._all("remove", self._members(names))

    def _members(self, names: Sequence[str], drain_s: float = 0.0) -> list[FleetMember]:
        return [FleetMember(fleet=self._fleet, name=name, drain_s=drain_s) for name in names]

    def _all(self, action: str, members: Sequence[FleetMember]) -> Iterator[Check]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for rows in pool.map(lambda member: self._rows(action, member), members):
                yield from rows

    def _rows(self, action: str, member: FleetMember) -> list[Check]:
        answer = self._request(action, member)
        if isinstance(answer, Check):
            return [answer]
        if answer.embq != embq.__version__:
            unequal = f"embq {answer.embq} there, {embq.__version__} here"
            return [Check(member.name, "fail", unequal, self._install(member.name))]
        return rows_of(member.name, answer)


def called(
    command: Sequence[str], *, needs: str, see: str, environment: Mapping[str, str] | None = None, stdin: str = ""
) -> str:
    """Standard output of a command of an engine; ConfigError if there is none, TryLaterError if it fails, does not end
    or sends more than `ENGINE_BYTES`.

    Args:
        needs, see: next steps for the one and the others.
    """
    try:
        status, output, errors = output_of(command, stdin, CHECK_S, environment=environment, most_bytes=ENGINE_BYTES)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = "is not installed here" if missing else f"cannot be started: {error.strerror}"
        raise ConfigError(f"{command[0]} {why}", next_step=needs) from error
    except subprocess.TimeoutExpired as error:
        raise TryLaterError(f"{command[0]} has not ended within {CHECK_S:g} s", next_step=see) from error
    if status:
        detail = printable(" ".join((errors or output)[:500].split())) or ending(status)
        raise TryLaterError(f"{command[0]} failed: {detail}", next_step=see)
    return output


def late(kind: str, running: Callable[[], Mapping[str, str]], seconds: float, fix: str) -> Iterator[Check]:
    """Wait until machines have ended; a row for each that is late.

    Args:
        running: machine -> its job or pod, called by `kind`, of those that have not ended.
        fix: the command that ends one.
    """
    end = time.monotonic() + seconds
    while active := running():
        if time.monotonic() > end:
            for name, job in active.items():
                yield Check(name, "fail", f"{kind} {job} has not ended within {seconds:g} s", f"{fix} {job}")
            return
        time.sleep(LOOK_S)


def output_of(
    command: Sequence[str],
    order: str,
    limit_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    most_bytes: int | None = None,
) -> tuple[int, str, str]:
    """Status, standard output and error of a command that a machine or an engine answers to, which may send any bytes.

    It is ended when it sends more than `most_bytes`, None for `OUTPUT_BYTES`. Raises FileNotFoundError, and
    TimeoutExpired after `limit_s`.
    """
    most_bytes = OUTPUT_BYTES if most_bytes is None else most_bytes
    end = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        files = (output.fileno(), errors.fileno())
        process = start(
            command, environment=environment, stdin=subprocess.PIPE, stdout=output, stderr=errors, own_group=False
        )
        try:
            assert process.stdin is not None
            # In a thread: what does not read its input would be waited for without end.
            threading.Thread(target=_send, args=(process.stdin, order.encode()), daemon=True).start()
            while process.poll() is None and max(os.fstat(file).st_size for file in files) <= most_bytes:
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(command, limit_s)
                time.sleep(WATCH_S)
        finally:
            status = kill(process)
        texts = [os.pread(file, most_bytes, 0).decode(errors="replace") for file in files]
    return status, texts[0], texts[1]


def _send(stdin: IO[bytes], order: bytes) -> None:
    with suppress(BrokenPipeError), stdin:
        stdin.write(order)


def log_end(path: Path) -> str:
    """The last `LOG_BYTES` of a log; "" if there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        return file.read(LOG_BYTES).decode(errors="replace")
    return ""


def answer_in(text: str) -> Answer | None:
    """The last answer of `embq.fleet.member` in an output; None if there is none.

    One that is malformed says so in a failed row.
    """
    _, mark, answer = text.rpartition(MARK)
    if not mark:
        return None
    try:
        return wire.read(Answer, answer.partition("\n")[0], what="its answer")
    except wire.MalformedError as error:
        row = FailedRow(name="answer", detail=error.message, fix="see what answers in place of embq there")
        return Answer(embq=embq.__version__, failed=[row])


def rows_of(name: str, answer: Answer) -> list[Check]:
    """The rows of a machine's answer."""
    return [Check(name, "fail", f"{row.name}: {row.detail}", row.fix) for row in answer.failed]
