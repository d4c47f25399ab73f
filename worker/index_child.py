"""The process that does index units for a worker: faiss is in it and nowhere else, and its memory goes with it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.process.children import die_with_parent
from core.settings import child_environment

END_S = 5.0
"""What it gets to end by itself once nothing more will be asked."""
LINE_BYTES = 1 << 16


class IndexChild:
    """`python -m indexer.process` with one unit in hand at a time. Used by one thread.

    Args:
        worker: name that stands in what it makes.
        threads: that it may use.
        memory_bytes: that it may take.
        on_gpu: whether it may use the GPU that this process sees.
    """

    def __init__(self, *, worker: str, threads: int, memory_bytes: int, on_gpu: bool = False) -> None:
        self._command = [
            sys.executable,
            *("-m", "indexer.process"),
            *("--worker", worker),
            *("--threads", str(threads)),
            *("--memory", str(memory_bytes)),
        ]
        # No address of the broker: what this process reads are files.
        self._environment = child_environment(OMP_NUM_THREADS=str(threads), EMBQ_BROKER_URL="")
        self._on_gpu = on_gpu
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._moved = ""

    @property
    def pid(self) -> int:
        """Its process id; 0 where there is none."""
        return self._process.pid if self._process is not None else 0

    def ask(self, unit: Mapping[str, Any]) -> None:
        """Have it do a unit; a process is started where there is none."""
        if self._process is None:
            self._process = subprocess.Popen(
                [*self._command, *(["--gpu"] if self._on_gpu else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                preexec_fn=die_with_parent,
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(unit).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has died; `answer` says so

    def leave_gpu(self) -> bool:
        """Have the processes that are started from now on use the CPU alone; False where they do so already."""
        left, self._on_gpu = self._on_gpu, False
        return left

    def answer(self, wait_s: float) -> dict[str, Any] | None:
        """What it says of the unit; None where that takes longer than `wait_s`.

        Raises EOFError with how it ended where it is dead; it is forgotten then.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(wait_s):
                return None
        said = os.read(process.stdout.fileno(), LINE_BYTES)
        if not said:
            status = process.wait()
            self._forget()
            raise EOFError(f"ended with signal {-status}" if status < 0 else f"ended with status {status}")
        self._said += said
        line, newline, rest = self._said.partition(b"\n")
        if not newline:
            return None
        self._said = rest
        told: dict[str, Any] = json.loads(line)
        return told

    def moved(self) -> bool:
        """Whether it has computed, read or written anything since the last call, or waits for storage.

        Elsewhere than on Linux it counts as moving as long as it lives.
        """
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
            io = Path(f"/proc/{self.pid}/io").read_text(encoding="ascii")
        except OSError:
            return True
        fields = stat.rpartition(")")[2].split()
        before, self._moved = self._moved, " ".join([*fields[11:13], *io.split()])
        return fields[0] == "D" or before != self._moved

    def kill(self) -> None:
        """SIGKILL; what it had in hand is done again, and what it left unfinished is litter of the build's folder."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def close(self) -> None:
        """Let it end."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._forget()

    def _forget(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None and not pipe.closed:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue  # bytes that nobody will read
        self._process, self._said, self._moved = None, b"", ""
