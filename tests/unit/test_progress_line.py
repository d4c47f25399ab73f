"""Progress on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from core.service.progress_line import ProgressLine, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_replaced() -> None:
    stream = Terminal()
    with ProgressLine(stream=stream) as line:
        line.show("1 of 2")
        assert not line.due
        line.say("a warning")
    assert stream.getvalue() == "\r\x1b[K1 of 2\r\x1b[Ka warning\n"


def test_a_log_has_a_line_only_when_one_is_due() -> None:
    stream = io.StringIO()
    with ProgressLine(stream=stream) as line:
        line.show("too early")
        line.say("a warning")
    assert stream.getvalue() == "a warning\n"


def test_a_quiet_line_writes_nothing() -> None:
    stream = Terminal()
    with ProgressLine(stream=stream, quiet=True) as line:
        line.show("1 of 2")
        line.say("a warning")
    assert not stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(45.2, "45 s"), (720, "12 min"), (12_000, "3 h 20 min"), (216_000, "2.5 days")]
)
def test_a_duration_is_told_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text
