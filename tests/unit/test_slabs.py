"""Rows of slabs: memory for decoded images that is used again, and never while somebody may still read it."""

from __future__ import annotations

import gc
import queue
import threading

import numpy as np
import pytest

from embq.worker.embedders.device.placement import on_device
from embq.worker.embedders.image.buffer_pool import ROWS, Row, SlabPool, gathered, runs, together
from embq.worker.embedders.image.upload import BUFFERS, Uploader
from tests.support.lazy import lazy

torch = lazy("torch")


CPU = torch.device("cpu")


def filled(slabs: SlabPool, *values: int) -> list[Row]:
    """A row for each value, all of it that value."""
    rows = [slabs.rows(1)[0] for _ in values]
    for row, value in zip(rows, values, strict=True):
        row.array.fill(value)
    return rows


def values(pixels: torch.Tensor) -> list[int]:
    """Value of each row of pixels of shape (rows, height, width, 3); -1 where it has several."""
    return [int(row.min()) if row.min() == row.max() else -1 for row in pixels]


def test_the_rows_of_one_thread_are_one_run_and_no_copy_is_made_of_it() -> None:
    slabs = SlabPool(4, 6, CPU)
    rows = filled(slabs, *range(10))
    assert rows[0].pixels.shape == (4, 6, 3)
    assert rows[0].pixels.dtype == torch.uint8
    batch = gathered(rows)
    assert values(batch) == list(range(10))
    assert batch.data_ptr() == rows[0].slab.memory.data_ptr()
    assert slabs.allocated == 1


def test_a_batch_over_several_slabs_and_with_gaps_is_in_order() -> None:
    slabs = SlabPool(2, 2, CPU)
    rows = filled(slabs, *range(2 * ROWS + 3))
    del rows[5], rows[ROWS : ROWS + 2]
    rows.append(rows[0])
    lengths = [len(piece) for piece in runs(rows)]
    assert lengths == [5, ROWS - 6, 1, ROWS - 3, 3, 1]
    assert values(gathered(rows)) == [int(row.pixels[0, 0, 0]) for row in rows]


def test_the_rows_of_a_chunk_lie_next_to_each_other_and_a_row_that_is_left_out_makes_two_runs() -> None:
    slabs = SlabPool(2, 2, CPU)
    for count in (5, 20, 20, ROWS):
        rows = slabs.rows(count)
        together(rows)[:] = np.arange(count)[:, None, None, None]
        assert [len(piece) for piece in runs(rows)] == [count]
        assert values(gathered(rows)) == list(range(count))
    del rows[3]
    assert [len(piece) for piece in runs(rows)] == [3, ROWS - 4]


def test_memory_is_used_again_once_the_last_of_its_rows_is_gone_and_not_before() -> None:
    slabs = SlabPool(2, 2, CPU)
    rows = filled(slabs, *range(ROWS))
    memory = rows[0].slab.memory
    last = rows[7]
    del rows
    for _ in range(3 * ROWS):
        filled(slabs, 99)
    assert int(last.pixels[0, 0, 0]) == 7, "one row keeps all of its slab"
    assert slabs.allocated == 2
    del last
    pointers = {row.slab.memory.data_ptr() for row in filled(slabs, *[1] * 2 * ROWS)}
    assert memory.data_ptr() in pointers
    assert slabs.allocated == 2


def test_what_an_error_still_refers_to_is_kept_and_comes_back_with_it() -> None:
    slabs = SlabPool(2, 2, CPU)

    def failing() -> None:
        rows = filled(slabs, *[5] * ROWS)
        raise RuntimeError(f"after {len(rows)} rows")

    try:
        failing()
    except RuntimeError as error:
        kept = error
    filled(slabs, *[1] * ROWS)
    assert slabs.allocated == 2
    assert kept.__traceback__ is not None
    del kept
    gc.collect()
    filled(slabs, *[1] * 2 * ROWS)
    assert slabs.allocated == 2


def test_threads_fill_slabs_of_their_own_and_a_slow_reader_finds_its_rows_as_they_were() -> None:
    """Given a device that reads a batch long after it got it, when threads go on filling, then no pixel has changed."""
    slabs, chunks, threads, each = SlabPool(8, 8, CPU), 12, 4, 20
    waiting: queue.Queue[list[tuple[int, Row]]] = queue.Queue(maxsize=2)

    def decode(number: int) -> None:
        for chunk in range(chunks):
            marks = [(number * chunks + chunk + place) % 251 for place in range(each)]
            waiting.put(list(zip(marks, filled(slabs, *marks), strict=True)))

    workers = [threading.Thread(target=decode, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    in_flight: list[list[tuple[int, Row]]] = []
    for _ in range(threads * chunks):
        in_flight.append(waiting.get(timeout=30))
        if len(in_flight) > 3:
            batch = in_flight.pop(0)
            assert values(gathered([row for _, row in batch])) == [mark for mark, _ in batch]
            assert {row.slab.memory.data_ptr() for _, row in batch}.isdisjoint(
                {memory.data_ptr() for memory in slabs._free}
            )
    for worker in workers:
        worker.join()
    # In flight, waiting, in hand of each thread, each over two slabs at most.
    assert slabs.allocated <= 2 * (4 + 2 + threads)


def test_memory_that_is_made_in_inference_mode_is_written_outside_of_it() -> None:
    slabs = SlabPool(2, 2, CPU)
    with torch.inference_mode():
        filled(slabs, *range(ROWS))
    assert values(gathered(filled(slabs, 7, 8))) == [7, 8]
    assert slabs.allocated == 1


def test_a_thread_that_ends_gives_its_slab_back() -> None:
    slabs = SlabPool(2, 2, CPU)
    for _ in range(5):
        thread = threading.Thread(target=filled, args=(slabs, 1, 2, 3))
        thread.start()
        thread.join()
    assert slabs.allocated == 1


def test_on_a_cpu_the_numbers_are_read_from_the_rows_themselves() -> None:
    slabs = SlabPool(2, 2, CPU)
    seen: list[torch.Tensor] = []
    rows = filled(slabs, 3, 4)
    numbers = Uploader(CPU).send(rows, lambda pixels: seen.append(pixels) or pixels.float())
    assert numbers[:, 0, 0, 0].tolist() == [3, 4]
    assert seen[0].data_ptr() == rows[0].pixels.data_ptr()


# --- on a GPU ---

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.gpu
@needs_gpu
@torch.inference_mode()
def test_no_row_is_written_before_it_is_copied_and_no_buffer_before_it_is_read() -> None:
    """Given a device that is far behind, when batches are sent and their rows let go, then all arrive as they were."""
    device = torch.device("cuda")
    slabs = SlabPool(224, 224, device)
    busy = torch.randn(4096, 4096, device=device)

    def read(pixels: torch.Tensor) -> torch.Tensor:
        nonlocal busy
        for _ in range(4):
            busy = torch.nn.functional.normalize(busy @ busy)
        return torch.stack([pixels.flatten(1).amin(dim=1), pixels.flatten(1).amax(dim=1)])

    uploader = Uploader(device)
    sent = []
    for number in range(10 * BUFFERS):
        marks = [(number * 7 + place) % 251 for place in range(1 + (number * 37) % 150)]
        sent.append((marks, uploader.send(filled(slabs, *marks), read)))
    for marks, (low, high) in sent:
        assert low.tolist() == high.tolist() == marks
    assert slabs.allocated * ROWS < sum(len(marks) for marks, _ in sent) / 2, "memory was used again"


@pytest.mark.gpu
@needs_gpu
@torch.inference_mode()
def test_a_copy_from_a_slab_does_not_wait_for_the_device() -> None:
    device = torch.device("cuda")
    slabs = SlabPool(224, 224, device)
    uploader = Uploader(device)
    rows = filled(slabs, *range(ROWS))
    assert rows[0].slab.memory.is_pinned()
    uploader.send(rows, torch.Tensor.float)
    torch.cuda.synchronize()
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        busy = busy @ busy
    behind = torch.cuda.Event()
    behind.record()
    numbers = uploader.send(rows, torch.Tensor.float)
    assert not behind.query(), "the host came back while the device was still at what was begun before"
    assert numbers[:, 0, 0, 0].tolist() == list(range(ROWS))


@pytest.mark.gpu
@needs_gpu
def test_ids_travel_while_the_device_is_busy_and_arrive_as_they_were() -> None:
    device = torch.device("cuda")
    there = [torch.zeros(256, 77, dtype=torch.int64).pin_memory() for _ in range(20)]
    del there  # torch has that memory now: making it may wait for the device
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        busy = busy @ busy
    behind = torch.cuda.Event()
    behind.record()
    sent = [on_device(torch.full((256, 77), number), device) for number in range(20)]
    assert not behind.query(), "the host came back while the device was still at what was begun before"
    assert [(int(one.min()), int(one.max())) for one in sent] == [(number, number) for number in range(20)]
