"""Waiting for a condition, the only way in which a test waits; and the state of a process to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(predicate: Callable[[], object], deadline_s: float = 150.0) -> None:
    """Return as soon as `predicate()` is true; fail the test when it is not within `deadline_s`."""
    end = time.monotonic() + deadline_s
    pause_s = 0.01
    while not predicate():
        if time.monotonic() > end:
            raise AssertionError(f"{getattr(predicate, '__name__', predicate)} did not become true in {deadline_s} s")
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 0.05)  # whoever looks takes time from those that are waited for


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
