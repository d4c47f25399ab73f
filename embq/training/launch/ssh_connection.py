"""The hosts of a training over ssh: questions to them, their output, and their common end."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import IO, Any, TextIO

import msgspec

from embq.app.remote.ssh import FAILED, away
from embq.core import wire
from embq.core.errors import AwayError, ConfigError, Exit, MalformedError
from embq.core.process.children import MARK, kill, start
from embq.core.redaction import printable
from embq.training.launch.child_process import GRACE_S, LOOK_S, stop_requests
from embq.training.launch.outcomes import ProcessOutcome, by_signal, cause, verdict
from embq.training.launch.ssh_host import BEAT_S, HostReport, Question

ANSWER_S = 60.0
"""From a question to its answer: connecting, a login shell's start, Python's on a cold network disk."""
OTHERS_S = 10.0
"""From the failure of one host to the end of the others, whose processes may explain it."""
CLOSING_S = 10.0
"""For the last lines of a host, after its processes had `GRACE_S` to end."""


LINE_BYTES = 4 << 20
"""Of a line that a host sends; a longer one comes as several."""
LAST_CHARS = 1_000
"""Of the last line, which an error repeats."""
MAX_ANSWERS = 8
"""A host has two."""


class _End(msgspec.Struct, frozen=True):
    """The answer of a host when its processes have ended."""

    status: int
    outcomes: tuple[ProcessOutcome, ...]


def _shown(text: str) -> str:
    """What a host prints, without what moves the cursor of a terminal, but for the start of the line."""
    return re.sub(r"[^\n\r\t]+", lambda piece: printable(piece[0]), text)


class HostConnection:
    """One host, on which `embq.training.launch.ssh_host` runs at the other end of an ssh connection.

    What it writes after its first answer is printed here: standard error after the host's name, standard output after
    `prefix`.

    Attributes:
        status: exit status of torchrun; None until it is known.
        outcomes: of the host's processes.
        ended_at: monotonic seconds; 0 while it runs.
    """

    def __init__(self, host: str, command: Sequence[str], screen: threading.Lock, *, prefix: str) -> None:
        self.host = host
        self.status: int | None = None
        self.outcomes: list[ProcessOutcome] = []
        self.ended_at = 0.0
        self._command = command
        self._screen = screen
        self._last = "it said nothing"
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._answered = False
        pipe = subprocess.PIPE
        self._process = start(command, stdin=pipe, stdout=pipe, stderr=pipe)
        streams = ((self._process.stdout, sys.stdout, prefix), (self._process.stderr, sys.stderr, f"[{host}] "))
        self._readers = [threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, lines: IO[bytes], screen: TextIO, prefix: str) -> None:
        for line in iter(partial(lines.readline, LINE_BYTES), b""):
            text, mark, answer = line.decode(errors="replace").partition(MARK)
            if text and (self._answered or lines is self._process.stderr):  # not the greeting of a login shell
                self._last = printable(text[:LAST_CHARS].strip()) or self._last
            if text and self._answered:
                with self._screen:
                    screen.write(f"{prefix}{_shown(text)}")
                    screen.flush()
            if mark and answer.endswith("\n"):  # otherwise the connection was cut within it
                self._answered = True
                self._receive(answer)
        if lines is self._process.stdout:
            self._answers.put(None)

    def _receive(self, answer: str) -> None:
        """Keep an answer: one that is malformed as an empty one, and no more than a host has."""
        if self._answers.qsize() < MAX_ANSWERS:
            try:
                self._answers.put(wire.read(dict[str, Any], answer, what="its answer", most_bytes=LINE_BYTES))
            except MalformedError:
                self._answers.put({})

    def send_question(self, question: Question) -> None:
        """Send a question."""
        self._send(json.dumps(asdict(question)))

    def answer(self, python: str) -> HostReport:
        """The answer to the question.

        Args:
            python: the host's interpreter.

        Raises AwayError if the host cannot be reached, ConfigError if it has no embq.
        """
        try:
            report = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise self._away(f"it did not answer in {ANSWER_S:g} s") from None
        if report is not None:
            try:
                return wire.convert(HostReport, report, what=f"the answer of {self.host}")
            except MalformedError as error:
                raise self._away(error.message) from error
        self._wait()
        if self._process.returncode == FAILED:
            raise self._away(self._last)
        raise ConfigError(
            f"{self.host} has no embq to train with as {python}: {self._last}",
            next_step="install embq[train] there as here; --remote-python PATH names its Python, --remote-folder its "
            "working folder",
            code="host_lacks",
        )

    def _away(self, why: str) -> AwayError:
        message, next_step = away(self.host, why, self._command)
        return AwayError(message, next_step=next_step, code="host_away")

    def train(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start torchrun there."""
        self._send(json.dumps([command, environment]))

    def beat(self) -> None:
        """Tell the other end that this one is alive."""
        self._send("")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, or was asked to
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def ask_to_end(self) -> None:
        """Close the other end's input, at which it stops torchrun."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def over(self) -> bool:
        """True if it has ended, and all of its output is read."""
        if not self.ended_at and self._process.poll() is not None:
            self._wait()
            while (report := self._answers.get()) is not None:
                with suppress(MalformedError):  # then the connection counts as lost
                    end = wire.convert(_End, report, what=f"the end of {self.host}")
                    self.outcomes, self.status = list(end.outcomes), end.status
            self.ended_at = time.monotonic()
        return bool(self.ended_at)

    def _wait(self) -> None:
        """Wait for the end of the connection and of its output, and close the pipes."""
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with suppress(OSError):
                stream.close()

    def failed(self) -> bool:
        """True if it ended with an error."""
        return bool(self.ended_at) and self.status != Exit.DONE

    def cut(self) -> None:
        """Kill the connection, at which the other end stops torchrun as well."""
        kill(self._process)

    def close(self) -> None:
        """Kill the connection, and wait for its end."""
        self.cut()
        self._wait()

    def lost(self) -> AwayError:
        """The error for a connection that ended before the outcomes arrived."""
        return AwayError(
            f"the connection to {self.host} ended in the middle of the training, with status "
            f"{self._process.returncode}: {self._last}",
            next_step=f"look whether {self.host} is up; its processes end with the connection. Start the same command "
            "again: it goes on from the last checkpoint",
            code="host_away",
        )


def watch(hosts: Sequence[HostConnection]) -> int:
    """Wait for all hosts; returns the exit status of the training, or raises the error that explains its end.

    A host that fails ends the others. So does a request to stop, after which KeyboardInterrupt is raised.
    """
    asked_at, beaten_at = 0.0, float("-inf")
    with stop_requests() as flag:
        while [host for host in hosts if not host.over()]:
            now = time.monotonic()
            if now > beaten_at + BEAT_S:
                beaten_at = now
                for host in hosts:
                    host.beat()
            late = any(host.failed() and now - host.ended_at > OTHERS_S for host in hosts)
            if (flag() or late) and not asked_at:
                asked_at = now
                for host in hosts:
                    host.ask_to_end()
            if flag.count > 1 or (asked_at and now - asked_at > GRACE_S + CLOSING_S):
                for host in hosts:
                    host.cut()
            time.sleep(LOOK_S)
    if flag() and any(host.failed() for host in hosts):
        raise KeyboardInterrupt
    return _verdict(sorted(hosts, key=lambda host: host.ended_at))


def _verdict(hosts: Sequence[HostConnection]) -> int:
    """The verdict of the host that failed first, unless a process of another one explains more."""
    outcomes = [outcome for host in hosts for outcome in host.outcomes]
    failed = next((host for host in hosts if host.failed()), None)
    if failed is None:
        return verdict(outcomes, Exit.DONE)
    lost = next((host for host in hosts if host.status is None), None)
    explanation = cause(outcomes)
    if lost is not None and (explanation is None or explanation.status == Exit.BUG or explanation.follows):
        raise lost.lost()
    killed = next((host.status for host in hosts if by_signal(host.status or 0)), failed.status)
    return verdict(outcomes, killed or Exit.DONE)
