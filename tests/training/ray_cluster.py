"""A real Ray cluster of one node on free ports of this machine, ended by its own process and not by `ray stop`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embq.core.process.children import die_with_parent
from embq.training.launch.ssh_host import free_port
from tests.support.waiting import wait_until
from tests.training.launching import alive, descendants, environment

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
"""Without it Ray writes a token into the home of whoever runs the tests."""


@contextmanager
def ray_cluster(cpus: int, *, version: str = "", **changes: str) -> Iterator[str]:
    """The address of a head, for the length of the block.

    Args:
        version: what it says of itself instead of its own.
        changes: to its environment.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # its sockets' names are long
    address, log = f"127.0.0.1:{free_port()}", folder / "head.log"
    tell = f"import ray; ray.__version__ = {version!r}; " if version else ""
    command = [
        sys.executable,
        "-c",
        f"{tell}from ray.scripts.scripts import main; main()",
        "start",
        "--head",
        "--block",
    ]
    command += [f"--port={address.rpartition(':')[2]}", f"--num-cpus={cpus}", "--include-dashboard=false"]
    command += [f"--temp-dir={folder}", "--object-store-memory=100000000", "--disable-usage-stats"]
    with open(log, "wb") as said:
        head = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment(**{**QUIET, **changes}),
            process_group=0,
            preexec_fn=die_with_parent,
        )
    try:
        wait_until(lambda: b"--block" in log.read_bytes() or head.poll() is not None, 90)
        assert head.poll() is None, log.read_text(encoding="utf-8")
        yield address
    finally:
        family = descendants(head.pid)
        head.terminate()
        try:
            head.wait(10)
        except subprocess.TimeoutExpired:  # it is patient with its own children
            head.kill()
            head.wait()
        for pid in alive(family):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
