"""Progress on a terminal, in a log and in `embq status`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from core.service.progress_line import ProgressLine, duration
from embq.status.display import panel
from embq.status.run_progress import RunProgress


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


# --- what `embq status` shows ---


@pytest.mark.parametrize(("state", "shown"), [("running", "33.0 rows/s"), ("done", "812.5 rows/s")])
def test_the_speed_is_that_of_the_workers_and_in_the_end_that_of_the_commits(state: str, shown: str) -> None:
    progress = RunProgress(
        run="r",
        output="/out",
        model="minilm",
        state=state,
        priority=10,
        rows=5,
        rows_total=5,
        rows_total_exact=True,
        failures=0,
        units_total=1,
        done=1,
        received=0,
        in_flight=0,
        queued=0,
        quarantined=0,
        rows_per_s=812.5,
        embedding_per_s=33.0,
        eta_s=0.0,
        limit="",
        workers=[],
    )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(panel(progress))
    assert shown in captured.get()
