"""A machine's part of a fleet: `python -m embq.fleet.member start|run|state|drain|remove`.

The order, a `FleetMember` as lines of JSON, is read from standard input; the answer is a line after `MARK`. The secrets
are kept in memory files of the worker (memfd_create(2)), which processes of the same user reach through /proc: nothing
of them is written to a disk, and they end with the worker. `run` checks this machine and becomes the worker, for
engines that keep processes themselves. For others `start` leaves the worker behind. It holds the lock on a file for as
long as it lives, so no process id is mistaken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import embq
from embq.core.errors import Exit
from embq.core.process.children import MARK, python, run_python
from embq.core.settings import child_environment, state_folder
from embq.fleet.launcher import CHECK_S, GRACE_S, FleetMember, log_end

KILL_S = 10.0
LOOK_S = 0.1

Failed = list[dict[str, str]]
"""Rows with `name`, `detail` and `fix`."""


def environment_of(member: FleetMember) -> dict[str, str]:
    """The environment of the worker, with paths of this process's memory files for its secrets."""
    changes = {"EMBQ_BROKER_URL": member.url, "EMBQ_MACHINE": member.name, "EMBQ_FLEET_NAME": member.fleet}
    for variable, text in (("EMBQ_BROKER_PASSWORD_FILE", member.password), ("EMBQ_BROKER_CA", member.ca)):
        if text:
            file = os.memfd_create("embq", 0)  # stays open when this process becomes the worker
            os.write(file, text.encode())
            changes[variable] = f"/proc/{os.getpid()}/fd/{file}"
    return child_environment(**changes)


def check(member: FleetMember) -> Failed:
    """The failed rows of `embq worker --check`."""
    arguments = ("-m", "embq", "worker", "--check", "--json", *member.arguments)
    try:
        done = run_python(*arguments, timeout_s=CHECK_S, environment=environment_of(member))
        return [row for row in json.loads(done.stdout)["checks"] if row["state"] == "fail"]
    except subprocess.TimeoutExpired:
        detail = f"it has not ended within {CHECK_S:g} s"
    except ValueError:
        detail = " ".join(done.stderr.split())[-500:] or f"it ended with status {done.returncode}"
    return [{"name": "check", "detail": detail, "fix": "run `embq worker --check` there"}]


def become_worker(member: FleetMember) -> NoReturn:
    """Replace this process by the worker."""
    command = python("-m", "embq", "worker", *member.arguments)
    os.execve(command[0], command, environment_of(member))


def fleet_folder(fleet: str) -> Path:
    """Folder of this machine's user for what a fleet's workers leave there: logs and locks."""
    return state_folder() / "fleet" / fleet


def remove_files(fleet: str, names: Sequence[str]) -> None:
    """Remove the files of machines, and the folders above them that are then empty."""
    folder = fleet_folder(fleet)
    for path in (folder / f"{name}.{kind}" for name in names for kind in ("pid", "log")):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # another fleet, or other state, is there
        for empty in (folder, folder.parent, folder.parent.parent):
            empty.rmdir()


class LeftWorker:
    """The worker that was left behind here for a machine.

    Args:
        member: the machine; what it does not need may be missing.
    """

    def __init__(self, member: FleetMember) -> None:
        self._member = member
        folder = fleet_folder(member.fleet)
        self._lock, self._log = (folder / f"{member.name}.{kind}" for kind in ("pid", "log"))

    def start(self) -> Failed:
        """Check this machine, and leave a worker behind, unless one is here."""
        self._lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = self._locked(os.O_CREAT)
        if held < 0:
            return []
        if failed := check(self._member):
            remove_files(self._member.fleet, [self._member.name])
            return failed
        if os.fork() == 0:
            os.setsid()
            os.ftruncate(held, 0)
            os.write(held, str(os.getpid()).encode())
            os.set_inheritable(held, True)
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
                os.dup2(file, stream)
            become_worker(self._member)
        return []

    def state(self) -> Failed:
        """Nothing while the worker runs; else the last line of its log."""
        if self._runs():
            return []
        last = (log_end(self._log).splitlines() or [""])[-1][:300]
        return [{"name": "ended", "detail": last, "fix": "embq fleet up starts it again"}]

    def drain(self) -> Failed:
        """Have the worker finish its begun units and end."""
        limit_s = self._member.drain_s + GRACE_S
        if self._ended(signal.SIGTERM, limit_s):
            return []
        detail = f"the worker has not ended within {limit_s:g} s"
        return [{"name": "drain", "detail": detail, "fix": "embq fleet down ends it"}]

    def remove(self) -> Failed:
        """End the worker, by force if it takes long, and remove its files."""
        if not self._ended(signal.SIGTERM, KILL_S):
            self._ended(signal.SIGKILL, KILL_S)
        remove_files(self._member.fleet, [self._member.name])
        return []

    def _locked(self, mode: int = 0) -> int:
        """A descriptor of the lock, held; -1 while a worker holds it."""
        file = os.open(self._lock, os.O_RDWR | mode, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return -1
        return file

    def _runs(self) -> bool:
        if not self._lock.exists():
            return False
        if (file := self._locked()) >= 0:
            os.close(file)
        return file < 0

    def _ended(self, number: signal.Signals, seconds: float) -> bool:
        """Signal the worker, and wait for its end; whether it has ended."""
        end = time.monotonic() + seconds
        with suppress(ProcessLookupError, ValueError):
            if self._runs():
                (os.killpg if number == signal.SIGKILL else os.kill)(int(self._lock.read_text()), number)
        while self._runs():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
        return True


def main(arguments: Sequence[str]) -> int:
    """Do what is asked; returns 0, or 69 where this machine does not pass its check."""
    order: dict[str, Any] = {}
    for line in sys.stdin:  # an engine may send what all machines share first
        order |= json.loads(line)
    member = FleetMember(**order)
    runs = arguments[0] == "run"
    failed = check(member) if runs else getattr(LeftWorker(member), arguments[0])()
    sys.stdout.write(f"{MARK}{json.dumps({'embq': embq.__version__, 'failed': failed})}\n")
    sys.stdout.flush()
    if runs and not failed:
        become_worker(member)
    return Exit.UNAVAILABLE if runs else Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
