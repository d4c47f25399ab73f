"""Metrics of a writer: what it has done, and what it cannot do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from embq.app.services.writer_metrics import put_writer
from embq.core.queue.keys import RUNS
from embq.core.queue.runs import register
from embq.core.service.metrics import MetricSamples
from embq.writer.service import WriterService
from tests.support.outputs.run_case import RunCase, make_case


def told(writer: WriterService) -> dict[str, float]:
    """Name of a sample, with what its label `code` or `le` says -> value."""
    readings = MetricSamples("writer")
    put_writer(writer, readings)
    samples = [one for f in text_string_to_metric_families(readings.text().decode()) for one in f.samples]
    return {
        " ".join([one.name, *(one.labels[n] for n in ("code", "le") if n in one.labels)]): one.value for one in samples
    }


@pytest.fixture
def run(own_client: redis.Redis, tmp_path: Path) -> RunCase:
    return make_case(own_client, tmp_path / "notes")


def test_commits_are_counted_with_their_files_rows_and_seconds(run: RunCase, own_client: redis.Redis) -> None:
    register(own_client, run.record)
    writer = WriterService(own_client, version="test")
    writer._open_new_runs()
    (opened,) = writer.runs.values()
    run.work_one(0)
    run.work_one(1, failed=[2])
    run.work_one(2, fingerprint="f", rows=7)  # says more rows than it has
    opened.step()
    before = told(writer)
    assert (before["embq_writer_commits_total"], before["embq_writer_buffered_rows"]) == (0, 5)
    assert (before["embq_writer_epoch"], before["embq_writer_runs"]) == (1, 1)
    opened.flush()
    after = told(writer)
    assert (after["embq_writer_commits_total"], after["embq_writer_buffered_rows"]) == (1, 0)
    assert (after["embq_writer_rows_total"], after["embq_writer_failures_total"]) == (5, 1)
    files = [*(run.layout.root / "parts").iterdir(), *run.layout.failures.iterdir()]
    assert after["embq_writer_parts_total"] == len(files) == 2
    assert after["embq_writer_bytes_total"] == sum(path.stat().st_size for path in files)
    assert (after["embq_writer_commit_seconds_count"], after["embq_writer_commit_seconds_bucket +Inf"]) == (1, 1)
    assert 0 < after["embq_writer_commit_seconds_sum"] < 60
    assert sum(value for name, value in after.items() if name.startswith("embq_writer_rejected_total")) == 1
    assert after["embq_writer_output_free_bytes"] == pytest.approx(shutil.disk_usage(run.layout.root).free, rel=0.5)
    opened.release()


def test_a_run_whose_folder_is_gone_is_refused_until_it_is_back_or_forgotten(
    run: RunCase, own_client: redis.Redis, tmp_path: Path
) -> None:
    register(own_client, run.record)
    (tmp_path / "notes").rename(tmp_path / "elsewhere")
    writer = WriterService(own_client, version="test")
    writer._open_new_runs()
    assert (told(writer)["embq_writer_runs"], told(writer)["embq_writer_runs_refused"]) == (0, 1)
    (tmp_path / "elsewhere").rename(tmp_path / "notes")
    writer._retry_at[run.info.run] = 0.0
    writer._open_new_runs()
    assert (told(writer)["embq_writer_runs"], told(writer)["embq_writer_runs_refused"]) == (1, 0)
    writer.runs.popitem()[1].release()
    writer._retry_at[run.info.run] = float("inf")
    assert told(writer)["embq_writer_runs_refused"] == 1
    own_client.hdel(RUNS, run.info.run)
    writer._open_new_runs()
    assert told(writer)["embq_writer_runs_refused"] == 0
