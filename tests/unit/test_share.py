"""The share of a worker in the last units of a run."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from embq.core.queue.heartbeats import BriefReport
from embq.core.queue.worker_speeds import WorkerSpeed, keep_sum, other_speeds
from embq.worker.claim.claim_policy import EXACT_S, makespan

SPEEDS = st.lists(
    st.builds(WorkerSpeed, ahead_s=st.integers(0, 8).map(float), unit_s=st.sampled_from([0.25, 1.0, 2.5, 10.0])),
    min_size=1,
    max_size=5,
)


def one_after_the_other(left: int, workers: list[WorkerSpeed]) -> float:
    """Time at which all is done where each unit goes to the worker that finishes it first."""
    ends = [(worker.ahead_s + worker.unit_s, worker.unit_s) for worker in workers]
    heapq.heapify(ends)
    last = 0.0
    for _ in range(left):
        last, unit_s = ends[0]
        heapq.heapreplace(ends, (last + unit_s, unit_s))
    return last


@given(left=st.integers(1, 200), workers=SPEEDS)
def test_the_makespan_is_that_of_giving_each_unit_to_the_worker_that_finishes_it_first(
    left: int, workers: list[WorkerSpeed]
) -> None:
    end_s = makespan(left, workers)
    assert abs(end_s - one_after_the_other(left, workers)) < 2 * EXACT_S + 1e-6 * 10
    assert sum(worker.units_by(end_s) for worker in workers) >= left


def test_a_slow_worker_has_no_share_of_what_a_fast_one_finishes_before_it() -> None:
    fast, slow = WorkerSpeed(ahead_s=1.0, unit_s=1.0), WorkerSpeed(ahead_s=0.0, unit_s=10.0)
    assert slow.units_by(makespan(8, [fast, slow])) == 0, "the fast one has all eight done after nine seconds"
    assert slow.units_by(makespan(10, [fast, slow])) == 1, "of ten, the last would end after eleven"


def test_of_equal_workers_each_may_take_the_last_unit() -> None:
    workers = [WorkerSpeed(ahead_s=0.0, unit_s=1.0)] * 3
    assert [worker.units_by(makespan(1, workers)) for worker in workers] == [1, 1, 1]


class Kept:
    """A broker that keeps one key."""

    text: bytes | None = None

    def set(self, _key: str, text: str, **_: object) -> None:
        self.text = text.encode()


def test_the_sum_of_speeds_is_read_as_it_was_written_and_a_malformed_one_is_none() -> None:
    kept = Kept()
    reports = [(BriefReport(name=f"w{n}", ahead_s=1.0, unit_s=2.0 + n, held=1), 0.0) for n in range(3)]
    keep_sum(kept, "m", reports, at_ms=1_000)  # type: ignore[arg-type]
    assert [one.unit_s for one in other_speeds(kept.text, 1_000, "w1")] == [2.0, 4.0]
    assert other_speeds(kept.text, 1_000 + 4_000, "w1") == []
    for text in (b"", b"[]", b'{"at_ms": 1000, "groups": [[1, 1e999, 2.0, 0]]}', b'{"at_ms": 1000, "groups": [[1]]}'):
        assert other_speeds(text, 1_000, "w1") == []
    assert other_speeds(b'{"at_ms": 1000, "groups": [[18446744073709551616, 1.0, 2.0, 0]]}', 1_000, "w1") == []
