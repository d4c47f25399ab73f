"""The publish stage of a worker on a real ledger: how a result is staged, and what a disk does to that."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import DIM, FINGERPRINT, RunCase, sample, vector

from core.errors import OutputError
from core.hints import Hint
from worker.progress import ProgressBoard
from worker.publish import PublishStage
from worker.stats import Stats
from worker.work import Leases, UnitWork


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.fixture
def stage(leases: Leases) -> PublishStage:
    return PublishStage(
        leases, Stats(), ProgressBoard(), fingerprint=FINGERPRINT, dims={"text": DIM}, transport="staging"
    )


def embedded_unit(run: RunCase, leases: Leases, u: int) -> UnitWork:
    """A unit of 3 samples that has only to be published."""
    hint = Hint(run=run.info.run, gen=run.gen, u=u, unit=run.units[u])
    work = UnitWork(hint, run.record, run.ledger, run.claim(u), attempts=0, poison=frozenset())
    samples = [sample(u, ordinal) for ordinal in range(3)]
    work.add_rows(samples, {"text": np.array([vector(u, s.ordinal) for s in samples], run.record.rows.dtype)})
    work.end_of_read(3)
    leases.add(work)
    return work


def lead_its_file_to(run: RunCase, work: UnitWork, target: str) -> None:
    """What is written to the unit's temporary staging file goes elsewhere, the first time."""
    name = f".{work.unit_id}.{work.token.replace(':', '_')}.arrow"
    (run.layout.staging / name).symlink_to(target)


@pytest.fixture
def on_full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """The lines that say that the disk is full."""
    told: list[logging.LogRecord] = []
    keep = logging.Handler()
    keep.emit = told.append  # type: ignore[method-assign]
    keep.addFilter(lambda record: "staging_full" in record.getMessage())
    logging.getLogger("worker").addHandler(keep)
    yield told
    logging.getLogger("worker").removeHandler(keep)


def test_a_staged_result_becomes_rows(run: RunCase, stage: PublishStage, leases: Leases) -> None:
    writer = run.writer()
    stage.run(embedded_unit(run, leases, 0))
    writer.drain()
    run.assert_exact([0])
    assert leases.snapshot() == []


def test_a_full_disk_is_waited_out_with_the_result_in_hand(
    run: RunCase, stage: PublishStage, leases: Leases, on_full: list[logging.LogRecord]
) -> None:
    writer = run.writer()
    for u in (0, 1):
        work = embedded_unit(run, leases, u)
        lead_its_file_to(run, work, "/dev/full")
        stage.run(work)
        assert len(on_full) == u + 1, "said once for each time that it fills up"
    writer.drain()
    run.assert_exact([0, 1])
    assert stage.stats.busy_seconds()["full"] > 0


def test_a_full_disk_is_waited_for_only_as_long_as_the_lease_is_ours(
    run: RunCase, stage: PublishStage, leases: Leases, on_full: list[logging.LogRecord]
) -> None:
    run.writer()
    work = embedded_unit(run, leases, 0)
    lead_its_file_to(run, work, "/dev/full")

    class LosesTheLease(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            work.lost = True

    losing = LosesTheLease()
    logging.getLogger("worker").addHandler(losing)
    try:
        stage.run(work)
    finally:
        logging.getLogger("worker").removeHandler(losing)
    assert len(on_full) == 1
    assert leases.snapshot() == []
    assert {path.name for path in run.layout.staging.iterdir()} == {".shared"}
    assert run.client.hlen(run.key("pub")) == 0


def test_any_other_error_of_the_disk_ends_the_worker(
    run: RunCase, stage: PublishStage, leases: Leases, on_full: list[logging.LogRecord]
) -> None:
    run.writer()
    work = embedded_unit(run, leases, 0)
    lead_its_file_to(run, work, "/nowhere/at/all")
    with pytest.raises(OutputError):
        stage.run(work)
    assert on_full == []
    assert {path.name for path in run.layout.staging.iterdir()} == {".shared"}
