"""A small file system that can be filled up and made read-only, in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from embq.core.process.children import die_with_parent

DEADLINE_S = 30.0
REFILL_S = 0.002
"""Time for which a full disk may have a hole: workers try again after 50 ms."""


class SmallDisk:
    """A file system in memory. It is seen by no other process unless by `path`, and vanishes with `close`.

    Where none can be made, the test is skipped.

    Args:
        size_mb: its size.
    """

    def __init__(self, size_mb: int) -> None:
        self._keeper: threading.Thread | None = None
        self._is_over = threading.Event()
        self._mount = Path(tempfile.mkdtemp(prefix="embq-d"))
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
        options = f"size={size_mb}m,mode=700"
        script = (
            f"mount --make-rprivate / && mount -t tmpfs -o {options} none {self._mount} && echo ready "
            "&& exec sleep infinity"
        )
        try:
            self._holder = subprocess.Popen(
                [*unshare, "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=die_with_parent,
            )
        except FileNotFoundError:
            self._mount.rmdir()
            pytest.skip("unshare is not on PATH")
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline().decode().strip()
        if said != "ready":
            self.close()
            pytest.skip(f"no file system can be mounted here: {said}")
        # Through the holder's own root every process can reach what only that one has mounted.
        self.path = Path(f"/proc/{self._holder.pid}/root{self._mount}")

    def fill(self) -> None:
        """Leave no room for a single byte more, until `make_room`: what files give back is taken at once."""
        self._fill()
        self._keeper = threading.Thread(target=self._keep_full, daemon=True)
        self._keeper.start()

    def _keep_full(self) -> None:
        while not self._is_over.wait(REFILL_S):
            self._fill()

    def _fill(self) -> None:
        with open(self.path / "ballast", "ab", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        ballast.write(bytes(size))
                except OSError:
                    continue

    def leave(self, size: int) -> None:
        """Fill it up to this many bytes."""
        status = os.statvfs(self.path)
        with open(self.path / "ballast", "wb") as ballast:
            ballast.write(bytes(status.f_bavail * status.f_bsize - size))

    def make_room(self) -> None:
        """Undo `fill` or `leave`."""
        self._stop_keeper()
        (self.path / "ballast").unlink()

    def _stop_keeper(self) -> None:
        if self._keeper is not None:
            self._is_over.set()
            self._keeper.join()
            self._is_over.clear()
            self._keeper = None

    def set_read_only(self, yes: bool) -> bool:
        """Make it read-only or writable; False where that is not possible now, because a file is being written."""
        command = ["nsenter", f"--target={self._holder.pid}", "--mount"]
        if os.geteuid() != 0:
            command += ["--user", "--preserve-credentials"]
        command += ["mount", "-o", f"remount,{'ro' if yes else 'rw'}", str(self._mount)]
        return subprocess.run(command, capture_output=True, timeout=DEADLINE_S).returncode == 0

    def close(self) -> None:
        """Unmount it, with everything in it."""
        self._stop_keeper()
        self._holder.kill()
        self._holder.wait(10)
        if self._holder.stdout is not None:
            self._holder.stdout.close()
        self._mount.rmdir()
