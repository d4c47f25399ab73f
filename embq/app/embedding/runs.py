"""`embq.run` and `embq.enqueue`: the verbs of the command line, started by a program, and a handle on their run."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import IO, Any

from embq.app.cli.arguments import arguments_of
from embq.app.embedding.bars import Bar
from embq.app.status.resolve_run import resolve_run
from embq.app.status.run_control import control_run
from embq.app.status.run_progress import RunProgress
from embq.core.arguments import check, path_text, path_texts, python_errors
from embq.core.errors import EmbqError, Exit, error_of
from embq.core.process.children import python, start
from embq.core.run.control import RunState
from embq.core.settings import child_environment
from embq.core.storage.paths import place

LOOK_S = 0.5
STOP_S = 20.0
"""Time that a run gets to end when its handle is closed."""
LOG_TAIL = 2_000
"""Characters of the log in the error for a process that ended without a word."""

Inputs = str | PathLike[str] | Iterable[str | PathLike[str]]


class Run:
    """A run that this program has started, or handed to the workers of a broker.

    As a context manager it stops a run of this machine at the end of the block; `embq.run` goes on with it.

    Attributes:
        output: its folder or URL.
    """

    def __init__(self, verb: str, arguments: list[str], output: str, broker: str) -> None:
        self.output, self._broker = output, broker
        self._error: EmbqError | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the handle
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = start(
            python("-m", "embq.app.embedding.child", verb, *arguments),
            stdin=subprocess.PIPE,
            stdout=self._answer,
            stderr=self._log,
            environment=child_environment(EMBQ_LOG="text", **({"EMBQ_BROKER_URL": broker} if broker else {})),
            ends_itself=True,
        )
        _AT_WORK.add(self)

    def __repr__(self) -> str:
        return f"<embq run in {self.output}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def progress(self) -> RunProgress | None:
        """The run now; None while it is being planned. Raises what ended it."""
        if self._has_ended() and self._error is not None:
            with python_errors():
                raise self._error
        with suppress(EmbqError):
            if (monitor := resolve_run(self.output, self._broker).monitor()) is not None:
                return monitor.poll()
        return None

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> RunProgress:
        """Wait until the run is done or cancelled, and return its last progress.

        Args:
            timeout_s: None waits as long as it takes.
            progress: None shows a bar in a terminal or a notebook.

        Raises TimeoutError, and the EmbqError that ended the run; `stopped` if it was stopped before its end.
        """
        check(timeout_s=timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with Bar(progress) as bar:
            while True:
                ended = self._has_ended()
                now = self.progress()
                if now is not None:
                    note = "" if now.state in (RunState.RUNNING, RunState.DONE) else now.state
                    bar.show(now.rows + now.failures, now.rows_total, note)
                    if now.state.ended and (ended or self._is_resident):
                        return now
                if ended and not self._is_resident:
                    raise EmbqError(
                        f"the run in {self.output} was stopped before its end",
                        next_step="start it again: it goes on where it was",
                        code="stopped",
                    )
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"the run in {self.output} is not done after {timeout_s:g} s")
                time.sleep(LOOK_S)

    @python_errors()
    def cancel(self) -> None:
        """Cancel the run: committed rows stay. Raises as `embq cancel`."""
        control_run(self.output, self._broker, "cancel")

    def stop(self) -> None:
        """End the process of a run of this machine; what is committed stays, and `embq.run` goes on with it."""
        if self._has_ended():
            return
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._has_ended()

    @property
    def _is_resident(self) -> bool:
        """Whether services of a broker do the work: then the child only planned it."""
        return "enqueue" in self._child.args  # type: ignore[operator]

    def _has_ended(self) -> bool:
        """Whether the child has; keeps the error with which it did."""
        if self._child.poll() is None:
            return False
        if self in _AT_WORK:
            _AT_WORK.remove(self)
            assert self._child.stdin is not None
            self._child.stdin.close()
            with self._answer, self._log:
                self._error = self._reported_error()
        return True

    def _reported_error(self) -> EmbqError | None:
        self._answer.seek(0)
        lines = self._answer.read().splitlines()
        with suppress(ValueError, IndexError):
            answer = json.loads(lines[-1])
            if "error" in answer:
                return error_of(answer["error"])
            if answer["status"] in (Exit.DONE, Exit.SOME_FAILED, Exit.INTERRUPTED):
                return None
        self._log.seek(0)
        tail = self._log.read()[-LOG_TAIL:].decode(errors="replace").strip()
        return EmbqError(f"the run in {self.output} ended with status {self._child.returncode}: {tail}", code="bug")


_AT_WORK: set[Run] = set()
"""Runs whose process is at work: it ends with its pipe, which the last reference to the handle would close."""


@python_errors()
def run(inputs: Inputs, output: str | PathLike[str], *, model: str | list[str], **options: Any) -> Run:
    """See `embq.run`."""
    return _started("run", inputs, output, {"model": model, **options}, "--quiet", "--json")


@python_errors()
def enqueue(inputs: Inputs, output: str | PathLike[str], *, model: str | list[str], **options: Any) -> Run:
    """See `embq.enqueue`."""
    job = _started("enqueue", inputs, output, {"model": model, **options}, "--json")
    while not job._has_ended():
        time.sleep(0.05)
    if job._error is not None:
        raise job._error
    return job


def _started(verb: str, inputs: Inputs, output: str | PathLike[str], options: dict[str, Any], *flags: str) -> Run:
    named = path_texts("inputs", inputs)
    out, broker = path_text("output", output), str(options.pop("broker", None) or "")  # which may hold a password
    arguments = [*arguments_of(verb, options), *flags, "--output", out, "--", *named]
    return Run(verb, arguments, str(place(out)), broker)
