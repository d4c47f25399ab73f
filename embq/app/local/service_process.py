"""Services that `embq run` starts as child processes, each with its own log."""

from __future__ import annotations

import ast
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from embq.app.status.service_logs import ServiceLog
from embq.core.errors import EmbqError, Exit, ModelError
from embq.core.process.children import python, start, stop
from embq.core.settings import child_environment
from embq.core.storage.beneath import open_file

QUICK_DEATHS = 5
QUICK_S = 5.0
"""A service that exits this often in a row, each time within these seconds, is not restarted."""

OVER_S = 3.0
"""A worker exits when its run is over, and the session follows. A worker that exits earlier is restarted after this
time: it looked before units that were added to a finished run were taken up."""

LOADING_BYTES = 1 << 20
"""Beginning of a worker's log in which it says how long loading took."""

FATAL = {Exit.USAGE, Exit.BAD_INPUT, Exit.OUTPUT, Exit.CONFIG}


class ServiceProcess:
    """One service as a child process.

    Args:
        verb: the verb of `embq` that it runs.
        arguments: of the verb.
        first: further arguments, for the first start only.
        log: its output is appended to this file.
        broker_url: passed in the environment, because it holds a password.
        environment: further changes to the environment.
    """

    def __init__(
        self,
        verb: str,
        arguments: Sequence[str],
        *,
        first: Sequence[str] = (),
        log: Path,
        broker_url: str,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.verb = verb
        self.log = log
        self._arguments = arguments
        self._first = first
        # EMBQ_METRICS names one port, and there are three services.
        self._environment = {"EMBQ_METRICS": "", **environment, "EMBQ_BROKER_URL": broker_url}
        self._started_at = 0.0
        self._log_start = 0
        self._first_start: int | None = None
        self._quick_deaths = 0
        self._over_at: float | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the service."""
        arguments, self._first = [*self._arguments, *self._first], ()
        self._started_at = time.monotonic()
        # The folder may hold symbolic links to anywhere.
        name = f"{self.log.parent.name}/{self.log.name}"
        with open(open_file(self.log.parent.parent, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), "ab") as log:
            self._log_start = log.tell()
            self._first_start = self._log_start if self._first_start is None else self._first_start
            self.process = start(
                python("-m", "embq", self.verb, *arguments),
                stdout=log,
                stderr=log,
                # In text, whatever EMBQ_LOG says: what a service said last is read from there.
                environment=child_environment(**self._environment, EMBQ_LOG="text"),
            )

    def supervise(self) -> None:
        """Restart the service if it has ended; raise its own error if that cannot help."""
        assert self.process is not None
        status = self.process.poll()
        if status is None:
            return
        if status == Exit.DONE and self.verb == "worker":
            now = time.monotonic()
            self._over_at = self._over_at or now
            if now - self._over_at > OVER_S:
                self._over_at = None
                self.start()
            return
        quick = time.monotonic() - self._started_at < QUICK_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        # A worker supervisor that exits by itself has given up, unlike one that was killed. A writer that was fenced
        # off leaves the run to another one: restarted, the two would alternate.
        gave_up = (self.verb == "worker" and status > 0) or (self.verb == "writer" and status == Exit.TRY_LATER)
        if status in FATAL or gave_up or self._quick_deaths >= QUICK_DEATHS:
            raise self._last_error(status)
        self.start()

    def _last_error(self, status: int) -> EmbqError:
        """The last error that the service has logged since its start."""
        code, message, next_step = "service", "", ""
        for line in self._tail():
            if line.startswith("error["):
                code, _, message = line.removeprefix("error[").partition("]: ")
                next_step = ""
            elif line.startswith("  next:"):
                next_step = line.removeprefix("  next:").strip()
            elif " why=" in line and (" error worker stopped " in line or " error worker bug" in line):
                code, message, next_step = _event_fields(line)
                break
        if not message:
            message = f"the {self.verb} ended with status {status}"
        error = EmbqError(message, next_step=next_step or f"its log is {self.log}", code=code)
        error.exit_code = {int(member): member for member in Exit}.get(status, Exit.BUG)
        return error

    def refused_model(self) -> ModelError | None:
        """The error of a worker that cannot load its model here; None if its log has none."""
        for line in self._tail():
            if " error worker model_refused " in line:
                code, message, next_step = _event_fields(line)
                return ModelError(message, next_step=next_step, code=code)
        return None

    def loaded_s(self) -> float:
        """Seconds in which a worker has loaded its model, the slowest; 0 if its log says nothing of it."""
        seconds = [0.0]
        with suppress(OSError, EmbqError), open(open_file(self.log.parent, self.log.name, os.O_RDONLY), "rb") as log:
            log.seek(self._first_start or 0)
            for line in log.read(LOADING_BYTES).decode("utf-8", "replace").splitlines():
                if " worker model_loaded " in line:
                    with suppress(ValueError):
                        seconds.append(float(line.rpartition(" seconds=")[2]))
        return max(seconds)

    def _tail(self) -> list[str]:
        """The last lines of the service since its start; none where its log cannot be read, as work goes on without."""
        with suppress(OSError, EmbqError):
            log = ServiceLog(self.log.parent, self.log.name, start=self._log_start)
            return [line.text for line in log.new_lines(60)]
        return []

    def ended(self) -> bool:
        """True if it was started and has exited."""
        return self.process is not None and self.process.poll() is not None

    def stop(self, timeout_s: float) -> None:
        """Stop the service: SIGTERM, and SIGKILL after `timeout_s`."""
        if self.process is not None:
            stop(self.process, timeout_s)

    def hurry(self) -> None:
        """Send a second SIGTERM: units in flight are released instead of finished."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()


def _event_fields(line: str) -> tuple[str, str, str]:
    """(code, why, next) of an event line such as `... stopped code=x why='...' next='...'`."""
    values = {"code": "service", "why": "", "next": ""}
    rest = line
    for name in ("next", "why", "code"):
        head, separator, tail = rest.partition(f" {name}=")
        if separator:
            values[name] = _unquoted(tail.strip())
            rest = head
    return values["code"], values["why"], values["next"]


def _unquoted(text: str) -> str:
    """A value of an event line, which is quoted as Python does if it has a space."""
    with suppress(ValueError, SyntaxError):
        if text[:1] in ("'", '"'):
            return str(ast.literal_eval(text))
    return text
