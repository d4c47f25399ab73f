"""Samples that are being prepared and the device wait for each other, through a bounded queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from embq.core.models import ModelConfig
from embq.core.queue.hints import Hint
from embq.core.queue.runs import RunRecord
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.stages import pipeline as pipeline_module
from embq.worker.stages.pipeline import LINGER_S, BoundedQueue, Pipeline, Publisher
from embq.worker.stages.read import CHUNK_SAMPLES
from tests.support.waiting import wait_until

DEADLINE_S = 60.0
MODEL = ModelConfig(spec="stub:8", modalities=("text",), precision="fp32")


def complete(pipeline: Pipeline, leases: Leases, works: Sequence[LeasedUnit]) -> None:
    """Run the pipeline until it has finished these units."""
    for work in works:
        leases.add(work)
        pipeline.submit(work)
    pipeline.start()
    try:
        wait_until(lambda: pipeline.error is not None or not leases.snapshot(), DEADLINE_S)
    finally:
        pipeline.close()
    assert pipeline.error is None


class Kept(Publisher):
    """Stands for the ledger and the publish stage."""

    def __init__(self, leases: Leases) -> None:
        self.leases = leases

    def start(self, held: Any) -> set[str]:
        return set()

    def run(self, work: LeasedUnit) -> None:
        self.leases.remove(work)


@pytest.mark.parametrize("patient", [True, False])
def test_the_device_waits_for_samples_that_are_being_prepared_but_not_for_ever(
    patient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "PREPARING_S", DEADLINE_S if patient else 0.0)
    source = tmp_path / "texts.txt"
    source.write_text("".join(f"text {n}\n" for n in range(2 * CHUNK_SAMPLES)))
    (unit,) = SOURCES["lines"].split(str(source), ReadOptions())
    embedder = load(MODEL, "cpu")
    assert embedder.batch_size == 2 * CHUNK_SAMPLES
    leases = Leases()
    kept, passes, embedded = Kept(leases), [], threading.Event()
    prepare, embed = embedder.prepare, embedder.embed

    def prepare_the_second_chunk_late(samples: Any) -> Any:
        if samples[0].ordinal:
            wait_until(lambda: pipeline.embed.has_waiting or embedded.is_set(), DEADLINE_S)
            if patient:
                time.sleep(3 * LINGER_S)  # decoding takes its time
            else:
                assert embedded.wait(DEADLINE_S), "the device waited for what was not ready"
        return prepare(samples)

    def counted(batch: Any) -> Any:
        passes.append(len(batch))
        embedded.set()
        return embed(batch)

    monkeypatch.setattr(embedder, "prepare", prepare_the_second_chunk_late)
    monkeypatch.setattr(embedder, "embed", counted)
    pipeline = Pipeline(embedder, leases, Meter(), kept, prefetch=1)
    record = RunRecord(run="r", output="/nowhere", model=MODEL, units=1)
    hint = Hint(run="r", gen="1-0", u=0, unit=unit)
    work = LeasedUnit(hint, record, kept, "t", attempts=0, poison=frozenset())  # type: ignore[arg-type]
    complete(pipeline, leases, [work])
    assert len(work.samples) == 2 * CHUNK_SAMPLES
    assert passes == ([2 * CHUNK_SAMPLES] if patient else [CHUNK_SAMPLES] * 2)


# --- the queue between two stages ---


def test_items_come_out_in_the_order_in_which_they_went_in() -> None:
    queue: BoundedQueue[int] = BoundedQueue()
    for item in range(5):
        assert queue.put(item, 0.1, 0)
    assert [queue.get(0) for _ in range(6)] == [0, 1, 2, 3, 4, None]


@pytest.mark.parametrize(("first", "second"), [(0.6, 0.6), (7.0, 0.1)], ids=["full", "an item larger than the queue"])
def test_a_full_queue_takes_nothing_more_until_something_left(first: float, second: float) -> None:
    queue: BoundedQueue[str] = BoundedQueue()
    assert queue.put("a", first, 0)
    assert not queue.put("b", second, 0.01)
    assert queue.get(0) == "a"
    assert queue.put("b", second, 0)


def test_many_small_shares_leave_no_rounding_behind() -> None:
    queue: BoundedQueue[int] = BoundedQueue()
    for _ in range(10_000):
        assert queue.put(0, 0.1, 0)
        assert queue.get(0) == 0
    assert queue.put(0, 1.0, 0)


def test_a_waiting_reader_is_woken_by_a_writer() -> None:
    queue: BoundedQueue[int] = BoundedQueue()
    found: list[int | None] = []
    reader = threading.Thread(target=lambda: found.append(queue.get(30)))
    reader.start()
    assert queue.put(7, 0.1, 0)
    reader.join(30)
    assert found == [7]
