"""`bench.stages`: what went on between two reports follows from what each says of the time until then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stages import over_time
from bench.stages_picture import draw
from worker.meter.stage_times import STAGES, STATES


@given(st.lists(st.tuples(st.floats(0.5, 3), st.floats(0, 1)), min_size=1, max_size=20))
def test_the_shares_between_reports_are_those_that_went_into_them(spans: list[tuple[float, float]]) -> None:
    reports: list[dict[str, Any]] = []
    at = busy = 0.0
    for seconds, share in spans:
        at, busy = at + seconds, busy + seconds * share
        shares = {"busy": busy / at, "starved": 1 - busy / at}
        reports.append(
            {"seconds": at, "causes": {"device": busy / at, "work": 1 - busy / at}, "stages": {"embed": shares}}
        )
    told = over_time(reports)
    assert [round(span["to_s"] - span["from_s"], 6) for span in told] == [round(seconds, 6) for seconds, _ in spans]
    for span, (_, share) in zip(told, spans, strict=True):
        assert span["causes"]["device"] == span["stages"]["embed"]["busy"] == pytest.approx(share, abs=0.002)
        assert sum(span["causes"].values()) == pytest.approx(1, abs=0.004)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    run = {
        "run": "decode-bound",
        "rows_per_s": 600.0,
        "limit": "decoding",
        "device_waits": 0.7,
        "cores_needed": 7,
        "stages": {stage: dict.fromkeys(STATES, 0.3) for stage in STAGES},
        "over_time": [{"from_s": 0.0, "to_s": 1.0, "causes": {"device": 0.3, "decoding": 0.7}}],
    }
    draw(tmp_path / "stages.png", {"size": [1024, 768], "threads": 2, "runs": [run, {**run, "limit": "device"}]})
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")
