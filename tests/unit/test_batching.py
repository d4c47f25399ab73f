"""Forward passes are formed of waiting samples, and their results reach the units."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embq.core.errors import DeviceFullError, SourceError
from embq.core.units import Sample
from embq.worker.claim.lease import LeasedUnit
from embq.worker.embedders.base import Cost, PendingVectors, padded_tokens
from embq.worker.meter.meter import Meter, Throughput
from embq.worker.stages import embed as embed_module
from embq.worker.stages.batching import (
    CLEAN_PASSES,
    THREAD_SAMPLES,
    UNBOUNDED,
    WINDOW_S,
    Batch,
    Batcher,
    MemoryBudget,
)
from embq.worker.stages.embed import EmbedStage, can_wait
from embq.worker.stages.read import Chunk, EndOfUnit
from tests.support.fakes.clock import FakeClock
from tests.unit.test_stages import AnsweringLedger, make_work, stages, texts  # noqa: F401 - a fixture


def model(*, batch_size: int = 8, token_budget: int = 0, window: int = 8, cost: Cost = padded_tokens) -> Any:
    return SimpleNamespace(batch_size=batch_size, token_budget=token_budget, window=window, cost=cost)


def of_speed(per_s: int) -> Throughput:
    """Rate of a worker that embedded this many texts of one token in the last second."""
    clock = FakeClock()
    throughput = Throughput(clock)
    began = clock()
    clock.advance(1.0)
    throughput.batch_done(per_s, per_s, since=began)
    return throughput


def filled(embedder: Any, lengths: Sequence[int], throughput: Throughput | None = None) -> Batcher:
    batcher = Batcher(embedder, throughput or of_speed(1000))
    for number, tokens in enumerate(lengths):
        batcher.add(Batch([None], [Sample(ordinal=number, key=str(number))], [None], [tokens]))  # type: ignore[list-item]
    return batcher


def lengths_of(batcher: Batcher) -> list[list[int]]:
    return [list(batch.tokens) for batch in batcher.batches()]


def test_texts_of_like_length_meet_and_the_longest_come_first() -> None:
    batcher = filled(model(token_budget=60, window=100), [3, 50, 7, 50, 1, 20, 2, 9])
    batches = list(batcher.batches())
    assert [list(batch.tokens) for batch in batches] == [[50], [50], [20, 9, 7], [3, 2, 1]]
    assert [sample.ordinal for batch in batches[:2] for sample in batch.samples] == [1, 3], "equal ones stay in order"
    assert [padded_tokens(batch.tokens) for batch in batches] == [50, 50, 60, 9]
    assert len(batcher) == 0


def test_where_nothing_is_padded_a_pass_is_as_large_as_its_texts_together() -> None:
    batcher = filled(model(token_budget=60, window=100, cost=sum), [3, 50, 7, 50, 1, 20, 2, 9])
    assert lengths_of(batcher) == [[50], [50], [20, 9, 7, 3, 2, 1]]
    batcher = filled(model(batch_size=2, token_budget=60, window=100, cost=sum), [30, 30, 1, 70])
    assert lengths_of(batcher) == [[70], [30, 30], [1]]


def test_a_pass_has_no_more_samples_than_a_batch_and_a_text_beyond_the_budget_goes_alone() -> None:
    batcher = filled(model(batch_size=2, token_budget=60, window=100), [1, 1, 1, 70, 1])
    assert lengths_of(batcher) == [[70], [1, 1], [1, 1]]


def test_where_all_samples_are_alike_a_window_is_a_pass() -> None:
    batcher = filled(model(batch_size=4, window=4), [1] * 9)
    assert [batcher.is_full, lengths_of(batcher), len(batcher)] == [True, [[1] * 4], 5]
    assert [batcher.is_full, lengths_of(batcher), len(batcher)] == [True, [[1] * 4], 1]
    assert [batcher.is_full, lengths_of(batcher), len(batcher)] == [False, [[1]], 0]


def test_a_window_holds_as_much_as_the_device_does_in_some_seconds() -> None:
    embedder = model(batch_size=4, token_budget=3, window=100)
    for throughput, count in ((of_speed(1), int(WINDOW_S)), (of_speed(1000), 100), (Throughput(), 3)):
        batcher = filled(embedder, [1] * (count - 1), throughput)
        assert not batcher.is_full
        batcher = filled(embedder, [1] * (count + 5), throughput)
        assert batcher.is_full
        assert sum(map(len, lengths_of(batcher))) == count
        assert len(batcher) == 5


def test_what_waits_behind_a_window_is_seconds_of_work_as_well() -> None:
    slow, fast = of_speed(10), of_speed(1000)
    assert Batcher(model(window=1000), slow).samples_ahead == 10 * WINDOW_S
    assert Batcher(model(window=1000), fast).samples_ahead == 1000
    assert Batcher(model(batch_size=500, window=1000), slow).samples_ahead == 500, "no less than a pass"
    assert Batcher(model(window=1000), Throughput()).samples_ahead == 32
    assert Batcher(model(batch_size=8, window=8), fast, threads=16).samples_ahead == 16 * THREAD_SAMPLES
    assert Batcher(model(batch_size=8, window=8), slow, threads=16).samples_ahead == 10 * WINDOW_S


# --- the room for a pass ---


def test_after_a_pass_that_did_not_fit_the_next_are_smaller_and_grow_again() -> None:
    room = MemoryBudget(1000)
    room.was_too_small(600)
    assert room.tokens == 450, "smaller than what did not fit, which was less than the budget"
    room.was_too_small(900)
    assert room.tokens == 337
    sizes = []
    while not room.was_enough():
        if not sizes or sizes[-1] != room.tokens:
            sizes.append(room.tokens)
    assert sizes == sorted(sizes)
    assert len(sizes) > 5
    assert room.tokens == 1000
    assert not room.was_enough(), "said once"


def test_a_pass_that_did_not_fit_starts_the_wait_anew() -> None:
    room = MemoryBudget(1000)
    room.was_too_small(1000)
    for _ in range(CLEAN_PASSES - 1):
        room.was_enough()
    room.was_too_small(750)
    for _ in range(CLEAN_PASSES - 1):
        room.was_enough()
    assert room.tokens == 562
    room.was_enough()
    assert room.tokens > 562


def test_a_device_without_a_budget_gets_one_while_it_lacks_room() -> None:
    room = MemoryBudget(0)
    assert room.tokens == UNBOUNDED
    room.was_too_small(1000)
    assert room.tokens == 750
    while not room.was_enough():
        assert room.tokens <= 1000
    assert room.tokens == UNBOUNDED


def test_there_is_always_room_to_try_one_token() -> None:
    room = MemoryBudget(0)
    for _ in range(100):
        room.was_too_small(1)
    assert room.tokens == 1


# --- the stage ---


class Lengths:
    """A model whose vectors are the numbers of its samples, on a device that counts what it has in hand.

    Args:
        room: most padded tokens of a pass.
        late: whether it tells only when its vectors are asked for that there was no room.
    """

    dims = {"text": 1}  # noqa: RUF012
    fingerprint = "f"
    batch_size, token_budget, window = 100, 20, 100
    cost = staticmethod(padded_tokens)

    def __init__(self, room: int = 1000, *, under_way: bool = False, late: bool = False) -> None:
        self.room = room
        self.late = late
        self.under_way = under_way
        self.over = True
        self.passes: list[list[int]] = []
        self.on_device = self.most_on_device = 0

    def length(self, prepared: tuple[int, int]) -> int:
        return prepared[1]

    def embed(self, batch: Sequence[tuple[int, int]]) -> Mapping[str, np.ndarray]:
        self.passes.append([tokens for _, tokens in batch])
        too_large = len(batch) * max(tokens for _, tokens in batch) > self.room
        if too_large and not self.late:
            raise DeviceFullError("no room")
        self.on_device += 1
        self.most_on_device = max(self.most_on_device, self.on_device)

        def arrive() -> dict[str, np.ndarray]:
            self.on_device -= 1
            if too_large:
                raise DeviceFullError("no room")
            return {"text": np.array([[number] for number, _ in batch], dtype=np.float32)}

        return PendingVectors(["text"], arrive, is_over=lambda: self.over) if self.under_way else arrive()


def stage_of(stages: SimpleNamespace, embedder: Lengths) -> EmbedStage:  # noqa: F811
    stages.stats = Meter()
    return EmbedStage(embedder, stages.stats, hand_on=stages.finished.append)  # type: ignore[arg-type]


def give(stage: EmbedStage, work: LeasedUnit, lengths: Sequence[int]) -> None:
    samples = [Sample(ordinal=number, key=str(number), text="t") for number in range(len(lengths))]
    prepared: Future[Any] = Future()
    prepared.set_result((samples, [(sample.ordinal, lengths[sample.ordinal]) for sample in samples]))
    stage.add(Chunk(work, samples, prepared))
    stage.add(EndOfUnit(work, len(samples)))


def rows_of(work: LeasedUnit) -> dict[int, float]:
    values = np.concatenate(work.vectors["text"])[:, 0].tolist()
    return dict(zip((sample.ordinal for sample in work.samples), values, strict=True))


@pytest.mark.parametrize("under_way", [False, True], ids=["at once", "under way"])
def test_each_row_comes_back_to_its_sample_however_the_passes_were_formed(
    stages: SimpleNamespace,  # noqa: F811
    under_way: bool,
) -> None:
    embedder = Lengths(under_way=under_way)
    stage = stage_of(stages, embedder)
    works = [make_work(stages, texts(stages, f"{n}.txt", ["x"]), f"t{n}") for n in range(2)]
    lengths = [[3, 9, 1, 7, 2], [8, 2, 6]]
    for work, of_unit in zip(works, lengths, strict=True):
        give(stage, work, of_unit)
    stage.flush()
    assert [rows_of(work) for work in works] == [{n: n for n in range(5)}, {n: n for n in range(3)}]
    assert sorted(work.u for work in stages.finished) == [0, 0]
    assert not stage.has_waiting
    assert embedder.most_on_device == (2 if under_way else 1)
    assert stages.stats.tokens == sum(map(sum, lengths)) == sum(work.tokens for work in works)
    assert stages.stats.processed == sum(len(batch) * batch[0] for batch in embedder.passes)


def test_the_next_window_comes_together_pass_by_pass(stages: SimpleNamespace) -> None:  # noqa: F811
    class Small(Lengths):
        batch_size, token_budget, window = 2, 0, 6

        def embed(self, batch: Sequence[tuple[int, int]]) -> Mapping[str, np.ndarray]:
            left.append(len(coming))
            return super().embed(batch)

    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    samples = [Sample(ordinal=number, key=str(number), text="t") for number in range(14)]
    chunks = []
    for part in (samples[:6], *([sample] for sample in samples[6:])):
        prepared: Future[Any] = Future()
        prepared.set_result((part, [(sample.ordinal, 1) for sample in part]))
        chunks.append(Chunk(work, part, prepared))
    first, *coming = [*chunks, EndOfUnit(work, 14, SourceError("cut", code="shard_truncated"))]
    left: list[int] = []
    stage = stage_of(stages, Small())
    stage.next_item = lambda: coming.pop(0) if can_wait(coming[0]) else None
    stage.add(first)
    assert left == [9, 7, 5, 3, 1, 1]
    assert len(coming) == 1, "what drops samples in hand has to wait"
    assert len(stage.batcher) == 2
    not_prepared = Chunk(work, samples[:1], Future())
    assert not can_wait(not_prepared)


def test_a_device_is_at_work_until_its_pass_is_over_whenever_that_is_asked_for(
    stages: SimpleNamespace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    clock: FakeClock,
) -> None:
    monkeypatch.setattr(embed_module, "time", SimpleNamespace(monotonic=clock))
    clock.advance(1000)
    embedder = Lengths(under_way=True)
    embedder.over = False
    stage = stage_of(stages, embedder)
    assert stage.waiting_state == "starved"
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    give(stage, work, [10, 10])
    clock.advance(3)
    assert stage.waiting_state == "busy", "its thread waits for input meanwhile"
    clock.advance(1)
    embedder.over = True
    assert stage.waiting_state == "starved"
    clock.advance(16)
    assert stage.waiting_state == "starved"
    stage.flush()
    assert stages.stats.device_per_s() == (5.0, True), "20 tokens in 4 s, although they were fetched after 20"


@pytest.mark.parametrize("under_way", [False, True], ids=["at once", "under way"])
def test_a_machine_whose_clock_is_put_back_while_the_device_computes_goes_on(
    stages: SimpleNamespace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    under_way: bool,
) -> None:
    now = itertools.count(1_800_000_000, -86_400)
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    stage = stage_of(stages, Lengths(under_way=under_way))
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    give(stage, work, [10, 10, 10])
    assert stage.waiting_state in ("busy", "starved")
    stage.flush()
    assert rows_of(work) == {0: 0, 1: 1, 2: 2}
    rate = stages.stats.device_per_s()
    assert rate is not None
    assert rate[0] > 0


def test_a_unit_that_breaks_while_its_rows_are_under_way_ends_as_one_failure(stages: SimpleNamespace) -> None:  # noqa: F811
    stage = stage_of(stages, Lengths(under_way=True))
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    samples = [Sample(ordinal=n, key=str(n), text="t") for n in range(3)]
    prepared: Future[Any] = Future()
    prepared.set_result((samples, [(sample.ordinal, 10) for sample in samples]))
    stage.add(Chunk(work, samples, prepared))
    assert stage.has_waiting
    stage.add(EndOfUnit(work, 3, SourceError("cut", code="shard_truncated")))
    stage.flush()
    assert [(failure.ordinal, failure.code) for failure in work.failures] == [(None, "shard_truncated")]
    assert (work.samples, work.vectors) == ([], {})
    assert stages.finished == [work]


def test_a_pass_without_room_is_done_in_halves_and_what_never_fits_is_one_failure(stages: SimpleNamespace) -> None:  # noqa: F811
    embedder = Lengths(room=12)
    stage = stage_of(stages, embedder)
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    give(stage, work, [4, 4, 4, 4, 4, 30, 4, 4, 4, 4])
    stage.flush()
    assert [(failure.ordinal, failure.code) for failure in work.failures] == [(5, "out_of_memory")]
    assert "30 tokens" in work.failures[0].message
    assert rows_of(work) == {n: n for n in range(10) if n != 5}
    # The budget of 20 became 15 with the first pass, and 11 with the text of 30.
    assert embedder.passes == [[4] * 5, [4] * 2, [4] * 3, [30], [4] * 2, [4] * 2]
    assert stages.stats.memory_full == 2
    assert stages.finished == [work]


def test_a_pass_without_room_beside_another_one_is_tried_again_alone(stages: SimpleNamespace) -> None:  # noqa: F811
    class Shared(Lengths):
        """A device that has room for one pass at a time."""

        def embed(self, batch: Sequence[tuple[int, int]]) -> Mapping[str, np.ndarray]:
            self.room = 0 if self.on_device else 1000
            return super().embed(batch)

    embedder = Shared(under_way=True)
    stage = stage_of(stages, embedder)
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    give(stage, work, [20, 20, 20])
    stage.flush()
    assert work.failures == []
    assert rows_of(work) == {n: n for n in range(3)}


def test_a_pass_that_finds_no_room_only_later_is_done_again_and_the_others_stay(stages: SimpleNamespace) -> None:  # noqa: F811
    embedder = Lengths(room=12, under_way=True, late=True)
    stage = stage_of(stages, embedder)
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    give(stage, work, [4, 4, 4, 4, 4, 30, 4, 4, 4, 4])
    stage.flush()
    assert [(failure.ordinal, failure.code) for failure in work.failures] == [(5, "out_of_memory")]
    assert rows_of(work) == {n: n for n in range(10) if n != 5}
    assert embedder.on_device == 0
    assert stages.finished == [work]


def test_a_device_that_is_full_for_a_while_gets_fewer_images_at_once_and_later_as_many_as_before(
    stages: SimpleNamespace,  # noqa: F811
) -> None:
    class Images(Lengths):
        """All alike, so that only their number bounds a pass."""

        batch_size, token_budget, window = 16, 0, 16

    embedder = Images(room=5, under_way=True)
    stage = stage_of(stages, embedder)
    for number in range(10):
        work = make_work(stages, texts(stages, f"{number}.txt", ["x"]), f"t{number}")
        give(stage, work, [1] * 2000)
        stage.flush()
        assert not work.failures
        assert rows_of(work) == {n: n for n in range(2000)}
        embedder.room = 1000
    sizes = [len(batch) for batch in embedder.passes]
    assert sizes[:8] == [16, 8, 4, 4, 8, 8, 4, 4], "in halves, and once more where another pass was under way"
    assert max(sizes[8:100]) <= 5, "the next ones are no larger than what fits"
    assert sizes[-2] == 16
    assert stage.batcher.room.tokens == UNBOUNDED


def test_an_image_that_does_not_fit_even_alone_is_a_failure_that_speaks_of_no_tokens(
    stages: SimpleNamespace,  # noqa: F811
) -> None:
    class Images(Lengths):
        batch_size, token_budget, window = 4, 0, 4

    stage = stage_of(stages, Images(room=0))
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    give(stage, work, [1] * 6)
    assert {failure.code for failure in work.failures} <= {"out_of_memory"}
    stage.flush()
    assert sorted(failure.ordinal for failure in work.failures if failure.ordinal is not None) == list(range(6))
    assert "token" not in work.failures[0].message
