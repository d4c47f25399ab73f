"""The board that tells what a process had in hand, also when it is stuck or dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from embq.core.errors import SourceError
from embq.worker.meter.progress_board import PLACE_BYTES, THREADS, InHand, ProgressBoard, Span
from tests.support.waiting import wait_until

SPAN = Span("1-0:w:abc", 7, 3, 5)


def test_a_board_shows_what_each_thread_has_in_hand_and_nothing_afterwards() -> None:
    board = ProgressBoard()
    with board.step("embed", [SPAN, Span("1-0:w:def", 8)]):
        (step,) = board.in_hand()
        assert (step.stage, step.units) == ("embed", (SPAN, Span("1-0:w:def", 8, -1, -1)))
    assert board.in_hand() == []


def test_an_error_that_ends_the_process_leaves_what_was_in_hand() -> None:
    board = ProgressBoard()
    with pytest.raises(MemoryError), board.step("prepare", [SPAN]):
        raise MemoryError
    assert [step.units for step in board.in_hand()] == [(SPAN,)]
    with board.step("prepare", [Span("1-0:w:def", 8)]):
        assert (SPAN,) in [step.units for step in board.in_hand()], "the thread of a pool goes on with the next"
    assert [step.units for step in board.in_hand()] == [(SPAN,)]


def test_an_error_of_the_input_is_an_answer_and_leaves_nothing() -> None:
    board = ProgressBoard()
    with pytest.raises(SourceError), board.step("read", [SPAN]):
        raise SourceError("cut", code="shard_truncated")
    assert board.in_hand() == []


def test_a_step_that_advances_is_not_stuck_however_long_it_takes() -> None:
    board = ProgressBoard()
    with board.step("read", [SPAN]):
        wait_until(lambda: board.stuck(0.05))
        board.advance()
        assert board.stuck(0.05) == []
        wait_until(lambda: board.stuck(0.05))
    board.advance()
    assert board.in_hand() == [], "there is nothing that could advance"


def test_a_step_is_no_hang_before_it_has_taken_far_longer_than_any_before() -> None:
    board = ProgressBoard()
    board.expect("embed", 0.1)
    with board.step("embed", [SPAN]):
        began = time.monotonic()
        wait_until(lambda: board.stuck(0.01))
        assert time.monotonic() - began > 0.5
    with board.step("read", [SPAN]):
        wait_until(lambda: board.stuck(0.01), 0.4)


def test_a_process_that_stands_still_with_nothing_in_hand_has_no_pulse() -> None:
    descriptor = ProgressBoard.allocate()
    board = ProgressBoard(descriptor)
    program = (
        "import sys, time\n"
        "from embq.worker.meter.progress_board import ProgressBoard, Span\n"
        "board = ProgressBoard(int(sys.argv[1]))\n"
        "with board.pulse(), board.step('embed', [Span('1-0:w:abc', 7, 3, 5)]):\n"
        "    while True:\n"
        "        time.sleep(0.5)\n"
        "        board.advance()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(descriptor)], pass_fds=(descriptor,))
    try:
        wait_until(lambda: {step.stage for step in board.in_hand()} == {"pulse", "embed"}, 30)
        time.sleep(2.0)  # longer than either takes to advance
        assert board.stuck(1.9) == []
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: board.stuck(1.9), 30)
        assert len(board.stuck(1.9)) == 2, "whichever was late first"
        assert (SPAN,) in [step.units for step in board.stuck(1.9)]
    finally:
        process.kill()
        process.wait()
        os.close(descriptor)


def test_the_threads_of_the_next_model_get_places_of_their_own_again() -> None:
    board = ProgressBoard()
    for _ in range(THREADS):
        with board.step("prepare"), ThreadPoolExecutor(1) as pool:
            pool.submit(board.advance).result()
    board.expect("embed", 60.0)
    board.reset()
    assert board.in_hand() == []
    with board.step("embed", [SPAN]), ThreadPoolExecutor(1) as pool:
        with_others = pool.submit(lambda: (board.step("read").__enter__(), len(board.in_hand()))[1]).result()
        assert with_others == 2
        wait_until(lambda: board.stuck(0.05))


def test_a_batch_of_more_units_than_fit_is_cut_off_at_a_whole_one() -> None:
    board = ProgressBoard()
    spans = [Span(f"1-0:worker:{n:012d}", n, 0, 0) for n in range(1000)]
    with board.step("embed", spans):
        ((step),) = board.in_hand()
    assert PLACE_BYTES // 60 < len(step.units) < 1000
    assert list(step.units) == spans[: len(step.units)]


@pytest.mark.parametrize("end", ["sigkill", "holding the interpreter"])
def test_another_process_sees_what_one_that_is_dead_or_deaf_had_in_hand(end: str) -> None:
    descriptor = ProgressBoard.allocate()
    board = ProgressBoard(descriptor)
    last = "os.kill(os.getpid(), 9)" if end == "sigkill" else "ctypes.PyDLL(None).sleep(600)"
    program = (
        "import ctypes, os, sys\n"
        "from embq.worker.meter.progress_board import ProgressBoard, Span\n"
        "with ProgressBoard(int(sys.argv[1])).step('embed', [Span('1-0:w:abc', 7, 3, 5)]):\n"
        f"    {last}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(descriptor)], pass_fds=(descriptor,))
    try:
        wait_until(lambda: board.stuck(0.2), 30)
        found = board.in_hand()
        assert [(step.stage, step.units) for step in found] == [("embed", (SPAN,))]
        assert isinstance(found[0], InHand)
        assert found[0].since < time.monotonic()
    finally:
        process.kill()
        process.wait()
        os.close(descriptor)
