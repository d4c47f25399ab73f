"""Watches the hosts of a training over ssh: prints their output, and ends them together."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, TextIO

from embq.core.errors import AwayError, Exit
from embq.core.process.children import die_with_parent
from embq.core.service.stopping import StopFlag
from embq.training.launch.child_process import GRACE_S, LOOK_S, replaced_handlers
from embq.training.launch.outcomes import Outcome, by_signal, cause, verdict
from embq.training.launch.ssh_remote import BEAT_S, MARK

OTHERS_S = 10.0
"""From the failure of one host to the end of the others, whose processes may explain it."""
CLOSING_S = 10.0
"""For the last lines of a host, after its processes had `GRACE_S` to end."""


class HostConnection:
    """One host's torchrun, at the other end of an ssh connection.

    Its standard error is printed here after the host's name, its standard output after `prefix`.

    Attributes:
        status: exit status of torchrun; None until it is known.
        outcomes: of the host's processes.
        ended_at: monotonic seconds; 0 while it runs.
    """

    def __init__(self, host: str, command: Sequence[str], screen: threading.Lock, *, prefix: str) -> None:
        self.host = host
        self.status: int | None = None
        self.outcomes: list[Outcome] = []
        self.ended_at = 0.0
        self._screen = screen
        self._last = "it said nothing"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams = ((self._process.stdout, sys.stdout, prefix), (self._process.stderr, sys.stderr, f"[{host}] "))
        self._readers = [threading.Thread(target=self._print, args=stream, daemon=True) for stream in streams]
        for reader in self._readers:
            reader.start()

    def _print(self, lines: IO[str], screen: TextIO, prefix: str) -> None:
        for whole in lines:
            line, mark, report = whole.partition(MARK)
            if mark and report.endswith("\n"):  # otherwise the connection was cut within it
                self._take(json.loads(report))
            if line or not mark:
                self._last = line.strip() or self._last
                with self._screen:
                    screen.write(f"{prefix}{line}")
                    screen.flush()

    def _take(self, report: dict[str, Any]) -> None:
        self.outcomes = [Outcome(**one) for one in report["outcomes"]]
        self.status = report["status"]

    def over(self) -> bool:
        """True where it has ended, and all of its output is read."""
        if self.ended_at:
            return True
        if self._process.poll() is None:
            return False
        for reader in self._readers:
            reader.join()
        self._close()
        self.ended_at = time.monotonic()
        return True

    def failed(self) -> bool:
        """True where it ended with an error."""
        return bool(self.ended_at) and self.status != Exit.DONE

    def beat(self) -> None:
        """Tell the other end that this one is alive."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it ended, or was asked to
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def ask_to_end(self) -> None:
        """Close the other end's input, at which it stops torchrun."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with suppress(OSError):
                stream.close()

    def cut(self) -> None:
        """Kill the connection, at which the other end stops torchrun as well."""
        if self._process.poll() is None:
            self._process.kill()

    def lost(self) -> AwayError:
        """The error for a connection that ended before the outcomes arrived."""
        return AwayError(
            f"the connection to {self.host} ended in the middle of the training, with status "
            f"{self._process.returncode}: {self._last}",
            next_step=f"look whether {self.host} is up; its processes end with the connection. Start the same command "
            "again: it goes on from the last checkpoint",
            code="host_away",
        )


def watch(parts: Sequence[HostConnection]) -> int:
    """Wait for all parts; returns the exit status of the training, or raises the error that explains its end.

    A part that fails ends the others. So does a request to stop, after which KeyboardInterrupt is raised.
    """
    flag = StopFlag()
    asked_at, beaten_at = 0.0, float("-inf")
    try:
        with replaced_handlers():
            flag.install()
            while [part for part in parts if not part.over()]:
                now = time.monotonic()
                if now > beaten_at + BEAT_S:
                    beaten_at = now
                    for part in parts:
                        part.beat()
                late = any(part.failed() and now - part.ended_at > OTHERS_S for part in parts)
                if (flag() or late) and not asked_at:
                    asked_at = now
                    for part in parts:
                        part.ask_to_end()
                if flag.count > 1 or (asked_at and now - asked_at > GRACE_S + CLOSING_S):
                    for part in parts:
                        part.cut()
                time.sleep(LOOK_S / 5)
    finally:
        for part in parts:
            part.cut()
    if flag() and any(part.failed() for part in parts):
        raise KeyboardInterrupt
    return _verdict(sorted(parts, key=lambda part: part.ended_at))


def _verdict(parts: Sequence[HostConnection]) -> int:
    """The verdict of the part that failed first, unless a process of another one explains more."""
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    failed = next((part for part in parts if part.failed()), None)
    if failed is None:
        return verdict(outcomes, Exit.DONE)
    lost = next((part for part in parts if part.status is None), None)
    known = cause(outcomes)
    if lost is not None and (known is None or known.status == Exit.BUG or known.follows):
        raise lost.lost()
    killed = next((part.status for part in parts if by_signal(part.status or 0)), failed.status)
    return verdict(outcomes, killed or Exit.DONE)
