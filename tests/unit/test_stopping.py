"""Requests to stop: one signal that reaches a process twice is one request."""

from __future__ import annotations

import signal
import subprocess
import sys

from embq.core.service.stopping import StopFlag

SIGNALLED = """
import os, signal
from embq.core.service.stopping import StopFlag

now = [100.0]
stopped = StopFlag(clock=lambda: now[0])
stopped.install()
print(stopped())
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
print(stopped(), stopped.count)
now[0] += 1.5
os.kill(os.getpid(), signal.SIGTERM)
print(stopped.count)
"""


def test_a_signal_that_comes_twice_within_a_second_is_one_request_and_a_later_one_is_another() -> None:
    # In a process of its own: a signal that reached this one late would find the handlers of before, and end it.
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "True 1", "2"]


def test_a_stop_is_old_after_its_time_or_once_it_is_repeated() -> None:
    now = [100.0]
    stopped = StopFlag(clock=lambda: now[0])
    assert not stopped.longer_than(0)
    stopped._on_signal(signal.SIGTERM, None)
    now[0] += 2
    assert (stopped.longer_than(1), stopped.longer_than(3)) == (True, False)
    stopped._on_signal(signal.SIGTERM, None)
    assert stopped.longer_than(3)
