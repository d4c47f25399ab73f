"""Requests to stop: one signal that reaches a process twice is one request."""

from __future__ import annotations

import os
import signal

from core.stopping import StopFlag


def test_a_signal_that_comes_twice_within_a_second_is_one_request_and_a_later_one_is_another() -> None:
    now = [100.0]
    stopped = StopFlag(clock=lambda: now[0])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stopped.install()
        assert not stopped()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert (stopped(), stopped.count) == (True, 1)
        now[0] += 1.5
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.count == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
