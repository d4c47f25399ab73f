"""Faults at chosen system calls of a process, by strace: it is killed there, or the call fails or takes long.

A call that only reads changes nothing, so a kill at each call that writes, names, syncs, removes or sends covers every
state in which a process can leave the world behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from embq.core.process.children import die_with_parent
from tests.e2e.session import LOOK_S

CALLS = (
    "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,"
    "mkdir,mkdirat,fallocate,truncate,ftruncate,sendto"
)
"""Calls by which a process changes files, or sends something to the broker."""
ZYGOTE = Path(__file__).with_name("zygote.py")
DEADLINE_S = 60.0
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")


def unavailable() -> str:
    """Why strace cannot be used here, or ""."""
    program = shutil.which("strace")
    if program is None:
        return "strace is not on PATH"
    given = [program, "-f", "-qq", "-o", os.devnull, "-e", "trace=write", "-e", "inject=write:signal=KILL:when=1"]
    done = subprocess.run([*given, "--", "echo"], capture_output=True, timeout=DEADLINE_S)
    return (
        "" if done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) else "strace cannot attach to a process here"
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One traced call of one thread.

    Attributes:
        number: which one of the thread's traced calls of this name it is, from 1; so strace counts, too.
        name: of the call.
        text: its arguments as strace shows them, with the paths of descriptors.
    """

    number: int
    name: str
    text: str

    @property
    def changes(self) -> bool:
        """True if it can change anything that outlives the process."""
        return self.name != "openat" or "O_CREAT" in self.text or "O_TRUNC" in self.text

    def kill(self) -> str:
        """Option with which strace kills the process as it is about to make this call."""
        return f"{self.name}:signal=KILL:when={self.number}"

    def __str__(self) -> str:
        return f"{self.name} {self.number}: {self.text[:160]}"


def calls_in(log: Path, thread: int) -> list[Call]:
    """The calls of a thread in a log that strace wrote, in order."""
    found: list[Call] = []
    seen: Counter[str] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is not None and int(match[1]) == thread:
            seen[match[2]] += 1
            found.append(Call(seen[match[2]], match[2], match[3]))
    return found


@contextmanager
def attached(
    pid: int, log: Path, *, inject: Sequence[str] = (), trace: str = CALLS, paths: Sequence[Path] = ()
) -> Iterator[None]:
    """Trace a running process and all of its threads for the length of the block.

    Args:
        log: what it calls; `calls_in` reads it.
        inject: such as "fsync:error=EIO:when=1"; "when" counts for each thread and each name alone.
        trace: the calls that are traced; those of `inject` must be among them.
        paths: only calls on these files are traced, counted and tampered with.
    """
    given = ["strace", "-f", "-qq", "-y", "-s", "80", "-o", str(log), "-e", "signal=none", "-e", f"trace={trace}"]
    given += [part for one in inject for part in ("-e", f"inject={one}")]
    given += [part for path in paths for part in ("-P", str(path))]
    with tempfile.TemporaryFile() as said:
        tracer = subprocess.Popen(
            [*given, "-p", str(pid)], stdin=subprocess.DEVNULL, stderr=said, process_group=0, preexec_fn=die_with_parent
        )
        try:
            _await(lambda: _is_traced(pid), tracer, said)
            yield
        finally:
            tracer.terminate()  # it lets go of the process, which goes on
            tracer.wait(DEADLINE_S)


def _is_traced(pid: int) -> bool:
    """True if all threads are; one that ends during the look is not."""
    try:
        told = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return all(re.search(r"^TracerPid:\t[1-9]", text, re.MULTILINE) for text in told)


def _await(predicate: Any, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not predicate():
        if process.poll() is not None or time.monotonic() > end:
            said.seek(0)
            raise AssertionError(f"strace -> {process.returncode}: {said.read().decode(errors='replace')}")
        time.sleep(LOOK_S / 4)


class Zygote:
    """Starts `embq` commands as forks of a process that has imported everything.

    So a traced command begins with its own first call, is the same each time, and is there in no time.
    """

    def __init__(self, folder: Path) -> None:
        self.log = folder / "zygote.log"
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ZYGOTE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Fork:
        """A command that stands still at its beginning; one at a time."""
        request = {"arguments": list(arguments), "log": str(log), "environment": dict(environment)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        fork = Fork(self, self._answer(), log)
        end = time.monotonic() + DEADLINE_S
        while psutil.Process(fork.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < end
            time.sleep(LOOK_S / 4)
        return fork

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the zygote has ended: {self.log.read_text()}"
        return int(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def zygote_in(folder: Path) -> Iterator[Zygote]:
    """A zygote for the length of the block; skips the test where strace cannot be used."""
    if why := unavailable():
        pytest.skip(why)
    zygote = Zygote(folder)
    try:
        yield zygote
    finally:
        zygote.close()


class Fork:
    """One command that the zygote has started."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self._zygote = zygote
        self.pid = pid
        self._log = log
        self._status: int | None = None

    @property
    def log(self) -> str:
        """All that it has said."""
        return self._log.read_text(errors="replace")

    def go(self) -> None:
        """Let it begin."""
        os.kill(self.pid, signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send it a signal; one that has ended gets none."""
        with suppress(ProcessLookupError):  # it may end between the look and the signal
            if self.alive():
                os.kill(self.pid, number)

    def alive(self) -> bool:
        """True while it has not ended. A process that has ended keeps its id until `wait` has told how."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wait(self) -> int:
        """Its exit status, or minus the signal that killed it."""
        if self._status is None:
            self._status = self._zygote._answer()
        return self._status
