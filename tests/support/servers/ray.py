"""A real Ray cluster of one node on free ports of this machine, ended by its own process and not by `ray stop`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from embq.core.process.children import die_with_parent
from tests.support.servers.tls import free_ports
from tests.support.waiting import wait_until

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
"""Without it Ray writes a token into the home of whoever runs the tests."""


@contextmanager
def ray_cluster(cpus: int, environment: Mapping[str, str], *, version: str = "") -> Iterator[str]:
    """The address of a head, for the length of the block.

    Args:
        version: what it says of itself instead of its own.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # its sockets' names are long
    (port,) = free_ports(1)
    log = folder / "head.log"
    tell = f"import ray; ray.__version__ = {version!r}; " if version else ""
    command = [
        sys.executable,
        "-c",
        f"{tell}from ray.scripts.scripts import main; main()",
        "start",
        "--head",
        "--block",
    ]
    command += [f"--port={port}", f"--num-cpus={cpus}", "--include-dashboard=false"]
    command += [f"--temp-dir={folder}", "--object-store-memory=100000000", "--disable-usage-stats"]
    with open(log, "wb") as said:
        head = psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**QUIET, **environment},
            process_group=0,
            preexec_fn=die_with_parent,
        )
    try:
        wait_until(lambda: b"--block" in log.read_bytes() or head.poll() is not None, 90)
        assert head.poll() is None, log.read_text(encoding="utf-8")
        yield f"127.0.0.1:{port}"
    finally:
        family = head.children(recursive=True)
        head.terminate()
        _, alive = psutil.wait_procs([head, *family], timeout=10)
        for process in alive:  # it is patient with its own children
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)
