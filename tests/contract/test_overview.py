"""The overview of a broker with several runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import redis

from embq.app.status.overview import OverviewMonitor
from embq.app.status.run_monitor import RunMonitor
from embq.core.queue.heartbeats import WORKER_REPORTS
from embq.core.queue.runs import _RecordCache, go_on, register
from embq.core.queue.scripts import load_scripts
from tests.support.outputs.run_case import make_case


def test_the_broker_is_asked_for_its_version_once_however_many_runs_there_are(
    own_client: redis.Redis, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        make_case(own_client, tmp_path / name).build()
    before = int(own_client.info("commandstats")["cmdstat_info"]["calls"])
    monitor = OverviewMonitor(own_client)
    assert [run.units_total for run in monitor.poll().runs] == [8, 8, 8]
    monitor.poll()
    assert int(own_client.info("commandstats")["cmdstat_info"]["calls"]) - before == 4, (
        "ours is one, and each poll is one"
    )


def test_a_run_that_is_over_is_shown_by_the_broker_as_its_folder_has_it(
    own_client: redis.Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = make_case(own_client, tmp_path / "a")
    register(own_client, case.record)
    said = {"name": "w", "model": case.record.model.spec, "load_s": 1.5}
    WORKER_REPORTS.report(own_client, said, life_s=60, scripts=load_scripts(own_client))
    writer = case.writer()
    case.work_one(0, failed=[1], tokens=7)
    case.finish(writer)
    WORKER_REPORTS.sign_off(own_client, "w")
    by_folder = RunMonitor(case.layout.root, own_client).poll().to_json()
    assert (by_folder["state"], by_folder["timing"]["load_s"]) == ("done", 1.5)
    (tmp_path / "a" / "commits" / "00000001.json").write_text("{")
    (run,) = OverviewMonitor(own_client).poll().runs
    assert run.to_json() == by_folder | {"created": run.created}, "the broker knows when it was announced alone"
    assert capsys.readouterr().err == ""
    OverviewMonitor(own_client, opens_over=True).poll()
    assert "the state in the broker is shown" in capsys.readouterr().err


@pytest.mark.parametrize("is_away", [False, True])
def test_a_run_that_is_over_is_read_from_the_broker_once_until_it_goes_on(
    own_client: redis.Redis, tmp_path: Path, is_away: bool
) -> None:
    case = make_case(own_client, tmp_path / "a")
    register(own_client, case.record)
    case.finish(case.writer())
    if is_away:
        case.layout.root.rename(tmp_path / "away")
    monitor = OverviewMonitor(own_client, opens_over=is_away)

    def reads() -> int:
        before = int(own_client.info("commandstats")["cmdstat_hgetall"]["calls"])
        assert [(run.run, run.state) for run in monitor.poll().runs] == [(case.info.run, "done")]
        return int(own_client.info("commandstats")["cmdstat_hgetall"]["calls"]) - before

    (first, *later) = [reads() for _ in range(3)]
    assert first > later[0] == later[1]
    go_on(own_client, case.info.run)
    assert reads() == first


def test_a_run_is_read_from_its_folder_where_it_goes_on_or_the_broker_has_seen_no_commit_of_it(
    own_client: redis.Redis, tmp_path: Path
) -> None:
    case = make_case(own_client, tmp_path / "a")
    register(own_client, case.record)
    case.finish(case.writer())
    look = OverviewMonitor(own_client)

    def opened() -> bool:
        look.monitors.clear()
        look.poll()
        return isinstance(look.monitors[case.info.run], RunMonitor)

    assert not opened()
    go_on(own_client, case.info.run)
    assert opened(), "units may have been added"
    own_client.flushdb()
    register(own_client, case.record)
    assert case.writer().finished
    by_folder = RunMonitor(case.layout.root, own_client).poll()
    assert opened(), "its times are in the folder alone"
    assert look.poll().runs[0].rows_per_s == by_folder.rows_per_s


def test_records_are_parsed_once_however_many_there_are_within_the_bytes_that_are_kept(
    own_client: redis.Redis, tmp_path: Path
) -> None:
    record = make_case(own_client, tmp_path / "a").record
    texts = [replace(record, run=f"{number:016x}").to_json().encode() for number in range(2_000)]
    cache = _RecordCache(sum(map(len, texts)))
    first = [cache.record(text) for text in texts]
    assert all(cache.record(text) is known for text, known in zip(texts, first, strict=True))
    cache.record(texts[0] + b" ")
    assert cache.record(texts[0]) is not first[0]
