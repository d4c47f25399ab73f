"""Copies of token ids to a device through reused pinned memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from embq.worker.embedders.device.errors import using

SLOTS = 4
"""Copies that may be under way at once: that of the next pass, those that the device still reads, and one to spare."""

LEAST_NUMBERS = 1 << 16
"""Size of a slot in numbers at first; it doubles when it is too small."""


class PinnedBuffer:
    """A piece of pinned memory, and when the last copy out of it was done."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.int32)
        self.copied: Any = None

    def filled(self, parts: Sequence[np.ndarray], count: int) -> torch.Tensor:
        """The parts one after the other in this memory; waits until what was in it is copied."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.memory) < count:
            # Pinning takes longer than a copy, so it is done as rarely as doubling allows.
            self.memory = torch.empty(max(LEAST_NUMBERS, 1 << (count - 1).bit_length()), dtype=torch.int32).pin_memory()
        np.concatenate(parts, out=self.memory.numpy()[:count])
        return self.memory[:count]


class PinnedSender:
    """Sends int32 numbers to one device. For one thread.

    A copy from pinned memory is queued and not waited for. It goes by the stream that computes: the ids of a pass are
    too few for a stream of their own to gain anything.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots = [PinnedBuffer() for _ in range(SLOTS)] if device.type == "cuda" else []
        self._turn = 0

    def send(self, parts: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Each of the parts on the device; int32 of shape (numbers,). One copy for all."""
        ends = list(itertools.accumulate(map(len, parts)))
        sent = self._sent(parts, ends[-1])
        return [sent[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]

    def _sent(self, parts: Sequence[np.ndarray], count: int) -> torch.Tensor:
        if not self._slots:
            return torch.from_numpy(np.concatenate(parts)).to(self.device)
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        with using(self.device):
            sent = slot.filled(parts, count).to(self.device, non_blocking=True)
            slot.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            slot.copied.record()
        return sent
