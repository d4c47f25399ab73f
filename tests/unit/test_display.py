"""What `embq status` shows of a run."""

from __future__ import annotations

import pytest
from rich.console import Console

from embq.status.display import panel
from embq.status.run_progress import RunProgress


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
