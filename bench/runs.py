"""Runs under measurement: texts for them, waiting for them, and looks at their processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

DEADLINE_S = 600.0


def write_texts(path: Path, count: int) -> Path:
    """A file of so many texts of one length; one that exists is left as it is."""
    if not path.exists():
        with path.open("w") as file:
            for i in range(count):
                file.write(json.dumps({"id": f"k{i:08d}", "text": f"sample number {i}"}) + "\n")
    return path


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; SystemExit where it does not hold in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came of it in {DEADLINE_S:g} s")
        time.sleep(0.01)


@contextmanager
def watched(pid: int, every_s: float, look: Callable[[list[psutil.Process]], None]) -> Iterator[None]:
    """Within the block, call a function with a process and all its descendants, again and again in a thread.

    What is gone by the time of the look raises psutil.Error when it is asked for anything.
    """
    root, over = psutil.Process(pid), threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            try:
                processes = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            look(processes)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def anonymous_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process without that of files; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
