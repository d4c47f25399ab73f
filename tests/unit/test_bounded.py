"""The queue between two stages: order, bounds, and giving up in time."""

from __future__ import annotations

import threading

from worker.stages.pipeline import BoundedQueue


def test_items_come_out_in_the_order_in_which_they_went_in() -> None:
    queue: BoundedQueue[int] = BoundedQueue()
    for item in range(5):
        assert queue.put(item, 0.1, 0)
    assert [queue.get(0) for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_a_full_queue_takes_nothing_more_until_something_left() -> None:
    queue: BoundedQueue[str] = BoundedQueue()
    assert queue.put("a", 0.6, 0)
    assert not queue.put("b", 0.6, 0.01)
    assert queue.get(0) == "a"
    assert queue.put("b", 0.6, 0)


def test_an_item_larger_than_the_queue_passes_alone() -> None:
    queue: BoundedQueue[str] = BoundedQueue()
    assert queue.put("large", 7.0, 0)
    assert not queue.put("small", 0.1, 0.01)
    assert queue.get(0) == "large"
    assert queue.put("small", 0.1, 0)


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
