"""A machine behind a cable that can be pulled: two private network namespaces, and nothing of the host's network.

The worker runs in one namespace. In the other one a relay leads to the broker's unix socket. When the cable is pulled,
packets vanish, as when a switch dies: nobody is told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

from embq.core.process.children import die_with_parent

NEAR, FAR = "10.77.0.1", "10.77.0.2"
ROOT = Path(__file__).parents[3]


class Cable:
    """Joins the broker to a machine of its own.

    Args:
        upstream: unix:// URL of the broker.

    Attributes:
        prefix: a program that ends by running another one on that machine.
        url: of the broker as that machine sees it.

    Skips the test where namespaces are not permitted.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.prefix: list[str] = []
        self.url = ""
        # Without the rights of root there is a user namespace around both of them.
        self._rootless = os.geteuid() != 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cable:
        for program in ("unshare", "nsenter", "ip"):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not on PATH")
        try:
            self._lay()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lay(self) -> None:
        near = self._hold(["unshare", *(["-r"] if self._rootless else []), "-n"])
        self._near = self._inside(near)
        far = self._hold([*(self._inside(near, network=False) if self._rootless else []), "unshare", "-n"])
        self._far = self._inside(far)
        self._run(self._near, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(far))
        for side, address in ((self._near, NEAR), (self._far, FAR)):
            self._run(side, "ip", "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                self._run(side, "ip", "link", "set", device, "up")
        relay = self._start(
            [*self._near, sys.executable, "-m", "tests.faults.kit.proxy", self.upstream, NEAR], cwd=ROOT
        )
        assert relay.stdout is not None
        port = relay.stdout.readline().decode().strip()
        assert port, "the relay did not start"
        user, found, _ = self.upstream.partition("://")[2].rpartition("@")
        self.url = f"redis://{user}{found}{NEAR}:{port}"
        self.prefix = self._far

    def _hold(self, enter: list[str]) -> int:
        """A process that keeps a namespace; gives its id, which is that of `cat` as soon as that one speaks."""
        process = self._start([*enter, "cat"])
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"x")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        if process.stdout.read(1) != b"x":
            pytest.skip("network namespaces are not permitted here")
        return process.pid

    def _inside(self, pid: int, *, network: bool = True) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._rootless else []
        return ["nsenter", "--target", str(pid), *user, *(["--net"] if network else [])]

    def _start(self, command: list[str], cwd: Path | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=die_with_parent,
            bufsize=0,
        )
        self._processes.append(process)
        return process

    def _run(self, side: list[str], *command: str) -> None:
        done = subprocess.run([*side, *command], capture_output=True, text=True, timeout=10)
        if done.returncode:
            pytest.skip(f"no cable can be laid here: {done.stderr.strip()}")

    def pull(self) -> None:
        """The cable is out."""
        self._run(self._near, "ip", "link", "set", "cable", "down")

    def plug(self) -> None:
        """The cable is in."""
        self._run(self._near, "ip", "link", "set", "cable", "up")

    def close(self) -> None:
        """End what holds the namespaces; with the last process in them they vanish."""
        for process in reversed(self._processes):
            process.kill()
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()
