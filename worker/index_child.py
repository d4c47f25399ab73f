"""Child process that does index units for a worker, so that faiss and its memory stay out of the worker."""

from __future__ import annotations

import sys
from pathlib import Path

from core.process.children import JsonChild


class IndexChild(JsonChild):
    """`python -m indexer.build.process` with one unit in hand at a time. Used by one thread.

    Args:
        worker: name that stands in what it makes.
        threads: that it may use.
        memory_bytes: that it may take.
        on_gpu: whether it may use the GPU that this process sees.
    """

    def __init__(self, *, worker: str, threads: int, memory_bytes: int, on_gpu: bool = False) -> None:
        options = ("--worker", worker, "--threads", str(threads), "--memory", str(memory_bytes))
        # No address of the broker: what this process reads are files.
        super().__init__(
            [sys.executable, "-m", "indexer.build.process", *options, *(["--gpu"] if on_gpu else [])],
            OMP_NUM_THREADS=str(threads),
            EMBQ_BROKER_URL="",
        )
        self._activity = (0, "")

    def leave_gpu(self) -> bool:
        """Have the processes that are started from now on use the CPU alone; False where they do so already."""
        if "--gpu" not in self.command:
            return False
        self.command.remove("--gpu")
        return True

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
        before, self._activity = self._activity, (self.pid, " ".join([*fields[11:13], *io.split()]))
        return fields[0] == "D" or before != self._activity
