"""Progress of a training that runs: how far it is, and when it will end, from its log alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.training.mmoclip.run import LogProgress
from tests.training.mmoclip_logs import line


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_waits_for_a_log_and_says_how_long(tmp_path: Path) -> None:
    clock = Clock()
    following = LogProgress(tmp_path / "out.log", 195, clock)
    clock.now += 12
    following.poll()
    assert following.line().startswith("starting: 12 s")


def test_the_first_iteration_says_nothing_of_when_it_will_end(tmp_path: Path) -> None:
    (tmp_path / "out.log").write_text(line(1, 137.6) + "\n")
    following = LogProgress(tmp_path / "out.log", 195)
    following.poll()
    assert following.line().startswith("iteration 1 of 195")
    assert "is not known before the second iteration" in following.line()


def test_the_guess_is_the_mean_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "out.log").write_text("".join(f"{line(i, s)}\n" for i, s in ((1, 137.6), (2, 6.0), (3, 7.0))))
    following = LogProgress(tmp_path / "out.log", 195)
    following.poll()
    # 192 are left, of 6.5 s.
    assert following.line() == "iteration 3 of 195, 2,341 samples/s, 6.5 s each, about 21 min left"


@pytest.mark.parametrize("at", [10, 90, 150])
def test_a_line_that_is_being_written_counts_when_it_is_whole(tmp_path: Path, at: int) -> None:
    log, text = tmp_path / "out.log", f"{line(1, 9.0)}\n"
    following = LogProgress(log, 195)
    log.write_text(text[:at])
    following.poll()
    assert following.line().startswith("starting")
    log.write_text(text)
    following.poll()
    following.poll()
    assert following.line().startswith("iteration 1 of 195")
