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


def test_a_stop_is_old_after_its_time_or_once_it_is_repeated() -> None:
    now = [100.0]
    stopped = StopFlag(clock=lambda: now[0])
    assert not stopped.longer_than(0)
    stopped._on_signal(signal.SIGTERM, None)
    now[0] += 2
    assert (stopped.longer_than(1), stopped.longer_than(3)) == (True, False)
    stopped._on_signal(signal.SIGTERM, None)
    assert stopped.longer_than(3)
