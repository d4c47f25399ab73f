"""Texts through a model without padding, where the model, the device and its arithmetic allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from core.log import Events
from worker.embedders.flat import FlatTexts, flattened
from worker.embedders.flat_attention import Kernel
from worker.embedders.flat_trunk import FlatTrunk, is_flattenable
from worker.embedders.tokens import TokenRow
from worker.embedders.transfer import Sender

LEAST_COSINE = 0.9999
"""Between the vectors of a text in a flat and in a padded batch, on the device itself."""

PROBES, LONGEST_PROBE = 16, 512
"""Texts, and words of the longest of them."""

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
    rows: Callable[[Sequence[str]], Sequence[Any]],
    model: str,
) -> FlatPath | None:
    """The flat path of a model where there is one that gives the vectors of the padded one; the log says which it is.

    Args:
        head: None where the model does something with padded states that has no flat form here.
        kernel: None where the device has none for this precision.
        padded: the other path.
        rows: tokenises texts.
        model: the spec, for the log.
    """
    if kernel is None or head is None or not is_flattenable(trunk):
        why = "kernel" if kernel is None else "architecture" if not is_flattenable(trunk) else "modules"
        log.info("attention", model=model, path="padded", lacks=why)
        return None
    path = FlatPath(trunk, head, kernel, sender)
    try:
        with torch.inference_mode():
            probes = [row for row in rows(probe_texts()) if isinstance(row, Mapping)]
            cosine = least_cosine(path.run(probes)["text"], padded(probes)["text"])
    except (RuntimeError, TypeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        log.warning("attention", model=model, path="padded", failed=f"{type(error).__name__}: {first}"[:300])
        return None
    if cosine < LEAST_COSINE:
        log.warning("attention", model=model, path="padded", min_cosine=round(cosine, 6), least=LEAST_COSINE)
        return None
    log.info("attention", model=model, path="flat", min_cosine=round(cosine, 6))
    return path


def least_cosine(some: torch.Tensor, others: torch.Tensor) -> float:
    """The least cosine between rows of the same number; -1 where one is no number."""
    cosines = cosine_similarity(some.double(), others.double())
    return float(torch.where(cosines.isfinite(), cosines, -1.0).min())


def probe_texts() -> list[str]:
    """Texts of 1 to 512 words, long ones beside short ones."""
    counts = np.geomspace(1, LONGEST_PROBE, PROBES).astype(int).tolist()
    texts = [" ".join(WORDS[(count + n) % len(WORDS)] for n in range(count)) for count in counts]
    return texts[::2] + texts[1::2][::-1]
