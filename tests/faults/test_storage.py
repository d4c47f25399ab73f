"""Storage that fails, is slow, fills up or may not be written: units wait for it, and what is committed stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from embq.core.queue.result_stream import PART_SUFFIX, RESULT_SUFFIX
from tests.e2e.session import ended, write_tar
from tests.faults.kit.cluster import DEADLINE_S, QUICK_LEASES, Cluster, Service
from tests.faults.kit.disk import SmallDisk
from tests.faults.kit.strace import attached, calls_in, unavailable
from tests.faults.kit.table import Recovery

WRITES_PARTS = {"set": "embq.worker.stages.publish:PART_BYTES", "to": 1}
"""Workers write the rows of every unit as a part."""

SOON = {"set": "embq.writer.service:RETRY_S", "to": 1.0}
"""A writer tries a run again after a second instead of half a minute."""


def reading(cluster: Cluster, workers: Service) -> int:
    """The process id of the one worker process, which has no work yet."""
    cluster.until(lambda: len(workers.processes()) == 1)
    return int(workers.processes()[0].pid)


def shards(cluster: Cluster, count: int, samples: int, size: int) -> list[Path]:
    """Shards of made-up images of `size` bytes as the cluster's input; gives their paths."""
    cluster.input = cluster.folder / "shards"
    cluster.input.mkdir()
    cluster.units, paths = count, []
    for shard in range(count):
        keys = [f"{shard}-{number}" for number in range(samples)]
        images = {key: b"\xff\xd8" + key.encode() * (size // len(key)) for key in keys}
        cluster.expected |= images
        paths.append(cluster.input / f"{shard}.tar")
        write_tar(paths[-1], [(f"{key}.jpg", data) for key, data in images.items()])
    return paths


@pytest.fixture(autouse=True)
def _strace_where_needed(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("fault")
    if marker is not None and marker.args[0] == "S1" and (why := unavailable()):
        pytest.skip(why)


# --- reading ---


@pytest.mark.fault("S1", "the input gives read errors for some seconds")
@pytest.mark.parametrize("calls", ["openat", "read", "newfstatat"])
def test_an_outage_of_the_input_costs_no_unit_an_attempt(
    cluster: Cluster, recovery: Recovery, tmp_path: Path, calls: str
) -> None:
    cluster.begin(300)
    workers = cluster.workers()
    cluster.until_finished(2)
    pid = reading(cluster, workers)
    trace = "openat,read,newfstatat"
    with attached(pid, tmp_path / "calls", trace=trace, inject=[f"{calls}:error=EIO"], paths=[cluster.input]):
        cluster.until(lambda: workers.said_times("storage_away") >= 2)
        recovery.injected()
        assert set(cluster.attempts().values()) <= {1}
    seconds = cluster.until_closed()
    recovery.note("storage is back -> finished", seconds)
    assert workers.said_times("worker_died") == 0
    output = cluster.assert_exact()
    assert output.records[-1]["totals"]["quarantined"] == 0


@pytest.mark.fault("S1", "a file of the input can never be read")
def test_a_shard_that_can_never_be_read_is_one_failure(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    paths = shards(cluster, 4, 5, 1000)
    sooner = {"set": "embq.worker.stages.read:PAUSES_S", "to": [0.05, 0.05]}
    workers = cluster.workers(sabotage=sooner)
    pid = reading(cluster, workers)
    with attached(pid, tmp_path / "calls", trace="openat,read", inject=["read:error=EIO"], paths=[paths[2]]):
        cluster.enqueue("stub:16", "--modality", "image")
        cluster.writer()
        cluster.producer()
        cluster.until_closed()
        recovery.injected(workers.said_times("storage_away"))
    assert workers.said_times("storage_away") == 3 * 2, "two pauses in each of three attempts"
    lost = [key for key in cluster.expected if key.startswith("2-")]
    cluster.assert_exact({"": "source_unreadable"}, without=lost)


@pytest.mark.fault("S1", "the input is so slow that one shard takes longer than a hang")
def test_slow_storage_is_not_taken_for_a_hang(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    (path,) = shards(cluster, 1, 2, 4 * 2**20)
    workers = cluster.workers(environment={"EMBQ_STALL_S": "4"})
    pid = reading(cluster, workers)
    log = tmp_path / "calls"
    with attached(pid, log, trace="read", inject=["read:delay_enter=1500ms"], paths=[path]):
        cluster.enqueue("stub:16", "--modality", "image")
        cluster.writer()
        cluster.producer()
        seconds = cluster.until_closed()
    recovery.injected(len(log.read_text().splitlines()))
    recovery.note("a shard that takes longer than EMBQ_STALL_S", seconds)
    assert seconds > 8
    assert workers.said_times("stuck") == workers.said_times("worker_died") == 0
    cluster.assert_exact()


# --- a full disk, and one that may not be written ---


@pytest.fixture
def disk(cluster: Cluster) -> Iterator[SmallDisk]:
    """A disk of 4 MB, on which the run's output will be."""
    disk = SmallDisk(4)
    (disk.path / "out").mkdir()
    cluster.root.symlink_to(disk.path / "out")
    yield disk
    cluster.close()
    disk.close()


def records(cluster: Cluster) -> int:
    """Records with results."""
    return sum(record["kind"] == "data" for record in cluster.records())


def assert_readable(cluster: Cluster) -> None:
    """Check that all committed files are whole."""
    status, stdout, stderr = ended("verify", cluster.root, deadline_s=DEADLINE_S)
    assert status == 0, stdout + stderr
    assert "ok so far" in stdout


@pytest.mark.fault("S3", "the disk is full at the writer")
@pytest.mark.parametrize("alone", [False, True], ids=["resident", "of one run"])
def test_a_writer_whose_disk_is_full_goes_on_when_there_is_room(
    cluster: Cluster, recovery: Recovery, disk: SmallDisk, alone: bool
) -> None:
    writer = cluster.begin(80, "stub:16?ms_per_sample=8", alone=alone, sabotage=SOON)
    workers = cluster.workers(count=2)
    cluster.until(lambda: records(cluster) >= 1)
    disk.fill()
    recovery.injected()
    if alone:
        assert writer.wait() == 74
        assert "error[no_space]" in writer.log
    else:
        cluster.until(lambda: writer.said_times("run_not_written") >= 3)
        assert "no space left" in writer.log
    assert_readable(cluster)
    disk.make_room()
    if alone:
        cluster.writer("--run", cluster.run())
    before = records(cluster)
    recovery.note("room is made -> first commit", cluster.until(lambda: records(cluster) > before), bar=10.0)
    cluster.until_closed()
    assert workers.said_times("worker_died") == 0
    cluster.assert_exact()


@pytest.mark.fault("S3", "the output becomes read-only, and writable again")
def test_a_writer_whose_disk_is_read_only_goes_on_when_it_is_not(
    cluster: Cluster, recovery: Recovery, disk: SmallDisk
) -> None:
    writer = cluster.begin(80, "stub:16?ms_per_sample=8", sabotage=SOON)
    workers = cluster.workers(count=2)
    cluster.until(lambda: records(cluster) >= 1)
    cluster.until(lambda: disk.set_read_only(True))
    recovery.injected()
    cluster.until(lambda: writer.said_times("run_not_written") >= 2)
    assert "Read-only file system" in writer.log
    assert_readable(cluster)
    before = records(cluster)
    assert disk.set_read_only(False)
    recovery.note("writable again -> first commit", cluster.until(lambda: records(cluster) > before), bar=10.0)
    cluster.until_closed()
    assert workers.said_times("worker_died") == 0
    cluster.assert_exact()


@pytest.mark.fault("S3", "the disk is full at a worker that stages its results")
def test_a_worker_that_cannot_stage_its_result_keeps_it(cluster: Cluster, recovery: Recovery, disk: SmallDisk) -> None:
    cluster.begin(120, "stub:16?ms_per_sample=8", environment=QUICK_LEASES)
    workers = cluster.workers("--transport", "staging", count=2, environment=QUICK_LEASES)
    cluster.until(lambda: records(cluster) >= 1)
    disk.fill()
    recovery.injected()
    cluster.until(lambda: workers.said_times("staging_full") == 2)
    time.sleep(2.0)  # what was in hand is embedded by then, and no more is claimed
    held = cluster.owners()
    assert 2 <= len(held) < cluster.units - cluster.finished()
    processes = [process.pid for process in workers.processes()]
    at_first = {u: age for u, age in leases_until(cluster).items() if u in held}
    cluster.until(lambda: all(leases_until(cluster).get(u, 0) > end + 8000 for u, end in at_first.items()))
    assert cluster.owners() == held, "two leases later the heartbeat has lost none"
    disk.make_room()
    before = records(cluster)
    recovery.note(
        "room is made -> staged results committed", cluster.until(lambda: records(cluster) > before), bar=20.0
    )
    cluster.until_closed()
    assert [process.pid for process in workers.processes()] == processes
    assert workers.said_times("staging_full") == 2
    output = cluster.assert_exact()
    assert output.records[-1]["totals"]["quarantined"] == 0


def leases_until(cluster: Cluster) -> dict[int, float]:
    """Unit -> ms of the broker's clock until which its lease lasts."""
    client = cluster.ledger.client()
    assert client is not None
    return {int(u): score for u, score in client.zrange(cluster.ledger.key("due"), 0, -1, withscores=True)}


@pytest.mark.fault("S4", "no fsync works for some seconds")
def test_a_writer_whose_disk_syncs_nothing_goes_on_when_it_does(
    cluster: Cluster, recovery: Recovery, tmp_path: Path
) -> None:
    if why := unavailable():
        pytest.skip(why)
    writer = cluster.begin(80, "stub:16?ms_per_sample=8", sabotage=SOON)
    cluster.workers(count=2)
    cluster.until(lambda: records(cluster) >= 1)
    with attached(writer.pid, tmp_path / "calls", trace="fsync", inject=["fsync:error=EIO"]):
        cluster.until(lambda: writer.said_times("run_not_written") >= 3)
        assert_readable(cluster)
    recovery.injected(len(calls_in(tmp_path / "calls", writer.pid)))
    before = records(cluster)
    recovery.note("fsync works -> first commit", cluster.until(lambda: records(cluster) > before), bar=10.0)
    cluster.assert_completes()


# --- what is left ---


@pytest.mark.fault("I7", "workers die between writing a result and publishing it, and the litter is collected")
@pytest.mark.parametrize("suffix", [RESULT_SUFFIX, PART_SUFFIX])
def test_gc_leaves_no_litter(cluster: Cluster, recovery: Recovery, short_tmp: Path, suffix: str) -> None:
    cluster.begin(60, "stub:16?ms_per_sample=5")
    kills = 3

    def killed(at: str, count: int, **more: str) -> dict[str, object]:
        return {"at": at, "do": "kill", "count": count, "marker": str(marks / at), "times": kills, **more}

    marks = short_tmp / "marks"
    marks.mkdir()
    sabotage = [killed("embq.worker.claim.lease:Lease.publish", 3), killed("os:rename", 5, match=suffix)]
    if suffix == PART_SUFFIX:
        sabotage.append(WRITES_PARTS)
    workers = cluster.workers("--transport", "staging", count=2, sabotage=sabotage)
    cluster.until(lambda: workers.said_times("worker_died") >= 2)
    staged = {path.name for path in (cluster.root / "_staging").iterdir()}
    assert len(staged) > 1
    # Beside those at work: only what is nobody's goes.
    cluster.collect_garbage()
    cluster.until(lambda: len(list(marks.iterdir())) == 2 * kills)
    recovery.injected(2 * kills)
    output = cluster.assert_completes()
    named = {file["path"].count(".") for record in output.records for file in record["files"]}
    assert (2 in named) == (suffix == PART_SUFFIX)

    assert {path.name for path in (cluster.root / "_staging").iterdir()} == {".shared"}
    assert list((cluster.root / "_tmp").iterdir()) == []
    client = cluster.broker.client()
    run = cluster.run().encode()
    assert [key for key in client.scan_iter() if run in key] == []
    assert not client.hexists("embq:runs", run)
    assert list(client.scan_iter("rq:job:*")) == list(client.scan_iter("rq:queue:embq.*")) == []
