"""CPU time of each process of a run, from its first unit on."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import psutil

LOOK_S = 0.1


class Look(NamedTuple):
    """CPU seconds since their start, of threads: (process, what it is, thread) -> seconds. `at` is in Unix seconds."""

    at: float
    seconds: dict[tuple[int, str, int], float]


class Watch(threading.Thread):
    """Looks at a process and all that it starts, until it ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="watch", daemon=True)
        self._root = psutil.Process(pid)
        self._called: dict[int, str] = {}
        self.looks: list[Look] = []

    def run(self) -> None:
        """Look until the process has ended."""
        while self._root.is_running() and self._root.status() != psutil.STATUS_ZOMBIE:
            seconds: dict[tuple[int, str, int], float] = {}
            for process in self._family():
                try:
                    called = self._called.get(process.pid) or kind_of(process.cmdline())
                    for thread in process.threads():
                        seconds[process.pid, called, thread.id] = thread.user_time + thread.system_time
                except psutil.Error:  # it has just ended
                    continue
                if called:
                    self._called[process.pid] = called
            self.looks.append(Look(time.time(), seconds))
            time.sleep(LOOK_S)

    def _family(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []


def kind_of(command: Sequence[str]) -> str:
    """Kind of a process of embq, in a word; "" where nothing is known of it yet."""
    words = [os.path.basename(word) for word in command]
    for kind in ("embq.worker.process", "embq.sources.reader_process", "writer", "producer", "worker", "run"):
        if kind in words:
            return {"embq.worker.process": "worker", "worker": "supervisor"}.get(kind, kind)
    return "broker" if any("server" in word for word in words[:1]) else ""


def spent(looks: Sequence[Look], *, began: float, ended: float, decoders: int) -> dict[str, float]:
    """CPU seconds between two moments, for each kind of process. What processes do at their ends is no part of it.

    Of the worker, "decode" is what its busiest threads had, of which there are `decoders`, and "worker" all others.
    """
    before = looks[max(0, bisect_right([look.at for look in looks], began) - 1)].seconds
    last: dict[tuple[int, str, int], float] = {}
    for look in looks:
        if look.at <= ended:
            last |= look.seconds
    found: dict[str, float] = {}
    of_worker = []
    for thread, seconds in last.items():
        used = seconds - before.get(thread, 0.0)
        if thread[1] == "worker":
            of_worker.append(used)
        else:
            found[thread[1]] = found.get(thread[1], 0.0) + used
    of_worker.sort(reverse=True)
    return {"decode": sum(of_worker[:decoders]), "worker": sum(of_worker[decoders:])} | found
