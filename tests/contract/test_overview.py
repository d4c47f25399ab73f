"""The overview of a broker with several runs."""

from __future__ import annotations

from pathlib import Path

import redis

from embq.app.status.overview import OverviewMonitor
from tests.support.outputs.run_case import make_case


def test_the_broker_is_asked_for_its_version_once_however_many_runs_there_are(
    own_client: redis.Redis, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        make_case(own_client, tmp_path / name).build()
    before = int(own_client.info("commandstats")["cmdstat_info"]["calls"])
    monitor = OverviewMonitor(own_client)
    assert [run.units_total for run in monitor.look().runs] == [8, 8, 8]
    monitor.look()
    assert int(own_client.info("commandstats")["cmdstat_info"]["calls"]) - before == 2, "ours is one"
