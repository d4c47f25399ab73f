"""Pool of slabs for decoded images, which decode threads fill and devices read.

A slab holds `ROWS` images one behind the other, page-locked where a CUDA device reads them. The images of a chunk lie
next to each other, and travel in one copy where none of them failed.

**Reuse.** A `Row` refers to its slab, and so does the thread that fills it. When the last reference goes, the memory
returns to the pool. There is no count of our own that an error could leave wrong: a slab that an exception still refers
to is kept too long, never too short. So the
one rule for readers of pixels is to hold the rows until they are done with them. The embed stage does so until the
vectors have arrived (`embq.worker.stages.embed.InFlight`). A copy to a device may outlast the call that began it: code
that begins one holds the rows until it has seen the copy's event (`Uploader`), whatever became of the pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from embq.worker.embedders.device.errors import using

ROWS = 32
"""Images of a slab: as many as one thread prepares at a time (`embq.worker.stages.read.CHUNK_SAMPLES`)."""


class Slab:
    """Memory for some images, which is back with the others when nothing refers to this any more.

    Attributes:
        memory: uint8 of shape (ROWS, height, width, 3).
        array: the same memory for numpy, whose views keep the interpreter's lock; each of torch's lets it go.
    """

    __slots__ = ("_free", "array", "memory")

    def __init__(self, memory: torch.Tensor, free: deque[torch.Tensor]) -> None:
        self.memory = memory
        self.array: np.ndarray = memory.numpy()
        self._free = free

    def __del__(self) -> None:
        # In any thread and in the middle of anything, so without a lock: appending to a deque is one step.
        self._free.append(self.memory)


class Row(NamedTuple):
    """One decoded image. Its pixels are its own for as long as the row is held, and no longer."""

    slab: Slab
    place: int

    @property
    def pixels(self) -> torch.Tensor:
        """A view: uint8 of shape (height, width, 3)."""
        return self.slab.memory[self.place]

    @property
    def array(self) -> np.ndarray:
        """The same view of numpy's."""
        pixels: np.ndarray = self.slab.array[self.place]
        return pixels


class SlabPool:
    """Hands out rows to decode threads.

    Args:
        device: that reads the rows. For a CUDA device memory is page-locked, so that it copies while the process goes
            on; torch rounds each piece of that up to a power of two.

    Attributes:
        row_bytes: of one image.
        allocated: slabs so far; each is used again and again.
    """

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.row_bytes = height * width * 3
        self.allocated = 0
        self._shape = (ROWS, height, width, 3)
        self._device = device
        self._free: deque[torch.Tensor] = deque()
        self._making = threading.Lock()
        self._mine = threading.local()

    def rows(self, count: int) -> list[Row]:
        """The calling thread's next rows, at most `ROWS`, which lie next to each other.

        Raises DeviceError or DeviceFullError if no memory can be page-locked.
        """
        slab, at = getattr(self._mine, "next", None) or (None, ROWS)
        if slab is None or at + count > ROWS:
            self._mine.next = None  # what may be the slab that is taken
            slab, at = self._taken(), 0
        self._mine.next = (slab, at + count) if at + count < ROWS else None
        return [Row(slab, place) for place in range(at, at + count)]

    def _taken(self) -> Slab:
        try:
            memory = self._free.pop()
        except IndexError:
            # Outside of inference mode, or nobody could write to it there.
            with using(self._device), torch.inference_mode(False):
                memory = torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            with self._making:
                self.allocated += 1
        return Slab(memory, self._free)


def together(rows: Sequence[Row]) -> np.ndarray:
    """The pixels of rows that were taken together: a view of shape (len(rows), height, width, 3)."""
    first = rows[0]
    pixels: np.ndarray = first.slab.array[first.place : first.place + len(rows)]
    return pixels


def runs(rows: Sequence[Row]) -> Iterator[torch.Tensor]:
    """The pixels of the rows in their order, in as few pieces as they lie in: uint8 of shape (some, height, width, 3).

    The pieces are views, and end with the rows.
    """
    start = 0
    for at in range(1, len(rows) + 1):
        if at < len(rows) and rows[at].slab is rows[at - 1].slab and rows[at].place == rows[at - 1].place + 1:
            continue
        first = rows[start]
        yield first.slab.memory[first.place : first.place + at - start]
        start = at


def gathered(rows: Sequence[Row]) -> torch.Tensor:
    """The pixels of one row or more, uint8 of shape (rows, height, width, 3): a view if they are one run."""
    pieces = list(runs(rows))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
