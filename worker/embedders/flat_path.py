"""Texts through a model without padding, where the model, the device and its arithmetic allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from core.errors import DeviceFullError
from core.service.log import Events
from worker.embedders.device import foreign_faults
from worker.embedders.flat import FlatTexts, flattened
from worker.embedders.flat_attention import Kernel
from worker.embedders.flat_trunk import FlatTrunk, is_flattenable
from worker.embedders.nearness import PROBES, Nearness
from worker.embedders.paths import FLAT, PATHS
from worker.embedders.tokens import TokenRow
from worker.embedders.transfer import Sender
from worker.embedders.trial import check_device

LONGEST_PROBE = 512
"""Words of the longest text that is tried."""

WORDS = ("the", "device", "reads", "texts", "of", "any", "length", "long", "ones", "beside", "short", "ones")

Head = Callable[[torch.Tensor, FlatTexts], torch.Tensor]
"""Vectors of shape (texts, dim) from the states of their tokens, which have shape (tokens, dim)."""

Run = Callable[[Sequence[TokenRow]], Mapping[str, torch.Tensor]]
"""One forward pass: output -> tensor of shape (texts, dim)."""

log = Events("worker")


class FlatPath:
    """From token rows to vectors: one row of all tokens, the trunk, and what makes vectors of its states."""

    def __init__(self, trunk: Any, head: Head, kernel: Kernel, sender: Sender) -> None:
        self._trunk = FlatTrunk(trunk, kernel)
        self._head = head
        self._sender = sender
        self._dtype = self._trunk.dtype

    @property
    def is_open(self) -> bool:
        """Whether the trunk computes in the type for which the kernel was chosen: not while it recomputes in fp32."""
        return self._trunk.dtype == self._dtype

    def run(self, batch: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """See `Run`."""
        texts = flattened(batch, self._sender)
        return {"text": self._head(self._trunk.states(texts), texts)}


def flat_path(
    trunk: Any,
    head: Head | None,
    kernel: Kernel | None,
    sender: Sender,
    *,
    padded: Run,
    in_fp32: Callable[[Sequence[TokenRow]], np.ndarray],
    rows: Callable[[Sequence[str]], Sequence[Any]],
    model: str,
) -> FlatPath | None:
    """The flat path of a model where there is one as good as the padded one; the log says which it is.

    Args:
        head: None where the model does something with padded states that has no flat form here.
        kernel: None where the device has none for this precision.
        padded: the other path.
        in_fp32: vectors of texts by the other path with the weights in fp32.
        rows: tokenises texts.
        model: the spec, for the log.

    Raises DeviceError where the device is broken, perhaps by the kernel.
    """
    if kernel is None or head is None or not is_flattenable(trunk):
        why = "kernel" if kernel is None else "architecture" if not is_flattenable(trunk) else "modules"
        log.info("attention", model=model, path="padded", lacks=why)
        return None
    if FLAT in PATHS.without:
        log.warning("attention", model=model, path="padded", failed="the process before this one died with it")
        return None
    path = FlatPath(trunk, head, kernel, sender)
    probes = [row for row in rows(probe_texts()) if isinstance(row, Mapping)]
    try:
        exact = torch.from_numpy(in_fp32(probes))
        with foreign_faults(), torch.inference_mode():
            nearness = Nearness(padded(probes)["text"], exact)
    except DeviceFullError as error:
        log.warning("attention", model=model, path="padded", failed=f"no room for a trial: {error.message}")
        return None
    PATHS.try_out(FLAT)
    try:
        with torch.inference_mode():
            vectors = path.run(probes)["text"]
            why = nearness.refusal(vectors)
    except (RuntimeError, TypeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        why = f"{type(error).__name__}: {first}"[:300]
        check_device(lambda: padded(probes)["text"].cpu(), error)
    PATHS.settle(FLAT, is_taken=not why)
    if why:
        log.warning("attention", model=model, path="padded", failed=why)
        return None
    log.info("attention", model=model, path="flat", error_ratio=round(nearness.ratio(vectors), 3))
    return path


def probe_texts() -> list[str]:
    """Texts of 1 to 512 words, long ones beside short ones."""
    counts = np.geomspace(1, LONGEST_PROBE, PROBES).astype(int).tolist()
    texts = [" ".join(WORDS[(count + n) % len(WORDS)] for n in range(count)) for count in counts]
    return texts[::2] + texts[1::2][::-1]
